import type { Answer } from '../intake/answer.js'
import { queuedBody } from '../intake/answer.js'
import type { RateStatus } from '../intake/refusal.js'
import type { Bound } from '../intake/submission.js'
import { appliedPreferences, type Preferences } from './preferences.js'
import type { Problem } from './problem.js'

/** An answer for the wire, the same for both bindings. */
export interface WireAnswer {
  status: number
  headers: Record<string, string>
  body: unknown
}

export type Wire = { ok: true; answer: WireAnswer } | { ok: false; problem: Problem; headers: Record<string, string> }

/** The path of tickets. */
export const ticketPath = '/api/v1/operations'

export function toWire(bound: Bound, answer: Answer, preferences: Preferences, waited: boolean): Wire {
  if (answer.kind === 'refused') {
    const { refusal } = answer
    const { code, detail, retryAfterMs, extensions, type, title } = refusal
    return {
      ok: false,
      headers: refusal.rate === undefined ? {} : rateHeaders(refusal.rate),
      problem: {
        code,
        detail,
        ...(retryAfterMs !== undefined && { retryAfterMs }),
        ...(extensions && { extensions }),
        ...(type !== undefined && { type }),
        ...(title !== undefined && { title }),
      },
    }
  }
  const headers: Record<string, string> = answer.rate === undefined ? {} : rateHeaders(answer.rate)
  if (answer.replayed) headers['idempotent-replayed'] = 'true'
  const applied = appliedPreferences({
    respondAsync: preferences.respondAsync && answer.kind === 'queued',
    ...(waited && preferences.waitSeconds !== undefined && { waitSeconds: preferences.waitSeconds }),
  })
  if (applied !== undefined) headers['preference-applied'] = applied
  return { ok: true, answer: { ...told(bound, answer, headers) } }
}

function told(bound: Bound, answer: Exclude<Answer, { kind: 'refused' }>, headers: Record<string, string>): WireAnswer {
  const { operationId } = answer
  switch (answer.kind) {
    case 'queued':
      headers.location = `${ticketPath}/${operationId}`
      return { status: 202, headers, body: queuedBody(answer) }
    case 'failed':
      return {
        status: 201,
        headers,
        body: { status: 'failed', operationId, error_message: answer.error, result: answer.result },
      }
    case 'done': {
      const { respond } = bound.options
      if (respond === undefined) {
        return { status: 201, headers, body: { status: 'executed', operationId, result: answer.result } }
      }
      const own = respond({ operationId, result: answer.result })
      return { status: own.status ?? 201, headers: { ...headers, ...own.headers }, body: own.body }
    }
  }
}

/** draft-ietf-httpapi-ratelimit-headers, and the X- headers that most clients read. */
function rateHeaders(rate: RateStatus): Record<string, string> {
  const resetSeconds = Math.ceil(rate.resetMs / 1_000)
  const name = JSON.stringify(rate.name.replaceAll(/[^\x20-\x7e]/g, '?'))
  return {
    'ratelimit-policy': `${name};q=${rate.limit};w=${rate.windowSeconds}`,
    ratelimit: `${name};r=${rate.left};t=${resetSeconds}`,
    'x-ratelimit-limit': String(rate.limit),
    'x-ratelimit-remaining': String(rate.left),
    'x-ratelimit-reset': String(Math.ceil(rate.resetAtMs / 1_000)),
  }
}
