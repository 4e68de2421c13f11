export interface ThrottleOptions {
  /** Requests sent per accepted request, at most. Default 2. */
  ratio?: number
  /** How far back it looks. Default 120,000. */
  windowMs?: number
  /** After this long without a request, ±50%, one is always sent, to probe. Default 10,000. */
  probeMs?: number
}

const slots = 12

interface Slot {
  number: number
  asked: number
  accepted: number
}

/**
 * The adaptive throttle of Google's SRE book ("Handling Overload"): a client that is mostly refused stops sending by itself,
 * with the probability (asked − 1 − ratio · accepted) / (asked + 1). Throttled requests count as asked, too. The 1 is not in
 * the book: one refusal at the start is no sign of overload. Some requests get through and notice when the server recovers.
 * A client that asks seldom sends one each `probeMs`; otherwise its calls might reach their deadlines without being sent.
 */
export class Throttle {
  readonly #ratio: number
  readonly #slotMs: number
  readonly #probeMs: number
  readonly #now: () => number
  readonly #random: () => number
  #slots: Slot[] = []
  #probeAt = 0

  constructor(
    { ratio = 2, windowMs = 120_000, probeMs = 10_000 }: ThrottleOptions,
    { now, random }: { now(): number; random(): number },
  ) {
    this.#ratio = ratio
    this.#slotMs = windowMs / slots
    this.#probeMs = probeMs
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
    return Math.max(0, (asked - 1 - this.#ratio * accepted) / (asked + 1))
  }

  /** Whether to send the current request. */
  lets(): boolean {
    const isProbe = this.#now() >= this.#probeAt
    const isSent = isProbe || this.#random() >= this.refusal
    this.#slot().asked++
    // Random: clients that were refused together must not probe together.
    if (isSent) this.#probeAt = this.#now() + this.#probeMs * (0.5 + this.#random())
    return isSent
  }

  accepted(): void {
    this.#slot().accepted++
  }

  /** Neither accepted nor refused: no answer. */
  unanswered(): void {
    this.#slot().asked--
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
