import type { PressureLevel } from '../gates/gate.js'

const rank: Record<PressureLevel, number> = { inactive: 0, warning: 1, active: 2 }

/**
 * Hysteresis: a level is entered at once and left only after the signals have stayed below its lower bound for `holdMs`;
 * then it goes straight to the level of the signals. No flapping, and no latching: no signal counts as low.
 */
export class LevelHold {
  readonly #holdMs: number
  #level: PressureLevel = 'inactive'
  #lowSince: number | null = null

  constructor(holdMs: number) {
    this.#holdMs = holdMs
  }

  get level(): PressureLevel {
    return this.#level
  }

  /** `enter`: the level of the signals; `stay`: their level against halved bounds. */
  observe({ enter, stay }: { enter: PressureLevel; stay: PressureLevel }, now: number): PressureLevel {
    if (rank[enter] > rank[this.#level]) {
      this.#level = enter
      this.#lowSince = null
    } else if (rank[stay] >= rank[this.#level]) {
      this.#lowSince = null
    } else {
      this.#lowSince ??= now
      if (now - this.#lowSince >= this.#holdMs) {
        this.#level = enter
        this.#lowSince = null
      }
    }
    return this.#level
  }
}
