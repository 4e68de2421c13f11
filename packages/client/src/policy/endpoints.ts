/**
 * Picks the endpoint: the first healthy base URL of the list.
 *
 *   up ──failed──► out (1 s, doubling to 30 s) ──time is over──► tried by one request ──answered──► up
 *                   ▲                                                   └──failed──┐
 *                   └──────────────────────────────────────────────────────────────┘
 *
 * When all are out, the one whose time is over first is used: a wrong guess is better than no request.
 */
export interface Endpoint {
  readonly base: string
}

interface State extends Endpoint {
  /** In a row. */
  failures: number
  outUntil: number
  isOnTrial: boolean
}

const outMsMin = 1_000
const outMsMax = 30_000

export class Endpoints {
  readonly #all: State[]
  readonly #now: () => number
  readonly #random: () => number

  constructor(bases: readonly string[], { now, random }: { now(): number; random(): number }) {
    this.#all = bases.map((base) => ({ base, failures: 0, outUntil: 0, isOnTrial: false }))
    this.#now = now
    this.#random = random
  }

  /** `mayTry`: a failure of this request does no harm, so it may test whether an endpoint is back. */
  pick(mayTry: boolean): Endpoint {
    const now = this.#now()
    for (const each of this.#all) {
      if (each.failures === 0) return each
      if (!mayTry || each.isOnTrial || each.outUntil > now) continue
      each.isOnTrial = true
      return each
    }
    return this.#all.reduce((first, each) => (each.outUntil < first.outUntil ? each : first))
  }

  /** Whether another endpoint is healthy. */
  hasOther(than: Endpoint): boolean {
    return this.#all.some((each) => each.base !== than.base && each.failures === 0)
  }

  answered(endpoint: Endpoint): void {
    Object.assign(this.#state(endpoint), { failures: 0, outUntil: 0, isOnTrial: false })
  }

  failed(endpoint: Endpoint): void {
    const state = this.#state(endpoint)
    // Other requests under way fail with it; they do not count as further failures.
    if (state.outUntil > this.#now() && !state.isOnTrial) return
    const outMs = Math.min(outMsMax, outMsMin * 2 ** state.failures)
    state.failures++
    state.outUntil = this.#now() + outMs * (1 + this.#random() * 0.2)
    state.isOnTrial = false
  }

  /** The outcome of the request is unknown: its caller has left. */
  left(endpoint: Endpoint): void {
    this.#state(endpoint).isOnTrial = false
  }

  #state(endpoint: Endpoint): State {
    return endpoint as State
  }
}
