/** Reads a run's evidence and says what was broken. Pure: no clock, no files, no network. */
import type { Evidence, FaultKind } from '../records.js'
import { checkAnswers } from './answers.js'
import { checkEffects } from './effects.js'
import type { Finding } from './finding.js'
import { checkMessages, countMessages, type MessageCounts } from './messages.js'
import { checkOrder, countLateRepeats } from './order.js'
import { checkRecovery, type Recovery } from './recovery.js'

export interface Verdict {
  findings: Finding[]
  recovery: Omit<Recovery, 'findings'>
  counts: MessageCounts & {
    submitted: number
    accepted: number
    refusedForGood: number
    tries: number
    replays: number
    refusals: number
    networkErrors: number
    effects: number
    deliveries: number
    /** Deliveries beyond the first that succeeded: allowed after a crash. */
    repeats: number
    /** Of those, behind a newer operation of the same lane. */
    lateRepeats: number
    deadLetters: number
    faults: Partial<Record<FaultKind, number>>
    kills: number
    killsOfHolders: number
  }
}

const isKill: ReadonlySet<FaultKind> = new Set(['kill', 'vanish', 'postgres', 'backend'])

export function check(evidence: Evidence): Verdict {
  const { findings: slow, ...recovery } = checkRecovery(evidence)
  const findings: Finding[] = [
    ...checkEffects(evidence),
    ...checkOrder(evidence),
    ...checkAnswers(evidence),
    ...checkMessages(evidence),
    ...slow,
    ...evidence.audit.map((fault): Finding => ({ rule: 'audit', detail: fault })),
    ...checkProcesses(evidence),
  ]
  if (!evidence.drained) {
    const left = evidence.tickets.filter((ticket) => ticket.status === 'pending').length
    findings.push({ rule: 'undrained', detail: `${left} operations are left` })
  }
  if (!evidence.consumed) findings.push({ rule: 'undrained', detail: 'consumers have something to read, or a lease' })
  for (const one of evidence.submitted) {
    if (one.certainAt !== null || one.refused || one.abandoned) continue
    findings.push({ rule: 'undrained', detail: `${one.lane}#${one.n}: its acceptance was never certain` })
  }
  return { findings, recovery, counts: countAll(evidence) }
}

function checkProcesses(evidence: Evidence): Finding[] {
  const findings: Finding[] = []
  for (const life of evidence.lives) {
    if (life.unasked === null) continue
    findings.push({ rule: 'process', detail: `${life.slot} (pid ${life.pid}) ${life.unasked}` })
  }
  for (const { kind, slot, exit } of evidence.faults) {
    if (kind !== 'term' || exit === undefined || exit.code === 0) continue
    const how = exit.code === null ? 'had to be killed' : `exited with ${exit.code}`
    findings.push({ rule: 'process', detail: `${slot} ${how} ${exit.afterMs} ms after SIGTERM` })
  }
  return findings
}

function countAll(evidence: Evidence): Verdict['counts'] {
  const { tries, faults, submitted, deliveries } = evidence
  const kills = faults.filter((f) => isKill.has(f.kind))
  const succeeded = new Set<string>()
  let repeats = 0
  for (const { lane, n, status } of deliveries) {
    const key = `${lane}#${n}`
    if (succeeded.has(key)) repeats++
    else if (status !== 503) succeeded.add(key)
  }
  const played: Partial<Record<FaultKind, number>> = {}
  for (const { kind } of faults) played[kind] = (played[kind] ?? 0) + 1
  return {
    submitted: submitted.length,
    accepted: submitted.filter((s) => s.certainAt !== null).length,
    refusedForGood: submitted.filter((s) => s.refused).length,
    tries: tries.length,
    replays: tries.filter((made) => made.replayed === true).length,
    refusals: tries.filter((made) => made.status === 429 || made.status === 503).length,
    networkErrors: tries.filter((made) => made.end === 'network').length,
    effects: evidence.effects.length,
    deliveries: deliveries.length,
    repeats,
    lateRepeats: countLateRepeats(deliveries, submitted),
    ...countMessages(evidence),
    deadLetters: evidence.tickets.filter((ticket) => ticket.status === 'failed').length,
    faults: played,
    kills: kills.length,
    killsOfHolders: kills.filter((f) => (f.held?.length ?? 0) > 0).length,
  }
}
