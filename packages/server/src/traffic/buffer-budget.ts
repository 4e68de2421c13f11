/**
 * The budget of bytes that this process holds for its clients: bodies being received and answers being sent. Pure policy:
 * it counts, and knows neither sockets nor HTTP.
 *
 *   total ─┬─ reserve, an eighth ─┬─ first half: small takes (up to 64 KiB), for anybody. One comparison, nothing is kept.
 *          │                      └─ second half: small takes and acks, at most an eighth of the reserve per identity
 *          └─ the rest: everything else, and small takes that find the reserve full; at most an eighth of the total per identity
 *
 * Bodies take at most five eighths of the total: bodies already read wait for the garbage collector, some 80 MB of them.
 *
 * Large takes never use the reserve, so acks and small requests are served while uploads and unread answers hold the rest.
 * The second half of the reserve is counted per identity, so one identity cannot use the reserve up for the others. Only identities
 * that hold something there or in the rest have an entry.
 *
 * A request that takes work from the store (a pop) first reserves space for its answer, by an estimate. Such space is *pending*
 * until the answer is known, which takes one statement. Pending space may use half of an identity's share and a quarter of
 * the total, so that estimates never keep bodies out. A pop beyond that waits in line for a few seconds at most. It is
 * refused at once if settling the pending space would not help: unread answers and uploads may stay for long.
 */

export const smallBytes = 65_536

export type BufferKind = 'in' | 'out'

/** Where the bytes of a hold are counted: first or second half of the reserve, the rest, or none after release. */
type Part = 'none' | 'open' | 'charged' | 'rest'

interface Account {
  charged: number
  rest: number
  pending: number
  waiting: number
}

interface Waiter {
  identity: string
  estimate(): number
  settle(hold: Hold | null): void
}

const waitingMax = 10_000
const waitMsDefault = 5_000

export class BufferBudget {
  readonly #reserve: number
  readonly #rest: number
  readonly #bodiesMax: number
  /** How much of the rest one identity may hold. */
  readonly share: number
  readonly #onRefused: (kind: BufferKind) => void
  readonly #waitMs: number
  readonly #accounts = new Map<string, Account>()
  readonly #held = { in: 0, out: 0 }
  #reserveUsed = 0
  #restUsed = 0
  #pending = 0
  #waiting: Waiter[] = []
  #isServing = false

  constructor(
    readonly bytesMax: number,
    options: { onRefused?: (kind: BufferKind) => void; waitMs?: number } = {},
  ) {
    this.#reserve = Math.floor(bytesMax / 8)
    this.#rest = bytesMax - this.#reserve
    this.share = Math.floor(bytesMax / 8)
    this.#bodiesMax = Math.floor((bytesMax / 8) * 5)
    this.#onRefused = options.onRefused ?? (() => undefined)
    this.#waitMs = options.waitMs ?? waitMsDefault
  }

  held(kind: BufferKind): number {
    return this.#held[kind]
  }

  /** Null: no space. `isAck`: may use the reserve whatever its size. */
  take(kind: BufferKind, identity: string, bytes: number, isAck = false): Hold | null {
    const part = this.#partFor(kind, identity, bytes, isAck)
    if (part !== 'none') return new Hold(this, kind, identity, isAck, part, bytes)
    this.#onRefused(kind)
    return null
  }

  /** For an answer that must be sent, however full the budget is. */
  takeAnyway(kind: BufferKind, identity: string, bytes: number): Hold {
    const part = this.#partFor(kind, identity, bytes, false)
    return new Hold(this, kind, identity, false, part === 'none' ? 'rest' : part, bytes)
  }

  /**
   * Space for an answer of unknown size; `Hold.settle` replaces the estimate. Waits if that helps, then calls `estimate`
   * again, because it may have become smaller. Null: no space, or the signal of `gone` fired. `gone` is called only to wait.
   */
  reserve(identity: string, estimate: () => number, gone: () => AbortSignal): Hold | null | Promise<Hold | null> {
    const bytes = estimate()
    const isFirst = (this.#accounts.get(identity)?.waiting ?? 0) === 0
    const hold = isFirst ? this.#reserveNow(identity, bytes) : null
    if (hold !== null) return hold
    if (!this.#mayComeFree(identity, bytes) || this.#waiting.length >= waitingMax) {
      this.#onRefused('out')
      return null
    }
    const left = gone()
    return left.aborted ? null : this.#wait(identity, estimate, left)
  }

  /** @internal For Hold. False: no space, and the hold keeps its size. `isForced`: never refused. */
  resize(hold: Hold, bytes: number, isForced: boolean): boolean {
    if (hold.part === 'none') return false
    const before = hold.bytes
    this.count(hold, -before)
    const part = this.#partFor(hold.kind, hold.identity, bytes, hold.isAck)
    if (part === 'none' && !isForced) {
      this.count(hold, before)
      this.#onRefused(hold.kind)
      return false
    }
    hold.part = part === 'none' ? 'rest' : part
    hold.bytes = bytes
    this.count(hold, bytes)
    if (bytes < before) this.#serveSoon()
    return true
  }

  /** @internal For Hold. */
  release(hold: Hold): void {
    if (hold.part === 'none') return
    this.settle(hold)
    this.count(hold, -hold.bytes)
    hold.part = 'none'
    hold.bytes = 0
    this.#serveSoon()
  }

  /** @internal For Hold: the estimate is no longer needed. */
  settle(hold: Hold): void {
    if (!hold.isPending) return
    hold.isPending = false
    this.#countPending(hold.identity, -hold.bytes)
    this.#serveSoon()
  }

  /** @internal For Hold. */
  count({ kind, identity, part }: Hold, bytes: number): void {
    this.#held[kind] += bytes
    if (part === 'rest') this.#restUsed += bytes
    else this.#reserveUsed += bytes
    if (part === 'charged' || part === 'rest') this.#charge(identity, part, bytes)
  }

  #countPending(identity: string, bytes: number): void {
    this.#pending += bytes
    this.#charge(identity, 'pending', bytes)
  }

  /** Where these bytes would be counted; `none`: no space. */
  #partFor(kind: BufferKind, identity: string, bytes: number, isAck: boolean): Part {
    const part = this.#partInReserve(identity, bytes, isAck)
    if (part !== 'none') return part
    if (kind === 'in' && this.#held.in + bytes > this.#bodiesMax) return 'none'
    const { rest } = this.#accounts.get(identity) ?? noAccount
    // A single item may be larger than the share: a request for one large message has no smaller answer.
    return this.#restUsed + bytes > this.#rest || (rest > 0 && rest + bytes > this.share) ? 'none' : 'rest'
  }

  #partInReserve(identity: string, bytes: number, isAck: boolean): Part {
    if (bytes <= smallBytes && this.#reserveUsed + bytes <= this.#reserve / 2) return 'open'
    if (bytes > smallBytes && !isAck) return 'none'
    const { charged } = this.#accounts.get(identity) ?? noAccount
    return this.#reserveUsed + bytes > this.#reserve || charged + bytes > this.#reserve / 8 ? 'none' : 'charged'
  }

  #reserveNow(identity: string, estimate: number): Hold | null {
    const part = this.#partInReserve(identity, estimate, false)
    if (part !== 'none') return new Hold(this, 'out', identity, false, part, estimate)
    const bytes = Math.min(estimate, Math.floor(this.share / 2))
    const account = this.#accounts.get(identity) ?? noAccount
    if (account.pending + bytes > this.share / 2 || this.#pending + bytes > this.#rest / 4) return null
    if (this.#restUsed + bytes > this.#rest || account.rest + bytes > this.share) return null
    this.#countPending(identity, bytes)
    return new Hold(this, 'out', identity, false, 'rest', bytes, true)
  }

  /** Whether there would be space if nothing were pending. */
  #mayComeFree(identity: string, estimate: number): boolean {
    const bytes = Math.min(estimate, Math.floor(this.share / 2))
    const { rest, pending } = this.#accounts.get(identity) ?? noAccount
    return this.#restUsed - this.#pending + bytes <= this.#rest && rest - pending + bytes <= this.share
  }

  #wait(identity: string, estimate: () => number, gone: AbortSignal): Promise<Hold | null> {
    return new Promise((resolve) => {
      const settle = (hold: Hold | null): void => {
        clearTimeout(timer)
        gone.removeEventListener('abort', leave)
        this.#charge(identity, 'waiting', -1)
        resolve(hold)
      }
      const waiter: Waiter = { identity, estimate, settle }
      const leave = (): void => {
        this.#waiting = this.#waiting.filter((other) => other !== waiter)
        settle(null)
        // The waiters behind it may need less.
        this.#serveSoon()
      }
      const timer = setTimeout(() => {
        this.#onRefused('out')
        leave()
      }, this.#waitMs)
      timer.unref()
      gone.addEventListener('abort', leave)
      this.#charge(identity, 'waiting', 1)
      this.#waiting.push(waiter)
    })
  }

  /** Once per turn, however much was released in it. */
  #serveSoon(): void {
    if (this.#waiting.length === 0 || this.#isServing) return
    this.#isServing = true
    setImmediate(() => {
      this.#isServing = false
      this.#serve()
    })
  }

  /** In order. A waiter that must keep waiting blocks only later waiters of the same identity. */
  #serve(): void {
    const left: Waiter[] = []
    const blocked = new Set<string>()
    const served: (() => void)[] = []
    for (const waiter of this.#waiting) {
      const { identity, settle } = waiter
      const bytes = waiter.estimate()
      const hold = blocked.has(identity) ? null : this.#reserveNow(identity, bytes)
      if (hold !== null) served.push(() => settle(hold))
      else if (this.#mayComeFree(identity, bytes)) {
        blocked.add(identity)
        left.push(waiter)
      } else {
        this.#onRefused('out')
        served.push(() => settle(null))
      }
    }
    this.#waiting = left
    for (const notify of served) notify()
  }

  #charge(identity: string, what: keyof Account, amount: number): void {
    const account = this.#accounts.get(identity) ?? { ...noAccount }
    account[what] += amount
    const { charged, rest, pending, waiting } = account
    if (charged === 0 && rest === 0 && pending === 0 && waiting === 0) this.#accounts.delete(identity)
    else this.#accounts.set(identity, account)
  }
}

const noAccount: Readonly<Account> = { charged: 0, rest: 0, pending: 0, waiting: 0 }

/** Bytes that one request holds, until they are released. Only its budget changes them. */
export class Hold {
  constructor(
    readonly budget: BufferBudget,
    readonly kind: BufferKind,
    readonly identity: string,
    readonly isAck: boolean,
    public part: Part,
    public bytes: number,
    /** The bytes are an estimate. */
    public isPending = false,
  ) {
    budget.count(this, bytes)
  }

  /** False: no space, and the hold keeps its size. */
  growTo(bytes: number): boolean {
    return this.budget.resize(this, bytes, false)
  }

  /** Sets the real size. Never refused, because the work is done. */
  settle(bytes: number): void {
    this.budget.settle(this)
    this.budget.resize(this, bytes, true)
  }

  /** Safe to call twice. */
  release(): void {
    this.budget.release(this)
  }
}
