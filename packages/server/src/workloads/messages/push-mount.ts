/** The push route, for both paths into the server: gates before the body, then the answers (docs/guides/messages.md#what-a-push-is-answered). */
import { PushRequest } from '@spillway/protocol/schema'
import type { Problem, Wire } from 'spillway/workload'
import {
  appliedPreferences,
  carry,
  compileValidator,
  digestUuid,
  each,
  type Intake,
  type Mount,
  mountOf,
  type Preferences,
  queuedBody,
  type Refusal,
  ticketPath,
} from 'spillway/workload'
import type { Static } from 'typebox'
import type { Push, Pushed, PushItem } from './push/push.js'

const fullRetryAfterMs = 5_000
const payloads = ['items', each, 'payload'] as const

export function pushMount(intake: Intake, push: Push): Mount {
  const validate = compileValidator(PushRequest)
  return mountOf<readonly PushItem[], Pushed>(intake, push.definition, {
    parse(body, { request }, text) {
      const valid = validate(body)
      if (!valid.ok) return refuse({ code: 'invalid_request', detail: 'The body is not valid.', errors: valid.errors })
      if (text !== undefined) carry(valid.value, text, payloads)
      const { items } = valid.value as Static<typeof PushRequest>
      const wrong = push.check(items, request.user?.queues)
      return wrong === null ? { ok: true, value: items } : refuse(wrong)
    },
    // A push runs in no slot, so there is nothing to give up when its client leaves.
    async submit({ body: items, text, request, leaving: _, ...options }) {
      const pushed = await push.push(items, {
        ...options,
        traceparent: request.traceparent,
        ...(options.idempotencyKey !== undefined && text !== undefined && { keyedOn: digestUuid(text) }),
      })
      if (pushed.kind === 'results' && !pushed.replayed) push.count(pushed.results)
      return pushed
    },
    encode: (pushed, preferences) => toWire(pushed, preferences, intake.queueDepth),
  })
}

function refuse(problem: Problem): { ok: false; problem: Problem } {
  return { ok: false, problem }
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
    queuePosition: answer.position,
    reason: answer.reason,
  }))
  return { ok: true, answer: { status: 202, headers, body: { ...queuedBody(first.answer), operations, results } } }
}

/** A full operation queue is 429 here, as the clients of this API expect. */
export function refusalProblem(refusal: Refusal, queueDepth: number): Problem {
  const { code, detail, retryAfterMs, extensions } = refusal
  if (code === 'queue_full') {
    const error = 'System overloaded, queue full'
    return {
      code: 'system_overloaded',
      detail: `${error}. Nothing of this push was stored.`,
      retryAfterMs: fullRetryAfterMs,
      extensions: { error, queueDepth },
    }
  }
  return { code, detail, ...(retryAfterMs !== undefined && { retryAfterMs }), ...(extensions && { extensions }) }
}
