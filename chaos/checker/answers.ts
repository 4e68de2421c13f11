/** Every answer is one of the three honest ones, true, and in time. */
import { createHash } from 'node:crypto'
import { hasFailed, isRecord, messageIdOf, operationIdOf, pushResultOf } from '../answer-body.js'
import type { Call, Evidence, Fault, Submitted, Try } from '../records.js'
import { petitionText, queueName, transactionIdOf } from '../workload.js'
import { keyOf } from './by-key.js'
import type { Finding } from './finding.js'

const uuid = /^[0-9a-f]{8}-[0-9a-f]{4}-[0-9a-f]{4}-[0-9a-f]{4}-[0-9a-f]{12}$/
/** A process that goes on after a pause has all that waited meanwhile to do first. */
const afterPauseMs = 2_000

export function checkAnswers(evidence: Evidence): Finding[] {
  const submitted = new Map(evidence.submitted.map((s) => [keyOf(s), s]))
  const findings: Finding[] = []
  const ids = new Map<string, Set<string>>()
  const pauses = evidence.faults.filter((fault) => fault.kind === 'pause')
  for (const made of evidence.tries) {
    const asked = submitted.get(keyOf(made))
    if (made.end === 'deadline' && !wasPaused(made, pauses)) {
      findings.push({
        rule: 'hung',
        detail: `${keyOf(made)}: no answer from ${made.slot} in ${evidence.deadlineMs} ms`,
      })
    }
    if (made.end !== 'answered' || asked === undefined) continue
    const wrong = judge(made, asked)
    if (wrong !== null) findings.push({ rule: wrong.rule, detail: `${keyOf(made)} at ${made.slot}: ${wrong.detail}` })
    for (const [what, id] of idsIn(made, asked)) ids.set(what, (ids.get(what) ?? new Set()).add(id))
  }
  for (const [key, seen] of ids) {
    if (seen.size > 1)
      findings.push({ rule: 'idempotency', detail: `${key}: answered as ${[...seen].join(' and as ')}` })
  }
  for (const read of evidence.reads) {
    if (read.status !== 404) continue
    findings.push({ rule: 'lost', detail: `${keyOf(read)}: ${read.slot} knows no operation ${read.operationId}` })
  }
  return findings
}

/** The ids that a repeated request must get again. Without a key a push is another operation, identified by its stored message. */
function idsIn(made: Try, asked: Submitted): [what: string, id: string][] {
  if ((made.status ?? 0) >= 300 && !hasFailed(made)) return []
  const operation = asked.route === 'push' && !asked.keyed ? null : operationIdOf(made.body)
  const message = asked.route === 'push' && (asked.keyed || made.status === 201) ? messageIdOf(made.body) : null
  return [
    ...(operation === null ? [] : [[keyOf(made), operation] as [string, string]]),
    ...(message === null ? [] : [[`${keyOf(made)}, the message`, message] as [string, string]]),
  ]
}

export function wasPaused(made: Call, pauses: readonly Fault[]): boolean {
  return pauses.some((p) => p.pid === made.pid && p.from < made.endedAt && p.to + afterPauseMs > made.sentAt)
}

function judge(made: Try, asked: Submitted): Finding | null {
  switch (made.status) {
    case 200:
    case 201:
      if (asked.route === 'push') return judgePush(made, asked, asked.keyed ? ['queued'] : ['queued', 'duplicate'])
      return asked.route === 'petition' ? judgePetition(made, asked) : judgeDone(made, asked)
    case 202:
      return judgeQueued(made) ?? (asked.route === 'push' ? judgePush(made, asked, ['pending']) : null)
    case 409:
      return made.code === 'idempotency_in_progress' ? null : { rule: 'answer', detail: `409 ${made.code}` }
    case 429:
    case 503:
      return judgeRefusal(made)
    case 500:
      if (hasFailed(made) && asked.poison) return null
      return { rule: 'answer', detail: `500 ${made.code ?? JSON.stringify(made.body)}` }
    default:
      return { rule: 'answer', detail: `${made.status} ${made.code ?? JSON.stringify(made.body)}` }
  }
}

/** Done: the content must be this work's, whichever process did it, and however often it was asked for. */
function judgeDone(made: Try, asked: Submitted): Finding | null {
  const { body } = made
  const untrue = (detail: string): Finding => ({ rule: 'answer', detail: `${made.status}, but ${detail}` })
  if (!isRecord(body) || typeof body.operationId !== 'string' || !uuid.test(body.operationId)) {
    return untrue(`no operation: ${JSON.stringify(body)}`)
  }
  if (body.status === 'failed') {
    return asked.poison ? null : untrue(`failed: ${String(body.error_message)}`)
  }
  if (body.status !== 'executed') return untrue(`of status ${String(body.status)}`)
  if (asked.poison) return untrue('executed, though it never succeeds')
  const { result } = body
  const work = asked.route === 'forward' && isRecord(result) ? result.body : result
  if (!isRecord(work) || work.lane !== asked.lane || work.n !== asked.n || work.token !== asked.token) {
    return untrue(`with another's result: ${JSON.stringify(result)}`)
  }
  return null
}

/** A receipt for this very text, and where to find it. */
function judgePetition({ status, body, location }: Try, asked: Submitted): Finding | null {
  const untrue = (detail: string): Finding => ({ rule: 'answer', detail: `${status}, but ${detail}` })
  if (!isRecord(body) || typeof body.petition_id !== 'string' || !uuid.test(body.petition_id)) {
    return untrue(`no petition: ${JSON.stringify(body)}`)
  }
  const hash = createHash('sha256').update(petitionText(asked.lane, asked.n)).digest('hex')
  if (body.content_hash !== hash || body.state !== 'RECEIVED') return untrue(`another's: ${JSON.stringify(body)}`)
  if (location !== `/api/v1/petition-submissions/${body.petition_id}`) return untrue(`its Location is ${location}`)
  return null
}

/** One result, for this very message; while it waits, its operation as well. */
function judgePush({ status, body }: Try, asked: Submitted, states: readonly string[]): Finding | null {
  const untrue = (detail: string): Finding => ({ rule: 'answer', detail: `${status}, but ${detail}` })
  const result = pushResultOf(body)
  if (result === null) return untrue(`no result: ${JSON.stringify(body)}`)
  const isIts = result.transaction_id === transactionIdOf(asked.lane, asked.n) && result.queueName === queueName
  const isThere = typeof result.message_id === 'string' && uuid.test(result.message_id)
  if (result.index !== 0 || !isIts || !isThere || !states.includes(String(result.status))) {
    return untrue(`its result is ${JSON.stringify(result)}`)
  }
  if (status !== 202) return null
  const operations: unknown = isRecord(body) ? body.operations : null
  const first: unknown = Array.isArray(operations) && operations.length === 1 ? operations[0] : null
  if (!isRecord(first) || first.operationId !== operationIdOf(body) || first.partition !== asked.lane) {
    return untrue(`its operations are ${JSON.stringify(operations)}`)
  }
  return null
}

function judgeQueued({ body, location }: Try): Finding | null {
  const untrue = (detail: string): Finding => ({ rule: 'answer', detail: `202, but ${detail}` })
  if (!isRecord(body) || body.status !== 'queued') return untrue(`not queued: ${JSON.stringify(body)}`)
  const { operationId, queuePosition } = body
  if (typeof operationId !== 'string' || !uuid.test(operationId)) return untrue('without an operation')
  if (location !== `/api/v1/operations/${operationId}`) return untrue(`its Location is ${location}`)
  if (!Number.isInteger(queuePosition) || Number(queuePosition) < 0) return untrue(`its place is ${queuePosition}`)
  return null
}

export function judgeRefusal({ status, retryAfter, body, code }: Call): Finding | null {
  const wrong = (detail: string): Finding => ({ rule: 'retry_after', detail: `${status} ${code}: ${detail}` })
  if (retryAfter === undefined) return wrong('no Retry-After')
  if (!/^[1-9]\d*$/.test(retryAfter)) return wrong(`Retry-After is ${JSON.stringify(retryAfter)}`)
  if (!isRecord(body) || body.retry_after_seconds !== Number(retryAfter)) return wrong('the body says another time')
  return null
}
