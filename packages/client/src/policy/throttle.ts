export interface ThrottleOptions {
  /** Requests that are sent for each that is accepted, at most. Default 2. */
  ratio?: number
  /** How far back it looks. Default 120,000. */
  windowMs?: number
}

const slots = 12

interface Slot {
  number: number
  asked: number
  accepted: number
}

/**
 * The adaptive throttle of Google's SRE book ("Handling Overload"): a client that is mostly refused stops sending by
 * itself, more so the more it is refused, with the probability (asked − ratio · accepted) / (asked + 1). What it holds back
 * counts as asked, too. It never becomes certain: some get through, and find out when the server is well again.
 */
export class Throttle {
  readonly #ratio: number
  readonly #slotMs: number
  readonly #now: () => number
  readonly #random: () => number
  #slots: Slot[] = []

  constructor(
    { ratio = 2, windowMs = 120_000 }: ThrottleOptions,
    { now, random }: { now(): number; random(): number },
  ) {
    this.#ratio = ratio
    this.#slotMs = windowMs / slots
    this.#now = now
    this.#random = random
  }

  get refusal(): number {
    let asked = 0
    let accepted = 0
    const oldest = this.#number() - slots
    for (const slot of this.#slots) {
      if (slot.number <= oldest) continue
      asked += slot.asked
      accepted += slot.accepted
    }
    return Math.max(0, (asked - this.#ratio * accepted) / (asked + 1))
  }

  /** Whether the request that is now asked for is to be sent. */
  lets(): boolean {
    const isHeldBack = this.#random() < this.refusal
    this.#slot().asked++
    return !isHeldBack
  }

  accepted(): void {
    this.#slot().accepted++
  }

  #number(): number {
    return Math.floor(this.#now() / this.#slotMs)
  }

  #slot(): Slot {
    const number = this.#number()
    const last = this.#slots.at(-1)
    if (last?.number === number) return last
    const slot = { number, asked: 0, accepted: 0 }
    this.#slots = [...this.#slots.filter((each) => each.number > number - slots), slot]
    return slot
  }
}
