/** Your own routes: those that `intake.route`, `express`, `node` or `fetch` made of a definition. */
import type { OperationView, QueuedAnswer } from '@spillway/protocol/wire'
import { number } from '../checks.js'
import { SpillwayError, type SpillwayErrorCode } from '../error.js'
import type { CallOptions } from '../http/call.js'
import { lookMsMin, type SubmitOptions, submission, type WaitOptions, waitMsDefault } from '../operations/operations.js'
import { cancelAt, finishedOf, operationPath, waitFor } from '../operations/ticket.js'
import type { Parts } from '../resources.js'

/** What `intake.define` returns, as far as types go: `import type { place } from './server.js'` is enough. */
export interface RouteDefinition {
  readonly type: string
  readonly _types?: { body: unknown; result: unknown }
}

/** What JSON makes of a value: a Date is a text, a member without a value is absent. */
export type Jsonified<T> = unknown extends T
  ? T
  : T extends { toJSON(): infer J }
    ? Jsonified<J>
    : T extends string | number | boolean | null | undefined
      ? T
      : // biome-ignore lint/suspicious/noExplicitAny: any function
        T extends ((...args: any[]) => unknown) | symbol
        ? undefined
        : { [Member in keyof T]: Jsonified<T[Member]> }

type Types<D extends RouteDefinition> = NonNullable<D['_types']>
/** A handler without a result answers with null. */
type ResultOf<T> = unknown extends T ? T : [T] extends [undefined | null] ? null : Jsonified<T>

/** What the definition's handler returns, as it arrives. */
export type RouteResult<D extends RouteDefinition> = ResultOf<Types<D>['result']>

export interface Done<Result> {
  kind: 'done'
  /** Null if the route's own answer (`respond`) does not say it. */
  operationId: string | null
  result: Result
  /** An earlier request with this key was answered so. */
  replayed: boolean
}

/** It ran and failed for good, or was cancelled. */
export interface Failed {
  kind: 'failed'
  operationId: string
  /** `operation_failed`, or what the handler says with FailOperation. */
  code: string
  message: string
  result: unknown
  replayed: boolean
}

/** It is accepted, durably, and runs later. */
export interface Ticket<Result> extends Omit<QueuedAnswer, 'status'> {
  kind: 'queued'
  replayed: boolean
  /** Resolves when it is finished, or with this ticket when the time is up. */
  wait(options?: WaitOptions): Promise<Done<Result> | Failed | Ticket<Result>>
  /** Rejects with `operation_running` or `operation_finished` if it is too late. */
  cancel(options?: CallOptions): Promise<OperationView>
}

/** Nothing was accepted: the last answer, after the retries that the deadline had time for. */
export interface Refused {
  kind: 'refused'
  code: SpillwayErrorCode
  /** With `status`, `retryAfterMs`, and the `problem` document: `problem.errors` says what is wrong with a body. */
  error: SpillwayError
}

/** `Own`: the body that the definition's `respond` makes. */
export interface Route<D extends RouteDefinition, Own = RouteResult<D>> {
  /** Rejects only if it is unknown what became of the request: see `code` of the SpillwayError. */
  submit(
    body: Types<D>['body'],
    options?: SubmitOptions,
  ): Promise<Done<Own> | Failed | Ticket<RouteResult<D>> | Refused>
}

/** `name`: method and path, as in 'POST /orders'. */
export function route<D extends RouteDefinition, Own>(parts: Parts, name: string): Route<D, Own> {
  const [, method, path] = /^(POST|PUT|PATCH|DELETE) (\/\S*)$/.exec(name) ?? []
  if (path === undefined) throw new TypeError(`a route is named like 'POST /orders', not ${JSON.stringify(name)}`)
  const submit = async (
    body: unknown,
    options: SubmitOptions = {},
  ): Promise<Done<unknown> | Failed | Ticket<unknown>> => {
    const { call, rest } = submission(parts, options)
    const asked = { ...call, method: method as 'POST', path, body, service: 'routes', expects: ['*'] } as const
    const { body: answer = null, headers, status } = await parts.send(asked)
    const replayed = headers.get('idempotent-replayed') === 'true'
    const { status: kind, operationId = null, error_message = '', result = null, ...more } = (answer ?? {}) as Usual
    if (operationId !== null && kind === 'queued' && status === 202) {
      const queued = { status: kind, operationId, ...more } as QueuedAnswer
      const at = ticketPath(parts, operationId, headers.get('location'))
      const view = await finishedOf(parts, queued, { ...rest, path: at })
      return view === null ? ticketOf(parts, queued, at, replayed) : ended(view, replayed)
    }
    if (operationId !== null && kind === 'failed') {
      return { kind, operationId, code: 'operation_failed', message: error_message, result, replayed }
    }
    const isUsual = operationId !== null && kind === 'executed'
    return { kind: 'done', operationId, result: isUsual ? result : answer, replayed }
  }
  return { submit: (body, options) => submit(body, options).catch(refusedOf) } as Route<D, Own>
}

/** The bodies that a definition without `respond` answers with. */
type Usual = Partial<Omit<QueuedAnswer, 'status'>> & { status?: string; error_message?: string; result?: unknown }

/**
 * Where the ticket is: the server's `Location`, below the base URL, whose own prefix it may have or not. Never another
 * origin, which must not get our token.
 */
function ticketPath({ settings }: Parts, id: string, location: string | null): string {
  const usual = operationPath(id)
  if (location === null) return usual
  for (const base of settings.bases) {
    const { origin, pathname: prefix } = new URL(base)
    try {
      const at = new URL(location, base)
      if (at.origin !== origin) continue
      return prefix !== '/' && at.pathname.startsWith(`${prefix}/`) ? at.pathname.slice(prefix.length) : at.pathname
    } catch {
      // A proxy has made something else of it. The work is accepted, so the ticket must not be lost.
      return usual
    }
  }
  return usual
}

function ticketOf(parts: Parts, queued: QueuedAnswer, at: string, replayed: boolean): Ticket<unknown> {
  const { status: kind, ...position } = queued
  const ticket: Ticket<unknown> = {
    ...{ kind, ...position, replayed },
    async wait({ timeoutMs = waitMsDefault, signal } = {}) {
      const view = await waitFor(parts, at, { timeoutMs: number('timeoutMs', timeoutMs), lookMs: lookMsMin, signal })
      return view.processed_at === null ? ticket : ended(view, replayed)
    },
    cancel: (options = {}) => cancelAt(parts, at, options),
  }
  return ticket
}

function ended({ id, status, result, error_message }: OperationView, replayed: boolean): Done<unknown> | Failed {
  if (status === 'completed') return { kind: 'done', operationId: id, result, replayed }
  const code = `operation_${status}`
  return { kind: 'failed', operationId: id, code, message: error_message ?? status, result, replayed }
}

function refusedOf(fault: unknown): Failed | Refused {
  if (!(fault instanceof SpillwayError)) throw fault
  const { code, problem } = fault
  if (typeof problem?.operationId === 'string') {
    const { operationId, detail: message, result = null } = problem
    return { kind: 'failed', operationId, code, message, result, replayed: false }
  }
  if (fault.isUnknown || (problem === null && code !== 'throttled')) throw fault
  return { kind: 'refused', code, error: fault }
}
