/** How long it takes until all goes on: for the work of a process that is gone, and for acceptance after PostgreSQL's end. */
import type { Evidence, Fault, FaultKind, Life } from '../records.js'
import type { Finding } from './finding.js'

/** Work of a process that is gone is done again within this time (with the default lease; a shorter one is faster). */
export const redoneMaxMs = 30_000
/** Accepting again after PostgreSQL is back. */
export const acceptingMaxMs = 2_000

/** The report of a crash after which no process accepted anything. */
const unansweredMs = 3_600_000

export interface Spread {
  count: number
  medianMs: number
  maxMs: number
}

export interface Recovery {
  findings: Finding[]
  /** From a process's end, or its silence, to the end of each operation that it held. */
  redone: Spread
  /** From PostgreSQL's return to the first acceptance by anyone, once per crash. */
  accepting: Spread
  /** The same for each process that no other fault kept from it. */
  acceptingEach: Spread
  /** How long PostgreSQL itself was away. */
  away: Spread
}

const takesWorkAway: ReadonlySet<FaultKind> = new Set(['kill', 'vanish', 'pause'])
const isCrash = (fault: Fault): boolean => fault.kind === 'postgres' || fault.kind === 'backend'

export function checkRecovery(evidence: Evidence): Recovery {
  const redone = redoneTimes(evidence)
  const accepting = acceptingTimes(evidence)
  const findings: Finding[] = []
  for (const { id, ms } of redone) {
    if (ms <= redoneMaxMs) continue
    findings.push({ rule: 'recovery', detail: `operation ${id} was done ${ms} ms after its process was gone` })
  }
  for (const { crash, ms } of accepting.first) {
    if (ms <= acceptingMaxMs) continue
    findings.push({
      rule: 'recovery',
      detail: `nobody accepted for ${ms} ms after PostgreSQL was back (${crash.kind})`,
    })
  }
  for (const { slot, ms } of accepting.each) {
    if (ms <= acceptingMaxMs) continue
    findings.push({ rule: 'recovery', detail: `${slot} did not accept for ${ms} ms after PostgreSQL was back` })
  }
  return {
    findings,
    redone: spreadOf(redone.map((r) => r.ms)),
    accepting: spreadOf(accepting.first.map((a) => a.ms)),
    acceptingEach: spreadOf(accepting.each.map((a) => a.ms)),
    away: spreadOf(evidence.faults.filter(isCrash).map((f) => f.to - f.from)),
  }
}

/** From the last fault that hit the operation: one that is hit again begins again. */
function redoneTimes(evidence: Evidence): { id: string; ms: number }[] {
  const lastHit = new Map<string, number>()
  for (const fault of evidence.faults) {
    if (!takesWorkAway.has(fault.kind)) continue
    for (const id of fault.held ?? []) lastHit.set(id, Math.max(lastHit.get(id) ?? 0, fault.from))
  }
  const crashes = evidence.faults.filter(isCrash)
  return evidence.tickets.flatMap((ticket) => {
    const hit = lastHit.get(ticket.id)
    if (hit === undefined || ticket.finishedAt === null) return []
    const { finishedAt } = ticket
    // Nobody could do it again while PostgreSQL was away.
    const from = Math.max(hit, ...crashes.filter((c) => c.from <= finishedAt && c.to > hit).map((c) => c.to))
    return [{ id: ticket.id, ms: Math.max(0, Math.round(finishedAt - from)) }]
  })
}

function acceptingTimes(evidence: Evidence) {
  const accepts = evidence.tries
    .filter((made) => made.end === 'answered' && (made.status ?? 500) < 300)
    .sort((a, b) => a.endedAt - b.endedAt)
  const first: { crash: Fault; ms: number }[] = []
  const each: { slot: string; ms: number }[] = []
  const crashes = evidence.faults.filter(isCrash).sort((a, b) => a.from - b.from)
  for (const [i, crash] of crashes.entries()) {
    const until = crashes[i + 1]?.from ?? Number.POSITIVE_INFINITY
    const after = accepts.filter((a) => a.endedAt >= crash.to && a.endedAt < until)
    const before = new Set(accepts.filter((a) => a.endedAt < crash.from).map((a) => a.pid))
    const alone = evidence.lives.filter(
      (life) => life.gateway && before.has(life.pid) && wasLeftAlone(life, crash, evidence.faults),
    )
    // Where other faults hit all of them, PostgreSQL was not what kept them from accepting.
    if (alone.length > 0) first.push({ crash, ms: (after[0]?.endedAt ?? crash.to + unansweredMs) - crash.to })
    for (const life of alone) {
      const own = after.find((a) => a.pid === life.pid)
      if (own !== undefined) each.push({ slot: life.slot, ms: own.endedAt - crash.to })
    }
  }
  return { first, each }
}

/** Up a while before the crash, and hit by nothing else from a while before it until it had to accept again. */
function wasLeftAlone(life: Life, crash: Fault, faults: readonly Fault[]): boolean {
  const from = crash.from - acceptingMaxMs
  const to = crash.to + acceptingMaxMs
  if (life.upAt > from || (life.endedAt !== null && life.endedAt < to)) return false
  return !faults.some((f) => f !== crash && (f.slot === life.slot || isCrash(f)) && f.from < to && f.to > from)
}

export function spreadOf(values: readonly number[]): Spread {
  const sorted = [...values].sort((a, b) => a - b)
  return {
    count: sorted.length,
    medianMs: Math.round(sorted[sorted.length >> 1] ?? 0),
    maxMs: Math.round(sorted[sorted.length - 1] ?? 0),
  }
}
