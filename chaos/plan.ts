/** The faults of a run: what, when and whom, from the seed alone. */
import { chance } from './random.js'
import type { FaultKind } from './records.js'

export interface PlannedFault {
  kind: FaultKind
  /** Milliseconds after the start of the faults. */
  atMs: number
  /** The slot by number; PostgreSQL has none. */
  victim: number
  /** A kill waits for the moment in which its victim, or else another, holds leased work. */
  aimed: boolean
  /** How long it lasts; for a kill: until the process is started again. */
  forMs: number
  /** For choices that depend on what is there, from 0 to 1. */
  pick: number
}

export interface PlanOptions {
  seed: number
  seconds: number
  kills: number
  slots: number
  leaseMs: number
  /** Kinds to play; default: all. */
  only?: readonly FaultKind[]
}

/** Of the kills, so many hit PostgreSQL: a whole cluster takes longer to come back than a process. */
const postgresShare = 0.05
const vanishShare = 0.1
/** One kill in so many comes at any moment; the others wait for one in which their victim holds leased work. */
const unaimedEvery = 7
/** Faults that are no kills, for each kill. */
const othersPerKill = 0.5
const others = ['pause', 'term', 'cut', 'delay', 'half-open', 'black-hole'] as const

export function planFaults(options: PlanOptions): PlannedFault[] {
  const { seed, slots, leaseMs, kills } = options
  const spanMs = options.seconds * 1_000
  const luck = chance(seed, 'faults')
  const plays = (kind: FaultKind): boolean => options.only === undefined || options.only.includes(kind)
  const faults: PlannedFault[] = []
  const database = plays('postgres') || plays('backend') ? Math.round(kills * postgresShare) || Math.min(1, kills) : 0
  // Spread over the kills, not all at the end.
  const isDatabase = new Set(Array.from({ length: database }, (_, k) => Math.floor(((k + 0.5) * kills) / database)))
  for (let i = 0; i < kills; i++) {
    const process = luck.happens(vanishShare) && plays('vanish') ? 'vanish' : 'kill'
    const kind: FaultKind = isDatabase.has(i) ? luck.pick((['postgres', 'backend'] as const).filter(plays)) : process
    if (!plays(kind)) continue
    faults.push({ ...one(kind, spread(i, kills)), aimed: i % unaimedEvery !== unaimedEvery - 1 })
  }
  const playedOthers = others.filter(plays)
  const rest = playedOthers.length === 0 ? 0 : Math.max(playedOthers.length, Math.round(kills * othersPerKill))
  for (let i = 0; i < rest; i++) {
    // Each kind comes at least once, however few there are.
    const kind = playedOthers[i] ?? luck.pick(playedOthers)
    faults.push(one(kind, luck.next() * spanMs))
  }
  return faults.sort((a, b) => a.atMs - b.atMs)

  function spread(i: number, of: number): number {
    return ((i + luck.next()) / of) * spanMs
  }
  function one(kind: FaultKind, atMs: number): PlannedFault {
    return {
      kind,
      atMs: Math.round(atMs),
      victim: luck.between(0, slots - 1),
      aimed: true,
      forMs: lasts(kind),
      pick: luck.next(),
    }
  }
  function lasts(kind: FaultKind): number {
    switch (kind) {
      case 'kill':
      case 'vanish':
      case 'term':
        return luck.between(0, 500)
      // Longer than the lease: others take over, and it comes back as a zombie.
      case 'pause':
        return leaseMs + luck.between(500, 2_000)
      case 'half-open':
        return luck.between(500, leaseMs * 2)
      case 'delay':
        return luck.between(500, 3_000)
      default:
        return 0
    }
  }
}
