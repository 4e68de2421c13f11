import { type Follower, hasHole, notAsked } from './follow.js'
import { LogFault, type StreamLog } from './port.js'

/** Followers per read. After a lost bell all of them read: one batch after another. */
const cursorsMax = 1_000
const backoffMinMs = 50
const backoffMaxMs = 1_000

export interface ReadLaneOptions {
  log: StreamLog
  patienceMs: number
  warn(fields: object, message: string): void
}

/**
 * The reads of one log: one call at a time, for all followers that wait and may be behind.
 *
 *   idle ──ask──► reading ──answer──► idle, or reading for those that asked meanwhile
 *                    └──fault──► pausing ──back-off over──► reading: the same followers first
 *
 * A follower that has waited for patienceMs gets a fault, also when a call never answers.
 */
export class ReadLane {
  readonly #options: ReadLaneOptions
  #queue: Follower[] = []
  #flight: readonly Follower[] | null = null
  #cursorsMax = cursorsMax
  #failures = 0
  #isScheduled = false
  #isClosed = false
  #pause: NodeJS.Timeout | undefined
  #expiry: NodeJS.Timeout | undefined

  constructor(options: ReadLaneOptions) {
    this.#options = options
  }

  ask(follow: Follower): void {
    if (follow.isQueued) return
    if (follow.askedMs === notAsked) follow.askedMs = performance.now()
    this.#watch(this.#options.patienceMs)
    // Its answer is on the way; then it is clear whether that is enough.
    if (follow.flight !== null) return
    follow.isQueued = true
    this.#queue.push(follow)
    this.#schedule()
  }

  close(): void {
    this.#isClosed = true
    this.#flight = null
    this.#queue = []
    clearTimeout(this.#pause)
    clearTimeout(this.#expiry)
  }

  /** In a microtask: followers that start to wait in the same turn share a read. */
  #schedule(): void {
    if (this.#isScheduled || this.#flight !== null || this.#pause !== undefined) return
    this.#isScheduled = true
    queueMicrotask(this.#read)
  }

  readonly #read = (): void => {
    this.#isScheduled = false
    if (this.#isClosed || this.#flight !== null || this.#pause !== undefined) return
    const batch: Follower[] = []
    let looked = 0
    for (const follow of this.#queue) {
      if (batch.length >= this.#cursorsMax) break
      looked++
      follow.isQueued = false
      if (!follow.isWaiting) continue
      follow.flight = batch
      follow.isDirty = false
      follow.known = 0
      batch.push(follow)
    }
    if (looked === this.#queue.length) this.#queue = []
    else this.#queue.splice(0, looked)
    if (batch.length === 0) return
    this.#flight = batch
    this.#options.log.read(batch.map(({ key, after }) => ({ key, after }))).then(
      (answers) => this.#answered(batch, answers),
      (fault: unknown) => this.#faulted(batch, fault),
    )
  }

  #answered(batch: readonly Follower[], answers: Awaited<ReturnType<StreamLog['read']>>): void {
    if (this.#flight !== batch) return
    if (answers.length !== batch.length) {
      this.#faulted(batch, new Error(`${answers.length} answers to ${batch.length} cursors`))
      return
    }
    this.#flight = null
    const { log, warn } = this.#options
    if (this.#failures > 0) warn({ log: log.name, tries: this.#failures }, 'the stream log can be read again')
    this.#failures = 0
    this.#cursorsMax = Math.min(cursorsMax, this.#cursorsMax * 2)
    for (const [index, follow] of batch.entries()) {
      const answer = answers[index]
      if (answer === undefined || follow.flight !== batch) continue
      follow.flight = null
      follow.askedMs = notAsked
      if (answer.more) follow.isDirty = true
      // It got a record in the meantime and is busy with that; it reads the rest from the log later.
      if (!follow.isWaiting) {
        if (answer.records.length > 0) follow.isDirty = true
      } else if (hasHole(answer.records, follow.after)) {
        const { id } = follow.key
        warn({ log: log.name, stream: id, after: follow.after }, 'chunks of a stream are missing in the log')
        follow.fail(new LogFault(`the log has lost what comes after chunk ${follow.after} of stream ${id}`))
      } else if (!follow.give(answer.records)) {
        follow.look()
      }
    }
    this.#read()
  }

  #faulted(batch: readonly Follower[], fault: unknown): void {
    if (this.#flight !== batch) return
    this.#flight = null
    const { log, warn } = this.#options
    const members = batch.filter((follow) => follow.flight === batch)
    for (const follow of members) {
      follow.flight = null
      follow.isDirty = true
      follow.isQueued = true
    }
    if (fault instanceof LogFault) {
      this.#failures++
      if (this.#failures === 1) warn({ log: log.name, err: fault }, 'the stream log could not be read')
      this.#queue.unshift(...members)
      this.#pause = setTimeout(
        () => {
          this.#pause = undefined
          this.#expire()
          this.#read()
        },
        Math.min(backoffMaxMs, backoffMinMs * 2 ** (this.#failures - 1)),
      )
      return
    }
    // The log answers, but one stream causes an error: smaller batches, until that stream is alone.
    const [first, ...rest] = members
    if (first !== undefined && rest.length === 0) {
      warn({ log: log.name, stream: first.key.id, err: fault }, 'a stream cannot be read')
      first.isQueued = false
      first.fail(new LogFault(`stream ${first.key.id} cannot be read`, { cause: fault }))
    } else {
      this.#cursorsMax = Math.max(1, Math.floor(members.length / 2))
      this.#queue.unshift(...members)
    }
    this.#schedule()
  }

  /** One timer for all, not moved with each read: when it fires, it checks which followers have really waited that long. */
  #watch(inMs: number): void {
    if (this.#expiry !== undefined || this.#isClosed) return
    this.#expiry = setTimeout(() => {
      this.#expiry = undefined
      this.#expire()
    }, inMs)
    this.#expiry.unref()
  }

  #expire(): void {
    const { log, patienceMs, warn } = this.#options
    const at = performance.now()
    let oldestMs = Number.POSITIVE_INFINITY
    const look = (follow: Follower): boolean => {
      if (!follow.isWaiting) return false
      if (at - follow.askedMs < patienceMs) {
        oldestMs = Math.min(oldestMs, follow.askedMs)
        return true
      }
      follow.isQueued = false
      follow.flight = null
      follow.fail(new LogFault(`the stream log (${log.name}) did not answer for ${patienceMs} ms`))
      return false
    }
    this.#queue = this.#queue.filter((follow) => {
      if (look(follow)) return true
      follow.isQueued = false
      return false
    })
    const flight = this.#flight
    const awaited = flight?.filter((follow) => follow.flight === flight && look(follow)) ?? []
    // Nobody waits for that call any more, so the next one need not either.
    if (flight !== null && awaited.length === 0) {
      warn({ log: log.name, cursors: flight.length }, 'a read had no answer in time')
      this.#flight = null
      this.#schedule()
    }
    if (oldestMs < Number.POSITIVE_INFINITY) this.#watch(Math.max(1, oldestMs + patienceMs - at))
  }
}
