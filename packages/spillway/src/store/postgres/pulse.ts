import type { Pulse } from '../port.js'

export interface PulseRow extends Record<string, unknown> {
  alive: boolean
  waiting: boolean
  next_due_ms: number | null
  oldest_ms: number
  held: Record<string, number> | null
  running: Record<string, number> | null
  gates: Pulse['gates'] | null
  halts: Pulse['halts'] | null
  cancels: string[] | null
  lost: number
}

export function toPulse(row: PulseRow | undefined): Pulse {
  if (row === undefined) throw new Error('pulse answered without a row')
  const { '!dead': deadLetters = 0, ...held } = row.held ?? {}
  return {
    alive: row.alive,
    waiting: row.waiting,
    nextDueMs: row.next_due_ms,
    oldestMs: row.oldest_ms,
    held,
    running: row.running ?? {},
    deadLetters,
    gates: row.gates ?? [],
    halts: row.halts ?? [],
    cancels: row.cancels ?? [],
    lostWorkers: row.lost,
  }
}
