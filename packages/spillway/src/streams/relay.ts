import { DueRing } from './due-ring.js'
import { Follow, type Follower, type FollowOwner } from './follow.js'
import { LogFault, type LogName, type StreamKey, type StreamLog, type StreamRecord } from './port.js'
import { ReadLane } from './read-lane.js'

export type { Follower } from './follow.js'

export interface RelayOptions {
  logs: Partial<Record<LogName, StreamLog>>
  /** How soon a follower without news polls; that backs off to `pollMsMax`. Default 1,000 and 5,000. */
  pollMsMin?: number
  pollMsMax?: number
  /** How long a follower waits for the log's answer. Default 10,000. */
  patienceMs?: number
  /** Whether this process writes the stream, and so announces its writes itself: no need to poll. */
  isLocal?: (id: string) => boolean
  warn(fields: object, message: string): void
  now?: () => number
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
  readonly #owners = new Map<LogName, FollowOwner>()
  readonly #nowhere: FollowOwner
  /** By stream, the first of a chain. */
  readonly #chains = new Map<string, Follow>()
  readonly #polls: DueRing<Follow>
  readonly #isLocal: (id: string) => boolean
  readonly #pollMsMin: number
  readonly #pollMsMax: number
  #followers = 0
  #isClosed = false

  constructor(options: RelayOptions) {
    this.#pollMsMin = options.pollMsMin ?? 1_000
    this.#pollMsMax = Math.max(this.#pollMsMin, options.pollMsMax ?? 5_000)
    this.#isLocal = options.isLocal ?? (() => false)
    const { warn, patienceMs = 10_000, now = () => performance.now() } = options
    this.#polls = new DueRing({
      tickMs: Math.max(1, this.#pollMsMin / 4),
      longestMs: this.#pollMsMax,
      look: (follow) => this.#polled(follow),
    })
    for (const log of Object.values(options.logs)) {
      const lane = new ReadLane({ log, patienceMs, warn, now })
      this.#lanes.set(log.name, lane)
      this.#owners.set(
        log.name,
        this.#ownerOf((follow) => lane.ask(follow)),
      )
    }
    // A stream that was written while that log was configured.
    this.#nowhere = this.#ownerOf((follow) => {
      queueMicrotask(() => follow.fail(new LogFault('the log of this stream is not configured here')))
    })
  }

  get followers(): number {
    return this.#followers
  }

  /** The log of this stream is gone: waiting followers get the fault now, not after patienceMs. */
  lost(id: string): void {
    for (let follow = this.#chains.get(id) ?? null; follow !== null; follow = follow.sibling) {
      follow.fail(new LogFault(`the log of stream ${id} is gone`))
    }
  }

  /** A record is in the log, written by this process. */
  wrote(key: StreamKey, record: StreamRecord): void {
    let follow = this.#chains.get(key.id) ?? null
    while (follow !== null) {
      // An end removes it from the chain.
      const { sibling } = follow
      follow.hand(record)
      follow = sibling
    }
  }

  follow(key: StreamKey, log: LogName, after: number): Follower {
    const owner = this.#owners.get(log) ?? this.#nowhere
    const follow = new Follow(owner, { key, after })
    this.#followers++
    if (this.#isClosed) {
      follow.close()
      return follow
    }
    follow.sibling = this.#chains.get(key.id) ?? null
    this.#chains.set(key.id, follow)
    return follow
  }

  /** Others have written these streams; null: notifications may be lost. */
  heard(ids: readonly string[] | null): void {
    for (const id of ids ?? this.#chains.keys()) {
      for (let follow = this.#chains.get(id) ?? null; follow !== null; follow = follow.sibling) follow.kick()
    }
  }

  close(): void {
    this.#isClosed = true
    for (const lane of this.#lanes.values()) lane.close()
    this.#polls.close()
    for (const first of [...this.#chains.values()]) {
      for (let follow: Follow | null = first; follow !== null; ) {
        const { sibling }: Follow = follow
        follow.close()
        follow = sibling
      }
    }
  }

  #ownerOf(ask: (follow: Follow) => void): FollowOwner {
    return {
      pollMsMin: this.#pollMsMin,
      ask,
      park: (follow) => this.#park(follow),
      forget: (follow) => this.#forget(follow),
      closed: () => {
        this.#followers--
      },
    }
  }

  #forget(follow: Follow): void {
    const { id } = follow.key
    const first = this.#chains.get(id)
    if (first === follow) {
      if (follow.sibling === null) this.#chains.delete(id)
      else this.#chains.set(id, follow.sibling)
    } else {
      let before: Follow | null = first ?? null
      while (before !== null && before.sibling !== follow) before = before.sibling
      if (before !== null) before.sibling = follow.sibling
    }
    follow.sibling = null
  }

  /** Only noted; it moves within the ring when its bucket is due, unless it must be checked before. */
  #park(follow: Follow): void {
    follow.dueTick = this.#polls.tick + this.#polls.ticksOf(follow.pollMs * (jitterMin + Math.random() * jitterSpan))
    if (follow.bucketTick !== 0 && follow.bucketTick <= follow.dueTick) return
    follow.bucketTick = follow.dueTick
    this.#polls.add(follow, follow.dueTick - this.#polls.tick)
  }

  #polled(follow: Follow): number {
    const { tick } = this.#polls
    // It is in an earlier bucket now.
    if (follow.bucketTick !== tick) return 0
    follow.bucketTick = 0
    if (!follow.isWaiting || follow.isQueued || follow.flight !== null) return 0
    if (follow.dueTick > tick) {
      follow.bucketTick = follow.dueTick
      return follow.dueTick - tick
    }
    follow.pollMs = Math.min(this.#pollMsMax, follow.pollMs * 2)
    if (this.#isLocal(follow.key.id)) this.#park(follow)
    else follow.kick()
    return 0
  }
}

/** So that followers that started together do not stay together. */
const jitterMin = 0.75
const jitterSpan = 0.25
