import { DueRing } from './due-ring.js'
import { Follower, pollMsMin } from './follow.js'
import { LogFault, type LogName, type StreamKey, type StreamLog, type StreamRecord } from './port.js'
import { ReadLane } from './read-lane.js'

export type { Follower } from './follow.js'

const pollMsMax = 5_000
/** So that followers that started together do not stay together. */
const jitterMin = 0.75
const jitterSpan = 0.25

export interface RelayOptions {
  logs: Partial<Record<LogName, StreamLog>>
  /** How long a follower waits for the log's answer. Default 10,000. */
  patienceMs?: number
  /** Whether this process writes the stream, and so announces its writes itself: no need to poll. */
  isLocal?: (id: string) => boolean
  warn(fields: object, message: string): void
}

/**
 * Brings records to the followers of streams. What this process writes is handed over at once; what others write is read
 * from the log when the bell rings and, because the bell may be lost, by a slow poll.
 *
 *   wrote ──right after the cursor of a waiting follower──► handed over
 *     └── else ─┐
 *   heard, kick ┼──► asked for ──one read at a time for all──► given, or parked again
 *   poll due ───┘
 */
export class Relay {
  readonly #lanes = new Map<LogName, ReadLane>()
  readonly #byStream = new Map<string, Set<Follower>>()
  readonly #polls: DueRing<Follower>
  readonly #isLocal: (id: string) => boolean
  #isClosed = false

  constructor({ logs, patienceMs = 10_000, isLocal = () => false, warn }: RelayOptions) {
    this.#isLocal = isLocal
    this.#polls = new DueRing({
      tickMs: pollMsMin / 4,
      longestMs: pollMsMax,
      look: (follower) => this.#polled(follower),
    })
    for (const log of Object.values(logs)) this.#lanes.set(log.name, new ReadLane({ log, patienceMs, warn }))
  }

  /** Without those that have got their end. */
  get followers(): number {
    return [...this.#byStream.values()].reduce((sum, { size }) => sum + size, 0)
  }

  /** The log of this stream is gone: waiting followers get the fault now, not after patienceMs. */
  lost(id: string): void {
    for (const follower of this.#of(id)) follower.fail(new LogFault(`the log of stream ${id} is gone`))
  }

  /** A record is in the log, written by this process. */
  wrote(key: StreamKey, record: StreamRecord): void {
    for (const follower of this.#of(key.id)) follower.hand(record)
  }

  /** A log that is not configured: the stream was written while it was. */
  follow(key: StreamKey, log: LogName, after: number): Follower {
    const follower = new Follower(this, this.#lanes.get(log) ?? null, { key, after })
    const others = this.#byStream.get(key.id)
    if (this.#isClosed) follower.close()
    else if (others === undefined) this.#byStream.set(key.id, new Set([follower]))
    else others.add(follower)
    return follower
  }

  /** Others have written these streams; null: notifications may be lost. */
  heard(ids: readonly string[] | null): void {
    for (const id of ids ?? this.#byStream.keys()) for (const follower of this.#of(id)) follower.kick()
  }

  close(): void {
    this.#isClosed = true
    for (const lane of this.#lanes.values()) lane.close()
    this.#polls.close()
    for (const followers of this.#byStream.values()) for (const follower of followers) follower.close()
  }

  /** It waits for news. Only noted; it moves within the ring when its bucket is due, unless it must be checked before. */
  park(follower: Follower): void {
    const { tick } = this.#polls
    follower.dueTick = tick + this.#polls.ticksOf(follower.pollMs * (jitterMin + Math.random() * jitterSpan))
    if (follower.bucketTick !== 0 && follower.bucketTick <= follower.dueTick) return
    follower.bucketTick = follower.dueTick
    this.#polls.add(follower, follower.dueTick - tick)
  }

  /** It needs no more news. */
  forget(follower: Follower): void {
    const { id } = follower.key
    const followers = this.#byStream.get(id)
    followers?.delete(follower)
    if (followers?.size === 0) this.#byStream.delete(id)
  }

  #of(id: string): Iterable<Follower> {
    return this.#byStream.get(id) ?? []
  }

  #polled(follower: Follower): number {
    const { tick } = this.#polls
    // It is in an earlier bucket now.
    if (follower.bucketTick !== tick) return 0
    follower.bucketTick = 0
    if (!follower.isWaiting || follower.isQueued || follower.flight !== null) return 0
    if (follower.dueTick > tick) {
      follower.bucketTick = follower.dueTick
      return follower.dueTick - tick
    }
    follower.pollMs = Math.min(pollMsMax, follower.pollMs * 2)
    if (this.#isLocal(follower.key.id)) this.park(follower)
    else follower.kick()
    return 0
  }
}
