import { BatchedCalls } from './batched-calls.js'
import { type Follower, hasHole, notAsked } from './follow.js'
import { LogFault, type StreamLog } from './port.js'

/** Followers per read. After a lost bell all of them read: one batch after another. */
const cursorsMax = 1_000

type Answer = Awaited<ReturnType<StreamLog['read']>>[number]

/** The reads of one log, for all followers that wait and may be behind. */
export class ReadLane extends BatchedCalls<Follower, Answer> {
  protected readonly texts = {
    failed: 'the stream log could not be read',
    recovered: 'the stream log can be read again',
  }
  #queue: Follower[] = []
  #cursorsMax = cursorsMax

  ask(follow: Follower): void {
    if (follow.isQueued) return
    if (follow.askedMs === notAsked) follow.askedMs = performance.now()
    this.watch(this.o.patienceMs)
    // Its answer is on the way; then it is clear whether that is enough.
    if (follow.flight !== null) return
    follow.isQueued = true
    this.#queue.push(follow)
    this.schedule()
  }

  override close(): void {
    super.close()
    this.#queue = []
  }

  protected nextBatch(): readonly Follower[] {
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
    this.#queue.splice(0, looked)
    return batch
  }

  protected call(batch: readonly Follower[]): Promise<Answer[]> {
    return this.o.log.read(batch.map(({ key, after }) => ({ key, after })))
  }

  protected answered(batch: readonly Follower[], answers: readonly Answer[]): void {
    const { log, warn } = this.o
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
  }

  protected putBack(batch: readonly Follower[]): void {
    this.#queue.unshift(...this.#returned(batch))
  }

  protected split(batch: readonly Follower[], fault: unknown): void {
    const [first, ...rest] = this.#returned(batch)
    if (first === undefined) return
    if (rest.length === 0) {
      const { id } = first.key
      this.o.warn({ log: this.o.log.name, stream: id, err: fault }, 'a stream cannot be read')
      first.isQueued = false
      first.fail(new LogFault(`stream ${id} cannot be read`, { cause: fault }))
    } else {
      this.#cursorsMax = Math.max(1, Math.floor((rest.length + 1) / 2))
      this.#queue.unshift(first, ...rest)
    }
  }

  /** The followers that still wait for this call, ready to be queued again. */
  #returned(batch: readonly Follower[]): Follower[] {
    const members = batch.filter((follow) => follow.flight === batch)
    for (const follow of members) {
      follow.flight = null
      follow.isDirty = true
      follow.isQueued = true
    }
    return members
  }

  protected expire(nowMs: number): number {
    const { log, patienceMs, warn } = this.o
    let oldestMs = Number.POSITIVE_INFINITY
    const mayWait = (follow: Follower): boolean => {
      const isInTime = follow.isWaiting && nowMs - follow.askedMs < patienceMs
      if (isInTime) {
        oldestMs = Math.min(oldestMs, follow.askedMs)
      } else if (follow.isWaiting) {
        follow.flight = null
        follow.fail(new LogFault(`the stream log (${log.name}) did not answer for ${patienceMs} ms`))
      }
      return isInTime
    }
    this.#queue = this.#queue.filter((follow) => {
      follow.isQueued = mayWait(follow)
      return follow.isQueued
    })
    const { flight } = this
    const awaited = flight?.filter((follow) => follow.flight === flight && mayWait(follow)) ?? []
    // Nobody waits for that call any more, so the next one need not either.
    if (flight !== null && awaited.length === 0) {
      warn({ log: log.name, cursors: flight.length }, 'a read had no answer in time')
      this.flight = null
      this.schedule()
    }
    return oldestMs
  }
}
