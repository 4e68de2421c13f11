import { checkOptions, checkRequired, isProblem, isSeconds, isText, wholeNumber } from '../core/options.js'
import type { Refusal } from '../intake/refusal.js'
import type { Pulse } from '../store/port.js'
import type { BoundGate, Gate, GateBinding } from './gate.js'

export interface CapacityOptions {
  /** Maximum number held, at any concurrency, over all instances. */
  limit: number
  /** Once full, nothing is accepted until fewer than this are held. Default 95% of the limit. */
  resumeBelow?: number
  /** Gates of one name count together. Default: the operation's type. */
  name?: string
  /** Base of Retry-After. Default: from the rate at which capacity becomes free, 1 to 60 s. */
  retryAfterSeconds?: number
  /** Other texts for the refusal's problem document. */
  problem?: Pick<Refusal, 'detail'> & Partial<Pick<Refusal, 'type' | 'title'>>
}

/**
 * Two checks. The early one uses the last pulse or refusal, at most a second old, and costs nothing; the exact one is a row
 * lock in the accepting transaction. All instances share one state, full or open.
 *
 *   open ──the transaction that reaches the limit──► full ──held < resumeBelow──► open
 */
export function capacity(options: CapacityOptions): Gate<unknown> {
  checkOptions('capacity', options, {
    ...{ limit: wholeNumber(1), name: isText, retryAfterSeconds: isSeconds, problem: isProblem },
    resumeBelow: wholeNumber(1, Math.max(1, Number(options?.limit))),
  })
  checkRequired('capacity', options, 'limit')
  const resumeBelow = options.resumeBelow ?? Math.max(1, Math.floor(options.limit * 0.95))
  return {
    kind: 'capacity',
    bind(binding: GateBinding): BoundGate<unknown> {
      const name = options.name ?? binding.type
      binding.registerCapacity(name, options.limit, resumeBelow)
      let isFull = false
      const drain = new DrainRate()
      const refusal = (): Refusal => ({
        code: 'capacity_exceeded',
        detail: `No more than ${options.limit} are held at once. Try again later.`,
        ...options.problem,
        retryAfterMs:
          options.retryAfterSeconds === undefined ? drain.waitMs(resumeBelow) : options.retryAfterSeconds * 1_000,
        gate: 'capacity',
      })
      return {
        kind: 'capacity',
        early: () => (isFull ? refusal() : null),
        exact: () => ({ gate: name }),
        refused: () => {
          isFull = true
          return refusal()
        },
        // There may be room: the next request asks the store, instead of being refused until the next pulse.
        freed(freed: string) {
          if (freed === name) isFull = false
        },
        forget() {
          isFull = false
        },
        observe(pulse: Pulse) {
          const state = pulse.gates.find((gate) => gate.name === name)
          if (state === undefined) return
          isFull = state.overflowing
          drain.observe(state.held, binding.now())
        },
      }
    },
  }
}

const waitMsMin = 1_000
const waitMsMax = 60_000

/** How fast capacity becomes free while the gate is full: nothing comes in then, and `held` only falls. */
class DrainRate {
  #held = 0
  #at: number | null = null
  #perMs = 0

  observe(held: number, now: number): void {
    if (this.#at !== null && now > this.#at && held < this.#held) {
      const rate = (this.#held - held) / (now - this.#at)
      this.#perMs = this.#perMs === 0 ? rate : this.#perMs * 0.7 + rate * 0.3
    }
    this.#held = held
    this.#at = now
  }

  waitMs(until: number): number {
    if (this.#perMs === 0) return 5_000
    return Math.min(waitMsMax, Math.max(waitMsMin, (this.#held - until + 1) / this.#perMs))
  }
}
