import { type Cursor, LogFault, type StreamKey, type StreamRecord } from './port.js'
import type { ReadLane } from './read-lane.js'
import type { Relay } from './relay.js'

/** The maximum of one `next`, beyond its first chunk: a reader holds no more than this and its socket's buffer. */
const recordBytesMax = 64 * 1024

export const notAsked = -1
/** How soon a follower without news polls; that backs off to `pollMsMax`. */
export const pollMsMin = 1_000

/**
 * One reader of one stream. Nothing is buffered for it: chunks that arrive while it does not wait are read from the log.
 *
 *   idle ──next()──► waiting ──record, fault──► idle
 *                       └──record with `end`──► ended        any ──close()──► closed
 *
 * While it waits it is parked (it has all that is known), or asked for (it is on the lane of its log). `isDirty` and `known`
 * say that there may be more in the log than it has. Both are cleared when a read starts, so any news during the read asks
 * for another.
 */
export class Follower {
  readonly key: StreamKey
  /** The last chunk that it returned. */
  after: number
  isDirty = true
  /** A chunk that is certainly in the log. */
  known = 0
  /** For the lane: it waits in its queue; its current call; since when it has waited for an answer. */
  isQueued = false
  flight: object | null = null
  askedMs = notAsked
  /** For the poll: how long until the next read; when that is; the bucket of the ring that holds it, 0 for none. */
  pollMs = pollMsMin
  dueTick = 0
  bucketTick = 0
  readonly #relay: Relay
  readonly #lane: ReadLane | null
  #waiter: { resolve(record: StreamRecord | null): void; reject(fault: LogFault): void } | null = null
  #isEnded = false
  #isClosed = false

  /** `lane` null: its log is not configured here. */
  constructor(relay: Relay, lane: ReadLane | null, { key, after }: Cursor) {
    this.#relay = relay
    this.#lane = lane
    this.key = key
    this.after = after
  }

  get isWaiting(): boolean {
    return this.#waiter !== null
  }

  /** The log may have chunks that it does not have. */
  get isBehind(): boolean {
    return this.isDirty || this.known > this.after
  }

  /**
   * The chunks after `after`, starting exactly there, several records joined into one (64 kB at most, or one chunk); null
   * when closed, and after an end. Rejects with `LogFault` when the log did not answer for patienceMs, or has lost chunks;
   * it may be called again. One call at a time.
   */
  next(): Promise<StreamRecord | null> {
    if (this.#isClosed || this.#isEnded) return Promise.resolve(null)
    if (this.isWaiting) throw new Error(`stream ${this.key.id}: next() is under way already`)
    return new Promise((resolve, reject) => {
      this.#waiter = { resolve, reject }
      this.look()
    })
  }

  /** Read the log now. */
  kick(): void {
    this.isDirty = true
    if (this.isWaiting) this.look()
  }

  close(): void {
    if (this.#isClosed) return
    this.#isClosed = true
    this.#takeWaiter()?.resolve(null)
    this.#relay.forget(this)
  }

  /** Reads the log if there may be something, else parks. */
  look(): void {
    if (!this.isBehind && this.flight === null) {
      this.askedMs = notAsked
      this.#relay.park(this)
    } else if (this.#lane === null) {
      queueMicrotask(() => this.fail(new LogFault('the log of this stream is not configured here')))
    } else {
      this.#lane.ask(this)
    }
  }

  /** A record just written here: delivered at once if it starts right after the reader's last chunk. */
  hand(record: StreamRecord): void {
    const last = record.first + record.chunks.length - 1
    if (last <= this.after) return
    if (this.isWaiting && record.first <= this.after + 1 && this.give([record])) return
    this.known = Math.max(this.known, last)
    if (this.isWaiting) this.look()
  }

  /** False: no record continues right after its last chunk. */
  give(records: readonly StreamRecord[]): boolean {
    const record = behind(records, this.after)
    if (record === null) return false
    const final = records[records.length - 1]
    if (final !== undefined) this.known = Math.max(this.known, final.first + final.chunks.length - 1)
    this.after = record.first + record.chunks.length - 1
    this.pollMs = pollMsMin
    const waiter = this.#takeWaiter()
    if (record.end !== null) {
      this.#isEnded = true
      this.#relay.forget(this)
    }
    waiter?.resolve(record)
    return true
  }

  fail(fault: LogFault): void {
    this.isDirty = true
    this.#takeWaiter()?.reject(fault)
  }

  #takeWaiter() {
    const waiter = this.#waiter
    this.#waiter = null
    this.askedMs = notAsked
    return waiter
  }
}

/** The records' chunks after `after`, as one record; null when there are none, or they do not start there. */
export function behind(records: readonly StreamRecord[], after: number): StreamRecord | null {
  const [single] = records
  // The common case: a record just written, or read one at a time.
  if (records.length === 1 && single?.chunks.length === 1 && single.first === after + 1) return single
  const chunks: string[] = []
  let end: StreamRecord['end'] = null
  let bytes = 0
  let reached = after
  for (const record of records) {
    const last = record.first + record.chunks.length - 1
    if (last <= reached) continue
    if (record.first > reached + 1) break
    for (let index = reached + 1 - record.first; index < record.chunks.length; index++) {
      const chunk = record.chunks[index] ?? ''
      bytes += chunk.length
      if (bytes > recordBytesMax && chunks.length > 0) return { first: after + 1, chunks, end: null }
      chunks.push(chunk)
    }
    reached = last
    end = record.end
  }
  return chunks.length === 0 ? null : { first: after + 1, chunks, end }
}

/** Whether the records continue after `after` but skip the next chunk. */
export function hasHole(records: readonly StreamRecord[], after: number): boolean {
  return records.some((record) => record.first > after + 1) && behind(records, after) === null
}
