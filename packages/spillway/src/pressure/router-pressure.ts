/**
 * Whether the routers keep up, from three signals that are sampled each second: the backlog, how long messages take from
 * their arrival to their ack, and how many are under way here.
 *
 *   inactive ──any at critical──► warning ──any at overload──► active
 *      ▲            └────────────────┴── all below half of the level's bound for 3 s ──► where they belong
 *
 * With the policy `all` only backlog and latency together at overload are active; one of them alone is warning. An unknown
 * signal (the broker is not connected) is ignored. Shedding happens at admission only: accepted messages are processed in
 * any state, and samples expire, so that nothing latches.
 */
import type { PressureLevel } from '../gates/gate.js'
import { LevelHold } from './level-hold.js'

export interface RouterSignals {
  /** Pending and handed out; null: unknown. */
  backlog: number | null
  /** 95th percentile of arrival to ack. */
  latencyMs: number
  inFlight: number
}

export type SignalName = keyof RouterSignals
export type SignalLevel = 'normal' | 'warn' | 'critical' | 'overload'
export type Bounds = readonly [warn: number, critical: number, overload: number]

export interface RouterPressureOptions {
  bounds: Readonly<Record<SignalName, Bounds>>
  policy: 'any' | 'all'
}

export interface Observed {
  level: PressureLevel
  /** The previous level, if it has changed. */
  changedFrom: PressureLevel | null
  /** The signals at this level's bound. */
  triggers: SignalName[]
}

/** 3 s, minus the jitter of one-second samples. */
const holdMs = 2_900
const ranks = ['normal', 'warn', 'critical', 'overload'] as const
const names = ['backlog', 'latencyMs', 'inFlight'] as const

export class RouterPressure {
  readonly #options: RouterPressureOptions
  readonly #hold = new LevelHold(holdMs)

  constructor(options: RouterPressureOptions) {
    this.#options = options
  }

  get level(): PressureLevel {
    return this.#hold.level
  }

  observe(signals: RouterSignals, now: number): Observed {
    const before = this.#hold.level
    const enter = this.#levels(signals, 1)
    const stay = this.#levels(signals, 2)
    const level = this.#hold.observe({ enter: this.#decide(enter), stay: this.#decide(stay) }, now)
    const bound = level === 'active' ? 'overload' : 'critical'
    return {
      level,
      changedFrom: level === before ? null : before,
      triggers: level === 'inactive' ? [] : names.filter((name) => isAtLeast(enter[name], bound)),
    }
  }

  /** `times` 2: against halved bounds. */
  #levels(signals: RouterSignals, times: number): Record<SignalName, SignalLevel> {
    const { bounds } = this.#options
    const of = (name: SignalName): SignalLevel => signalLevel((signals[name] ?? 0) * times, bounds[name])
    return { backlog: of('backlog'), latencyMs: of('latencyMs'), inFlight: of('inFlight') }
  }

  #decide(levels: Readonly<Record<SignalName, SignalLevel>>): PressureLevel {
    const anyAt = (level: SignalLevel): boolean => names.some((name) => isAtLeast(levels[name], level))
    const active =
      this.#options.policy === 'any'
        ? anyAt('overload')
        : levels.backlog === 'overload' && levels.latencyMs === 'overload'
    return active ? 'active' : anyAt('critical') ? 'warning' : 'inactive'
  }
}

/** A value at the bound reaches the level. */
export function signalLevel(value: number, [warn, critical, overload]: Bounds): SignalLevel {
  return value >= overload ? 'overload' : value >= critical ? 'critical' : value >= warn ? 'warn' : 'normal'
}

export function isAtLeast(level: SignalLevel, bound: SignalLevel): boolean {
  return ranks.indexOf(level) >= ranks.indexOf(bound)
}
