import type { PressureLevel } from '../gates/gate.js'
import { LevelHold } from './level-hold.js'

/** The process's own signals. */
export interface ProcessSignals {
  loopDelayMs: number
  storeWaitMs: number
  inFlight: number
}

export interface ProcessPressureOptions {
  /** Active from this value on; warning from half of it. */
  loopDelayMs: number
  storeWaitMs: number
  inFlight: number
}

const sampleMs = 100
/** How long the signals must stay low before a level is left. */
const holdMs = 1_000

/**
 * Whether this process keeps up, sampled ten times a second: how late its own timer fires (event-loop delay), how long the
 * oldest write waits, how many requests are under way. Any one of them decides.
 */
export class ProcessPressure {
  readonly #limits: ProcessPressureOptions
  readonly #read: () => Omit<ProcessSignals, 'loopDelayMs'>
  readonly #hold: LevelHold
  readonly #now: () => number
  #timer: NodeJS.Timeout | undefined
  #expected = 0

  constructor(
    limits: ProcessPressureOptions,
    read: () => Omit<ProcessSignals, 'loopDelayMs'>,
    now: () => number = () => performance.now(),
  ) {
    this.#limits = limits
    this.#read = read
    this.#now = now
    this.#hold = new LevelHold(holdMs)
  }

  get level(): PressureLevel {
    return this.#hold.level
  }

  start(): void {
    this.#expected = this.#now() + sampleMs
    this.#timer = setInterval(() => {
      const now = this.#now()
      this.sample({ ...this.#read(), loopDelayMs: Math.max(0, now - this.#expected) }, now)
      this.#expected = now + sampleMs
    }, sampleMs)
    this.#timer.unref()
  }

  stop(): void {
    clearInterval(this.#timer)
  }

  sample(signals: ProcessSignals, now: number): void {
    const load = Math.max(
      signals.loopDelayMs / this.#limits.loopDelayMs,
      signals.storeWaitMs / this.#limits.storeWaitMs,
      signals.inFlight / this.#limits.inFlight,
    )
    this.#hold.observe({ enter: levelAt(load, 0.5), stay: levelAt(load * 2, 0.5) }, now)
  }
}

function levelAt(load: number, warning: number): PressureLevel {
  return load >= 1 ? 'active' : load >= warning ? 'warning' : 'inactive'
}
