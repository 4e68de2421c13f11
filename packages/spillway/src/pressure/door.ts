/**
 * Where requests wait before they are processed. Node accepts one new connection per turn of its event loop (libuv since
 * 1.45), so long turns keep new connections waiting in the kernel for as long as the load lasts, where no gate sees them: at
 * twice the load that could be served each of them waited for all 5 s of it. So turns are kept short: requests are read from
 * their sockets at once and wait here instead, where their waiting time is known.
 *
 *   arrives ──nobody waits, and this turn has worked for less than a slice──► looked at
 *      └──else──► waits ──one of the next turns, a slice each, in order──► looked at
 */
export class Door {
  readonly #now: () => number
  readonly #later: (go: () => void) => void
  #waiting: (Waiting | undefined)[] = []
  #taken = 0
  /** When the first request of this turn arrived, and when the first waiting request was looked at. */
  #arrivedAt: number | null = null
  #lookedAt: number | null = null
  /** A callback for the end of this turn is scheduled. */
  #isTurning = false
  #waitedMs = 0

  constructor(
    now: () => number = () => performance.now(),
    later: (go: () => void) => void = (go) => void setImmediate(go),
  ) {
    this.#now = now
    this.#later = later
  }

  /** How long the last request that was looked at had waited. */
  get waitedMs(): number {
    return this.#waitedMs
  }

  /** `isGone`: its client has left. */
  pass(look: () => void, isGone: () => boolean = () => false): void {
    const now = this.#now()
    this.#arrivedAt ??= now
    if (!this.#isTurning) {
      this.#isTurning = true
      this.#later(this.#endTurn)
    }
    if (this.#taken < this.#waiting.length || now - this.#arrivedAt >= sliceMs) {
      this.#waiting.push({ look, isGone, since: now })
      return
    }
    this.#waitedMs = 0
    look()
  }

  /** Removes requests whose clients have left now, with all that they hold, not at their turn. */
  forgetGone(): void {
    this.#waiting = this.#waiting.slice(this.#taken).filter((one) => one !== undefined && !one.isGone())
    this.#taken = 0
  }

  readonly #endTurn = (): void => {
    if (this.#taken === this.#waiting.length || this.#taken >= forgetFrom) {
      this.#waiting = this.#waiting.slice(this.#taken)
      this.#taken = 0
    }
    this.#arrivedAt = null
    this.#lookedAt = null
    const count = Math.min(this.#waiting.length - this.#taken, eachTurnMax)
    this.#isTurning = count > 0
    // Each in its own callback: work that it starts at once (reading its body, deciding) then counts as its time.
    for (let n = 0; n < count; n++) this.#later(this.#lookAtNext)
    if (count > 0) this.#later(this.#endTurn)
  }

  readonly #lookAtNext = (): void => {
    const now = this.#now()
    this.#lookedAt ??= now
    const next = this.#waiting[this.#taken]
    if (next === undefined || now - this.#lookedAt >= sliceMs) return
    this.#waiting[this.#taken++] = undefined
    this.#waitedMs = now - next.since
    next.look()
  }
}

interface Waiting {
  readonly look: () => void
  readonly isGone: () => boolean
  readonly since: number
}

/**
 * Enough for several requests. If much shorter, the turns themselves (10 µs each) would cost; if longer, new connections
 * wait.
 */
const sliceMs = 0.5
/** Callbacks scheduled before it is known how many fit into the slice. */
const eachTurnMax = 8
const forgetFrom = 1_000
