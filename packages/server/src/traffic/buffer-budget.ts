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
    const part = this.#place(kind, identity, bytes, isAck)
    if (part === 'none') {
      this.#onRefused(kind)
      return null
    }
    return new Hold(this, kind, identity, bytes, isAck, part)
  }

  /** For an answer that must be sent, however full the budget is. */
  takeAnyway(kind: BufferKind, identity: string, bytes: number): Hold {
    const part = this.#place(kind, identity, bytes, false)
    if (part !== 'none') return new Hold(this, kind, identity, bytes, false, part)
    this.#count('rest', identity, bytes)
    return new Hold(this, kind, identity, bytes, false, 'rest')
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

  /** @internal For Hold. */
  move(hold: Hold, bytes: number, isForced: boolean): Part {
    this.#uncount(hold.part, hold.identity, hold.bytes)
    this.#held[hold.kind] -= hold.bytes
    let part = this.#place(hold.kind, hold.identity, bytes, hold.isAck)
    if (part === 'none') {
      part = isForced ? 'rest' : hold.part
      this.#count(part, hold.identity, isForced ? bytes : hold.bytes)
      if (!isForced) {
        this.#held[hold.kind] += hold.bytes
        this.#onRefused(hold.kind)
        return 'none'
      }
    }
    this.#held[hold.kind] += bytes
    if (bytes < hold.bytes) this.#serveSoon()
    return part
  }

  /** @internal For Hold. */
  add(hold: Hold): void {
    this.#held[hold.kind] += hold.bytes
  }

  /** @internal For Hold. */
  remove(hold: Hold): void {
    this.#uncount(hold.part, hold.identity, hold.bytes)
    this.#held[hold.kind] -= hold.bytes
    this.#serveSoon()
  }

  /** @internal For Hold: the estimate was replaced by the real size. */
  settled(hold: Hold): void {
    this.#pending -= hold.bytes
    const account = this.#account(hold.identity)
    account.pending -= hold.bytes
    this.#forget(hold.identity, account)
    this.#serveSoon()
  }

  #place(kind: BufferKind, identity: string, bytes: number, isAck: boolean): Part {
    const part = this.#placeInReserve(identity, bytes, isAck)
    if (part !== 'none') return part
    if (kind === 'in' && this.#held.in + bytes > this.#bodiesMax) return 'none'
    const { rest } = this.#accounts.get(identity) ?? noAccount
    // A single item may be larger than the share: a request for one large message has no smaller answer.
    if (this.#restUsed + bytes > this.#rest || (rest > 0 && rest + bytes > this.share)) return 'none'
    this.#count('rest', identity, bytes)
    return 'rest'
  }

  #placeInReserve(identity: string, bytes: number, isAck: boolean): Part {
    if (bytes <= smallBytes && this.#reserveUsed + bytes <= this.#reserve / 2) {
      this.#reserveUsed += bytes
      return 'open'
    }
    if (bytes > smallBytes && !isAck) return 'none'
    const { charged } = this.#accounts.get(identity) ?? noAccount
    if (this.#reserveUsed + bytes > this.#reserve || charged + bytes > this.#reserve / 8) return 'none'
    this.#count('charged', identity, bytes)
    return 'charged'
  }

  #reserveNow(identity: string, estimate: number): Hold | null {
    const part = this.#placeInReserve(identity, estimate, false)
    if (part !== 'none') return new Hold(this, 'out', identity, estimate, false, part)
    const bytes = Math.min(estimate, Math.floor(this.share / 2))
    const account = this.#accounts.get(identity) ?? noAccount
    if (account.pending + bytes > this.share / 2 || this.#pending + bytes > this.#rest / 4) return null
    if (this.#restUsed + bytes > this.#rest || account.rest + bytes > this.share) return null
    this.#count('rest', identity, bytes)
    this.#pending += bytes
    this.#account(identity).pending += bytes
    return new Hold(this, 'out', identity, bytes, false, 'rest', true)
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
        const account = this.#account(identity)
        account.waiting--
        this.#forget(identity, account)
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
      this.#account(identity).waiting++
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
    for (const tell of served) tell()
  }

  #count(part: Part, identity: string, bytes: number): void {
    switch (part) {
      case 'none':
        return
      case 'open':
        this.#reserveUsed += bytes
        return
      case 'charged':
        this.#reserveUsed += bytes
        this.#account(identity).charged += bytes
        return
      case 'rest':
        this.#restUsed += bytes
        this.#account(identity).rest += bytes
    }
  }

  #uncount(part: Part, identity: string, bytes: number): void {
    this.#count(part, identity, -bytes)
    if (part === 'charged' || part === 'rest') this.#forget(identity, this.#account(identity))
  }

  #account(identity: string): Account {
    let account = this.#accounts.get(identity)
    if (account === undefined) {
      account = { charged: 0, rest: 0, pending: 0, waiting: 0 }
      this.#accounts.set(identity, account)
    }
    return account
  }

  #forget(identity: string, { charged, rest, pending, waiting }: Account): void {
    if (charged === 0 && rest === 0 && pending === 0 && waiting === 0) this.#accounts.delete(identity)
  }
}

const noAccount: Readonly<Account> = { charged: 0, rest: 0, pending: 0, waiting: 0 }

/** Bytes that one request holds, until they are released. */
export class Hold {
  readonly #budget: BufferBudget
  readonly kind: BufferKind
  readonly identity: string
  readonly isAck: boolean
  part: Part
  #bytes: number
  #isPending: boolean

  constructor(
    budget: BufferBudget,
    kind: BufferKind,
    identity: string,
    bytes: number,
    isAck: boolean,
    part: Part,
    isPending = false,
  ) {
    this.#budget = budget
    this.kind = kind
    this.identity = identity
    this.isAck = isAck
    this.part = part
    this.#bytes = bytes
    this.#isPending = isPending
    budget.add(this)
  }

  get bytes(): number {
    return this.#bytes
  }

  /** False: no space, and the hold keeps its size. */
  growTo(bytes: number): boolean {
    return this.#moveTo(bytes, false)
  }

  /** Sets the real size. Never refused, because the work is done. */
  settle(bytes: number): void {
    if (this.#isPending) {
      this.#isPending = false
      this.#budget.settled(this)
    }
    this.#moveTo(bytes, true)
  }

  /** Safe to call twice. */
  release(): void {
    if (this.part === 'none') return
    if (this.#isPending) {
      this.#isPending = false
      this.#budget.settled(this)
    }
    this.#budget.remove(this)
    this.part = 'none'
    this.#bytes = 0
  }

  #moveTo(bytes: number, isForced: boolean): boolean {
    if (this.part === 'none') return false
    const part = this.#budget.move(this, bytes, isForced)
    if (part === 'none') return false
    this.part = part
    this.#bytes = bytes
    return true
  }
}
