/** Every accepted operation has its effect: once where that is promised, under its own id, and nothing else has one. */
import type { Evidence, Submitted, Ticket } from '../records.js'
import { mediumOf, ticketless } from '../workload.js'
import { groupBy, keyOf } from './by-key.js'
import type { Finding } from './finding.js'

export function checkEffects(evidence: Evidence): Finding[] {
  const submitted = new Map(evidence.submitted.map((s) => [keyOf(s), s]))
  return [
    ...checkTable(evidence, submitted),
    ...checkSink(evidence, submitted),
    ...checkTickets(evidence),
    ...checkPushes(evidence, submitted),
    ...checkMoves(evidence),
    ...checkLimits(evidence),
  ]
}

function checkTable(evidence: Evidence, submitted: ReadonlyMap<string, Submitted>): Finding[] {
  const findings: Finding[] = []
  const rows = groupBy(evidence.effects, keyOf)
  for (const [key, effects] of rows) {
    const asked = submitted.get(key)
    if (asked === undefined || mediumOf[asked.route] !== 'table') {
      findings.push({ rule: 'unasked', detail: `${key}: a row that nobody asked for` })
      continue
    }
    if (effects.length > 1) {
      const by = effects.map((e) => e.operation).join(', ')
      findings.push({ rule: 'doubled', detail: `${key}: ${effects.length} rows (${asked.route}), by ${by}` })
    }
    if (asked.poison) findings.push({ rule: 'unasked', detail: `${key}: a row of an operation that failed` })
    if (asked.refused) findings.push({ rule: 'unasked', detail: `${key}: a row of an operation that was refused` })
    // A message has an id of its own, beside that of the operation that brought it.
    const id = asked.route === 'push' ? asked.messageId : asked.operationId
    if (id !== null && effects.some((e) => e.operation !== id)) {
      findings.push({ rule: 'unasked', detail: `${key}: a row under another id than ${id}` })
    }
  }
  for (const [key, asked] of submitted) {
    if (asked.certainAt === null || asked.poison || mediumOf[asked.route] !== 'table' || rows.has(key)) continue
    findings.push({ rule: 'lost', detail: `${key} (${asked.route}): accepted as ${asked.operationId}, no effect` })
  }
  return findings
}

function checkSink(evidence: Evidence, submitted: ReadonlyMap<string, Submitted>): Finding[] {
  const findings: Finding[] = []
  const calls = groupBy(evidence.deliveries, keyOf)
  for (const [key, deliveries] of calls) {
    const asked = submitted.get(key)
    if (asked === undefined || mediumOf[asked.route] !== 'sink') {
      findings.push({ rule: 'unasked', detail: `${key}: a delivery that nobody asked for` })
      continue
    }
    const keys = new Set(deliveries.map((d) => d.key))
    if (keys.has(null)) findings.push({ rule: 'key', detail: `${key}: delivered without Idempotency-Key` })
    if (keys.size > 1) {
      findings.push({ rule: 'key', detail: `${key}: delivered under ${keys.size} keys: ${[...keys].join(', ')}` })
    } else if (asked.operationId !== null && !keys.has(asked.operationId)) {
      findings.push({ rule: 'key', detail: `${key}: delivered as ${[...keys]}, accepted as ${asked.operationId}` })
    }
  }
  for (const [key, asked] of submitted) {
    if (asked.certainAt === null || asked.poison || mediumOf[asked.route] !== 'sink') continue
    if (calls.get(key)?.some((d) => d.status === 200) === true) continue
    findings.push({
      rule: 'lost',
      detail: `${key} (${asked.route}): accepted as ${asked.operationId}, never delivered`,
    })
  }
  return findings
}

function checkTickets(evidence: Evidence): Finding[] {
  const findings: Finding[] = []
  const tickets = new Map<string, Ticket>()
  for (const ticket of evidence.tickets) {
    if (tickets.has(ticket.id)) findings.push({ rule: 'doubled', detail: `operation ${ticket.id} is recorded twice` })
    tickets.set(ticket.id, ticket)
  }
  const answered = new Set<string>()
  const messages = new Set(evidence.effects.filter((e) => e.route === 'push').map((e) => e.operation))
  for (const asked of evidence.submitted) {
    if (asked.operationId === null) continue
    answered.add(asked.operationId)
    const ticket = tickets.get(asked.operationId)
    const wanted = asked.poison ? 'failed' : 'completed'
    if (ticket === undefined) {
      if (ticketless.has(asked.route)) continue
      findings.push({ rule: 'lost', detail: `${keyOf(asked)}: no record of operation ${asked.operationId}` })
    } else if (ticket.status === 'pending') {
      findings.push({ rule: 'lost', detail: `${keyOf(asked)}: operation ${asked.operationId} was never finished` })
    } else if (ticket.status !== wanted) {
      const why = ticket.error === null ? '' : `: ${ticket.error}`
      findings.push({ rule: 'ended_otherwise', detail: `${keyOf(asked)}: ${ticket.status}, not ${wanted}${why}` })
    }
  }
  // Only when all are certain is a record without an answered caller one too many.
  const uncertain = new Set(evidence.submitted.filter((s) => s.certainAt === null && !s.refused).map((s) => s.lane))
  for (const ticket of tickets.values()) {
    if (answered.has(ticket.id) || uncertain.has(ticket.lane)) continue
    if (ticket.message !== null && ticket.status === 'completed' && messages.has(ticket.message)) continue
    findings.push({
      rule: 'unasked',
      detail: `${ticket.lane}: operation ${ticket.id} (${ticket.type}), which no caller has an answer for`,
    })
  }
  return findings
}

/** A push whose answer was lost may be answered as stored when it is repeated; the operation is known by its message then. */
function checkPushes(evidence: Evidence, submitted: ReadonlyMap<string, Submitted>): Finding[] {
  const byMessage = groupBy(
    evidence.tickets.filter((ticket) => ticket.message !== null),
    (ticket) => ticket.message ?? '',
  )
  return evidence.effects.flatMap((effect) => {
    const count = byMessage.get(effect.operation)?.length ?? 0
    if (count < 2 || submitted.get(keyOf(effect))?.keyed !== true) return []
    return [{ rule: 'doubled' as const, detail: `${keyOf(effect)}: ${count} operations for one key` }]
  })
}

/** What was answered as moved on is moved on. */
function checkMoves(evidence: Evidence): Finding[] {
  const moved = new Set(evidence.petitionsMoved)
  return evidence.submitted
    .filter((s) => s.moved && !moved.has(s.operationId ?? ''))
    .map((s) => ({ rule: 'lost', detail: `${keyOf(s)}: petition ${s.operationId} was moved on, and is RECEIVED` }))
}

/** Exact means both: never one more, and no place lost to a request that failed. */
function checkLimits(evidence: Evidence): Finding[] {
  const findings: Finding[] = []
  const rows = groupBy(evidence.effects, (e) => e.lane)
  for (const { lane, limit } of evidence.rated) {
    const asked = evidence.submitted.filter((s) => s.lane === lane)
    const accepted = new Set((rows.get(lane) ?? []).map((e) => e.n)).size
    const most = Math.min(limit, asked.length)
    if (accepted > limit) findings.push({ rule: 'limit', detail: `${lane}: ${accepted} accepted of ${limit} allowed` })
    if (accepted < most && asked.some((s) => s.refused)) {
      findings.push({ rule: 'limit', detail: `${lane}: refused though only ${accepted} of ${limit} were accepted` })
    }
  }
  for (const { gate, held } of evidence.placesHeld) {
    findings.push({ rule: 'limit', detail: `gate ${gate}: ${held} places are taken, with nothing held` })
  }
  return findings
}
