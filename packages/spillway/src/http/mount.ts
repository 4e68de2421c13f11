/**
 * One mount of the pipeline, independent of any framework. A binding calls `enter` with the head of a request before it
 * reads the body, and `submit` with the parsed body.
 */
import { limits } from '@spillway/protocol/wire'
import { gateRequestOf } from '../accept/accept-item.js'
import { check, isString, OptionError, shown } from '../core/options.js'
import type { Permit } from '../gates/gate.js'
import { type Admission, GateAdmission } from '../intake/admission.js'
import { type Answer, type FailedAnswer, queuedBody } from '../intake/answer.js'
import type { Definition, Identify, IntakeRequest, IntakeUser } from '../intake/define.js'
import type { Intake } from '../intake/intake.js'
import type { Pipeline } from '../intake/pipeline.js'
import type { RateStatus, Refusal } from '../intake/refusal.js'
import type { BoundGates, Submission } from '../intake/submission.js'
import { headerProblem, type Problem } from './problem.js'
import { isStandardSchema } from './standard-schema.js'

export interface Entered {
  request: IntakeRequest
  identity: string
  /** `digestUuid` of the original body, if its text is not known. */
  digest?: string
  /** Ends the request and releases its permits. Safe to call twice. */
  leave(): void
}

export type Entry = { ok: true; entered: Entered } | { ok: false; wire: Wire }

/** See goneSignal in connections.ts. */
export type Gone = (during: 'wait' | 'work') => AbortSignal

export interface Mount {
  enter(request: IntakeRequest): Entry | Promise<Entry>
  /**
   * `gone`: a signal that fires when the client leaves; requested only if the answer is awaited. `text`: the original body,
   * if the caller has it. It is stored unchanged, so that payloads passed through keep their form.
   */
  submit(entered: Entered, body: unknown, gone: Gone, text?: string): Promise<Wire>
}

export type Parsed<Body> = { ok: true; value: Body; text?: string } | { ok: false; problem: Problem }

/**
 * What a workload does differently on its route. The mount reads Idempotency-Key and Prefer, and calls the hooks in this
 * order.
 */
export interface MountHooks<Body = unknown, Result = Answer> {
  /** Validates the body. Default: the definition's schema, then its `check`. A `text` here replaces the original one. */
  parse?(body: unknown, entered: Entered, text: string | undefined): Parsed<Body> | Promise<Parsed<Body>>
  /** Submits it. Default: to the intake; then the result is an `Answer`. */
  submit?(submission: Submission<Body>, gone: Gone): Promise<Result>
  /** Writes the result. Default: `toWire`, which needs an `Answer`. */
  encode?(result: Result, preferences: Preferences): Wire
}

/** The mount of a definition. Workloads may change its steps with hooks. */
export function mountOf<Body = unknown, Result = Answer>(
  intake: Intake,
  definition: Definition,
  hooks: MountHooks<Body, Result> = {},
): Mount {
  const bound = intake.bound(definition)
  const parse = (body: unknown, { request }: Entered) => bound.parse(body, request)
  /** The schema may change the value; the text that came is stored. */
  const parseStandard = async (body: unknown, { request }: Entered, text = JSON.stringify(body)) => {
    const parsed = await bound.parse(body, request)
    return parsed.ok ? { ...parsed, text } : parsed
  }
  const usual = isStandardSchema(bound.options.body) ? parseStandard : parse
  return mounted(intake, bound, {
    parse: hooks.parse ?? (usual as NonNullable<typeof hooks.parse>),
    submit: hooks.submit ?? ((submission) => intake.pipeline.submit(bound, submission) as Promise<Result>),
    encode:
      hooks.encode ??
      ((result, preferences) => {
        const answer = result as Answer
        const wire = toWire(bound, answer, preferences, preferences.waitSeconds !== undefined)
        return answer.kind === 'queued' ? located(wire, intake) : wire
      }),
  })
}

function mounted<Body, Result>(
  intake: Intake,
  bound: BoundGates,
  { parse, submit, encode }: Required<MountHooks<Body, Result>>,
): Mount {
  return {
    enter: entrance(intake.pipeline, bound),
    async submit(entered, body, gone, text) {
      const { request, identity, digest } = entered
      const key = parseIdempotencyKey(request.headers['idempotency-key'])
      if (!key.ok) return refuse(headerProblem('idempotency-key', key.detail, key.detail))
      const parsing = parse(body, entered, text)
      const parsed = parsing instanceof Promise ? await parsing : parsing
      if (!parsed.ok) return refuse(parsed.problem)
      const preferences = parsePreferences(request.headers.prefer)
      const { waitSeconds } = preferences
      const original = parsed.text ?? text
      const submission: Submission<Body> = {
        body: parsed.value,
        ...(original !== undefined && { text: original }),
        ...(digest !== undefined && { digest }),
        identity,
        request,
        ...(key.key !== undefined && { idempotencyKey: key.key }),
        respondAsync: preferences.respondAsync,
        leaving: () => gone('work'),
        ...(waitSeconds !== undefined && { waitMs: waitSeconds * 1_000, signal: gone('wait') }),
      }
      return encode(await submit(submission, gone), preferences)
    },
  }
}

function refuse(problem: Problem): Wire {
  return { ok: false, problem, headers: {} }
}

/** Who asks: what the definition or the intake says, else the authenticated user, else the client's address. */
export function identityOf(identify: Identify | undefined, request: IntakeRequest): string {
  const said = identify?.(request)
  // An empty header is no name: its senders would be one.
  if (said === undefined || said === '') return request.user?.id ?? request.clientAddress
  check('a request', 'what identity returns', said, isString)
  return said
}

/**
 * The user that authentication put on a request: a text, or an object with `id` or `sub`. Null: none, or an object without
 * either. Anything else would make one identity of different users, so it is an error.
 */
export function userFrom(found: unknown): IntakeUser | null {
  if (found === undefined || found === null) return null
  const user = (typeof found === 'object' ? found : { id: found }) as {
    [name in 'id' | 'sub' | 'roles' | 'queues']?: unknown
  }
  const id = user.id ?? user.sub
  if (id === undefined || id === null) return null
  const isText = (typeof id === 'string' && id !== '') || typeof id === 'number' || typeof id === 'bigint'
  if (!isText && !hasText(id)) {
    throw new OptionError(
      `the user of a request must be a text, or an object whose id or sub is one and not empty; given: ${shown(found)}`,
    )
  }
  const roles = typeof user.roles === 'object' && user.roles !== null && Symbol.iterator in user.roles ? user.roles : []
  return {
    id: String(id),
    roles: new Set([...(roles as Iterable<unknown>)].map(String)),
    ...(Array.isArray(user.queues) && { queues: user.queues }),
  }
}

/** An id that is an object with a text of its own, such as MongoDB's. */
function hasText(id: unknown): boolean {
  if (typeof id !== 'object' || id === null) return false
  const text = String(id)
  return text !== '' && !text.startsWith('[object ')
}

/** The gates that need no body. */
function entrance(pipeline: Pipeline, bound: BoundGates): Mount['enter'] {
  const acquires = bound.gates.some((gate) => gate.acquire !== undefined)
  const refused = (refusal: Refusal): Entry => ({ ok: false, wire: refusalWire(refusal) })
  return (request) => {
    const identity = identityOf(bound.options.identity, request)
    const gateRequest = gateRequestOf(identity, request)
    const refusal =
      pipeline.refuseEarly(bound, gateRequest) ??
      (request.headers.prefer === undefined ? pipeline.refuseBusy(bound, identity) : null)
    if (refusal !== null) return refused(refusal)
    const entered = (permits: readonly Permit[]): Entry => {
      const exit = pipeline.enter()
      const leave = (): void => {
        exit()
        for (const permit of permits) permit.release()
      }
      return { ok: true, entered: { request, identity, leave } }
    }
    if (!acquires) return entered([])
    return pipeline.acquire(bound, gateRequest).then((got) => (Array.isArray(got) ? entered(got) : refused(got)))
  }
}

/**
 * The mount of an admission: its early gates run before the body is read. `submit` calls `admission.admit` once it knows the
 * body, and then does the work.
 */
export function mountAdmission<Body = unknown, Result = Wire>(
  intake: Intake,
  admission: Admission<Body>,
  hooks: MountHooks<Body, Result> & Required<Pick<MountHooks<Body, Result>, 'submit' | 'encode'>>,
): Mount {
  if (!(admission instanceof GateAdmission)) throw new TypeError('This admission was not made by intake.admission.')
  const parse = (body: unknown): Parsed<Body> => ({ ok: true, value: body as Body })
  return mounted(intake, admission.bound, { parse, ...hooks })
}

/** The preferences in `Prefer` (RFC 7240). Unknown or malformed ones are ignored, as the RFC says. */
export interface Preferences {
  respondAsync: boolean
  /** At most 60; Preference-Applied has the value used. */
  waitSeconds?: number
}

const none: Preferences = Object.freeze({ respondAsync: false })

export function parsePreferences(header: string | string[] | undefined): Preferences {
  if (header === undefined) return none
  const preferences: Preferences = { respondAsync: false }
  const text = Array.isArray(header) ? header.join(',') : header
  for (const part of text.split(',')) {
    const token = (part.split(';', 1)[0] ?? '').trim().toLowerCase()
    if (token === 'respond-async') {
      preferences.respondAsync = true
      continue
    }
    const wait = /^wait\s*=\s*"?(\d{1,9})"?$/.exec(token)
    // The first of several counts (RFC 7240 §2).
    if (wait !== null && preferences.waitSeconds === undefined) {
      preferences.waitSeconds = Math.min(Number(wait[1]), limits.preferWaitSecondsMax)
    }
  }
  return preferences
}

type IdempotencyKey = { ok: true; key: string | undefined } | { ok: false; detail: string }

/** 1–255 characters; an empty header is a caller's mistake, not an absent one. */
export function parseIdempotencyKey(header: string | string[] | undefined): IdempotencyKey {
  if (header === undefined) return { ok: true, key: undefined }
  const key = Array.isArray(header) ? header.join(', ') : header
  if (key.length >= 1 && key.length <= limits.idempotencyKeyCharacters) return { ok: true, key }
  return { ok: false, detail: `Idempotency-Key must have 1 to ${limits.idempotencyKeyCharacters} characters.` }
}

/** An answer for the wire, the same for both bindings. */
export interface WireAnswer {
  status: number
  headers: Record<string, string>
  body: unknown
}

export type Wire = { ok: true; answer: WireAnswer } | { ok: false; problem: Problem; headers: Record<string, string> }

/** The path of tickets. */
export const ticketPath = '/api/v1/operations'

export function toWire(bound: BoundGates, answer: Answer, preferences: Preferences, waited: boolean): Wire {
  if (answer.kind === 'refused') return refusalWire(answer.refusal)
  const headers = rateHeaders(answer.rate)
  if (answer.replayed) headers['idempotent-replayed'] = 'true'
  const applied = appliedPreferences({
    respondAsync: preferences.respondAsync && answer.kind === 'queued',
    ...(waited && preferences.waitSeconds !== undefined && { waitSeconds: preferences.waitSeconds }),
  })
  if (applied !== undefined) headers['preference-applied'] = applied
  if (answer.kind === 'failed') return failedWire(answer, headers)
  return { ok: true, answer: accepted(bound, answer, headers) }
}

/** A failure is the answer to this request for good. The text of an error that the handler did not expect stays here. */
function failedWire(answer: FailedAnswer, headers: Record<string, string>): Wire {
  const { operationId, error, expected, code, status, result } = answer
  return {
    ok: false,
    headers: { ...headers, 'x-should-retry': 'false' },
    problem: {
      code: code === 'operation_cancelled' ? code : 'operation_failed',
      ownCode: code,
      status,
      detail: expected ? error : 'The operation failed, and will not be tried again.',
      extensions: { operationId, ...(result !== null && { result }) },
    },
  }
}

/** For routes where a failure is a result like any other: 201, with `status: "failed"`. */
export const failureAsResult =
  (bound: BoundGates) =>
  (answer: Answer, preferences: Preferences): Wire => {
    const wire = toWire(bound, answer, preferences, preferences.waitSeconds !== undefined)
    if (answer.kind !== 'failed' || wire.ok) return wire
    const { operationId, error, result } = answer
    const { 'x-should-retry': _, ...headers } = wire.headers
    return {
      ok: true,
      answer: { status: 201, headers, body: { status: 'failed', operationId, error_message: error, result } },
    }
  }

/** The ticket of a queued answer, below the prefix of the ticket routes. */
function located(wire: Wire, { ticketPrefix }: Intake): Wire {
  if (ticketPrefix !== '' && wire.ok) wire.answer.headers.location = `${ticketPrefix}${wire.answer.headers.location}`
  return wire
}

export function refusalWire({ code, detail, retryAfterMs, errors, extensions, type, title, rate }: Refusal): Wire {
  return {
    ok: false,
    headers: rateHeaders(rate),
    problem: {
      code,
      detail,
      ...(retryAfterMs !== undefined && { retryAfterMs }),
      ...(errors && { errors }),
      ...(extensions && { extensions }),
      ...(type !== undefined && { type }),
      ...(title !== undefined && { title }),
    },
  }
}

function accepted(
  bound: BoundGates,
  answer: Extract<Answer, { kind: 'queued' | 'done' }>,
  headers: Record<string, string>,
): WireAnswer {
  const { operationId } = answer
  switch (answer.kind) {
    case 'queued':
      headers.location = `${ticketPath}/${operationId}`
      return { status: 202, headers, body: queuedBody(answer) }
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
export function rateHeaders(rate: RateStatus | undefined): Record<string, string> {
  if (rate === undefined) return {}
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

/** The value of Preference-Applied, or undefined when nothing was applied. */
export function appliedPreferences(applied: Preferences): string | undefined {
  const parts: string[] = []
  if (applied.respondAsync) parts.push('respond-async')
  if (applied.waitSeconds !== undefined) parts.push(`wait=${applied.waitSeconds}`)
  return parts.length === 0 ? undefined : parts.join(', ')
}
