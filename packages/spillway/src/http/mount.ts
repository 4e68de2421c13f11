/**
 * One mount of the pipeline, independent of any framework. A binding calls `enter` with the head of a request before it
 * reads the body, and `submit` with the parsed body.
 */
import type { GateRequest, Permit } from '../gates/gate.js'
import type { IntakeRequest } from '../intake/define.js'
import type { Intake } from '../intake/intake.js'
import type { Bound } from '../intake/submission.js'
import { toWire, type Wire } from './answer.js'
import { parseIdempotencyKey, parsePreferences } from './preferences.js'
import type { Problem } from './problem.js'
import { compileValidator } from './validation.js'

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
  readonly bound: Bound
  enter(request: IntakeRequest): Entry | Promise<Entry>
  /**
   * `gone`: a signal that fires when the client leaves; requested only if the answer is awaited. `text`: the original body,
   * if the caller has it. It is stored unchanged, so that payloads passed through keep their form.
   */
  submit(entered: Entered, body: unknown, gone: Gone, text?: string): Promise<Wire>
}

const noPreferences = parsePreferences(undefined)

export function mount(intake: Intake, bound: Bound): Mount {
  const validate = compileValidator(bound.options.body)
  const acquires = bound.gates.some((gate) => gate.acquire !== undefined)

  const enter = (request: IntakeRequest): Entry | Promise<Entry> => {
    const identity = bound.options.identity?.(request) ?? request.user?.id ?? request.clientAddress
    const gateRequest: GateRequest = { identity, clientAddress: request.clientAddress }
    const refusal =
      intake.admit(bound, gateRequest) ?? (request.headers.prefer === undefined ? intake.refuseBusy(bound) : null)
    if (refusal !== null) return { ok: false, wire: toWire(bound, { kind: 'refused', refusal }, noPreferences, false) }
    const entered = (permits: readonly Permit[]): Entry => {
      const exit = intake.enter()
      const leave = (): void => {
        exit()
        for (const permit of permits) permit.release()
      }
      return { ok: true, entered: { request, identity, leave } }
    }
    if (!acquires) return entered([])
    return intake
      .acquire(bound, gateRequest)
      .then(
        (got): Entry =>
          Array.isArray(got)
            ? entered(got)
            : { ok: false, wire: toWire(bound, { kind: 'refused', refusal: got }, noPreferences, false) },
      )
  }

  const submit: Mount['submit'] = async (entered, body, gone, text) => {
    const { request, identity, digest } = entered
    const refuse = (problem: Problem): Wire => ({ ok: false, problem, headers: {} })
    const key = parseIdempotencyKey(request.headers['idempotency-key'])
    if (!key.ok) {
      const errors = [{ path: '/headers/idempotency-key', message: key.detail }]
      return refuse({ code: 'invalid_request', detail: key.detail, errors })
    }
    const valid = validate(body)
    if (!valid.ok) return refuse({ code: 'invalid_request', detail: 'The body is not valid.', errors: valid.errors })
    const checked = bound.options.check?.(valid.value, request)
    const rejection = checked instanceof Promise ? await checked : (checked ?? null)
    if (rejection !== null) return refuse(rejection)
    const preferences = parsePreferences(request.headers.prefer)
    const waitMs = preferences.waitSeconds === undefined ? undefined : preferences.waitSeconds * 1_000
    const answer = await intake.submit(bound, {
      body: valid.value,
      ...(text !== undefined && { text }),
      ...(digest !== undefined && { digest }),
      identity,
      request,
      ...(key.key !== undefined && { idempotencyKey: key.key }),
      respondAsync: preferences.respondAsync,
      ...(waitMs !== undefined && { waitMs, signal: gone('wait') }),
    })
    return toWire(bound, answer, preferences, waitMs !== undefined)
  }

  return { bound, enter, submit }
}
