/** The push route, for both paths into the server: gates before the body, then the answers of contract §4. */
import { PushRequest } from '@spillway/protocol/schema'
import type { Problem, Wire } from 'spillway/workload'
import {
  appliedPreferences,
  carry,
  compileValidator,
  digestUuid,
  each,
  type IntakeApi,
  type Mount,
  mount,
  type Preferences,
  parseIdempotencyKey,
  parsePreferences,
  queuedBody,
  type Refusal,
  ticketPath,
} from 'spillway/workload'
import type { Static } from 'typebox'
import type { Push, Pushed } from './push.js'

const fullRetryAfterMs = 5_000
const payloads = ['items', each, 'payload'] as const

export function pushMount(intake: IntakeApi, push: Push): Mount {
  const base = mount(intake.core, intake.core.bound(push.definition))
  const validate = compileValidator(PushRequest)
  const refuse = (problem: Problem): Wire => ({ ok: false, problem, headers: {} })
  return {
    ...base,
    async submit({ request, identity }, body, gone, text) {
      const key = parseIdempotencyKey(request.headers['idempotency-key'])
      if (!key.ok) {
        const errors = [{ path: '/headers/idempotency-key', message: key.detail }]
        return refuse({ code: 'invalid_request', detail: key.detail, errors })
      }
      const valid = validate(body)
      if (!valid.ok) {
        return refuse({ code: 'invalid_request', detail: 'The body is not valid.', errors: valid.errors })
      }
      if (text !== undefined) carry(valid.value, text, payloads)
      const { items } = valid.value as Static<typeof PushRequest>
      const wrong = push.check(items, { identity, ...(request.user?.queues && { queues: request.user.queues }) })
      if (wrong !== null) return refuse(wrong)
      const preferences = parsePreferences(request.headers.prefer)
      const pushed = await push.push(items, {
        identity,
        traceparent: request.traceparent,
        respondAsync: preferences.respondAsync,
        ...(key.key !== undefined && { idempotencyKey: key.key }),
        ...(key.key !== undefined && text !== undefined && { keyedOn: digestUuid(text) }),
        ...(preferences.waitSeconds !== undefined && { waitMs: preferences.waitSeconds * 1_000, signal: gone('wait') }),
      })
      if (pushed.kind === 'results' && !pushed.replayed) push.count(pushed.results)
      return toWire(pushed, preferences, intake.core.queueDepth)
    },
  }
}

function toWire(pushed: Pushed, preferences: Preferences, queueDepth: number): Wire {
  if (pushed.kind === 'refused') return { ok: false, headers: {}, problem: refusalProblem(pushed.refusal, queueDepth) }
  const { results, queued, replayed } = pushed
  const headers: Record<string, string> = replayed ? { 'idempotent-replayed': 'true' } : {}
  const [first] = queued
  const applied = appliedPreferences({ ...preferences, respondAsync: preferences.respondAsync && first !== undefined })
  if (applied !== undefined) headers['preference-applied'] = applied
  if (first === undefined) return { ok: true, answer: { status: 201, headers, body: results } }
  headers.location = `${ticketPath}/${first.answer.operationId}`
  const operations = queued.map(({ queue, partition, answer }) => ({
    queue,
    partition,
    operationId: answer.operationId,
    queuePosition: answer.place,
    reason: answer.reason,
  }))
  return { ok: true, answer: { status: 202, headers, body: { ...queuedBody(first.answer), operations, results } } }
}

/** A full operation queue is 429 here, as the clients of this API expect. */
export function refusalProblem(refusal: Refusal, queueDepth: number): Problem {
  const { code, detail, retryAfterMs, extensions } = refusal
  if (code === 'queue_full') {
    const told = 'System overloaded, queue full'
    return {
      code: 'system_overloaded',
      detail: `${told}. Nothing of this push was stored.`,
      retryAfterMs: fullRetryAfterMs,
      extensions: { error: told, queueDepth },
    }
  }
  return { code, detail, ...(retryAfterMs !== undefined && { retryAfterMs }), ...(extensions && { extensions }) }
}
