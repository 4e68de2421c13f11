/**
 * The ticket routes for every binding: finds the route of a request, checks query and body, and calls its handler. Known
 * faults become problems here; all others are thrown, for the binding's framework.
 */
import { limits } from '@spillway/protocol/wire'
import type { TSchema } from 'typebox'
import type { IntakeRequest } from '../intake/define.js'
import type { Intake } from '../intake/intake.js'
import type { Body } from './body-form.js'
import { deadLetterRoutes } from './dead-letter-routes.js'
import { faultProblem } from './faults.js'
import { laneRoutes } from './lane-routes.js'
import { operationRoutes } from './operation-routes.js'
import type { OutputOf } from './operation-stream.js'
import type { Problem } from './problem.js'
import { notReady } from './readiness.js'
import { refuse, type TicketAnswer, type TicketContext, type TicketRoute } from './ticket-table.js'
import './typebox.js'
import { validatorCompiler } from './validation.js'
import { callerOf, ticketAccess, type Viewer } from './viewer.js'

export interface TicketRoutesOptions {
  /**
   * Who asks. Default: the identity that a ticket's definition gives to this request; `request.user` with the role `operate`
   * sees and changes everything, with `view` it sees everything.
   */
  viewer?: (request: IntakeRequest) => Viewer
  /** For operations with an output stream. */
  outputOf?: OutputOf
  /** A page of a list ends at this size. Default 4 MiB. */
  pageBytesMax?: number
  /** A stream that its client does not read for this time is closed. Default 35 s. */
  unreadMs?: number
  /** Types whose queue the caller names: a key bound to queues is limited to its queues for these. Default: none. */
  namedTypes?: readonly string[]
}

/** Later than our own server, which closes every unread answer after 30 s and counts it. */
const unreadMsDefault = 35_000

export const ticketTable: readonly TicketRoute[] = [...operationRoutes, ...deadLetterRoutes, ...laneRoutes]

/** The answer for a path that is none of the table's. */
export const noTicketPath: Problem = { code: 'not_found', detail: 'There is nothing at this path.' }

/** A request for a route of the table, as a binding reads it. */
export interface TicketCall {
  request: IntakeRequest
  id: string
  query: unknown
  /** Called once, for routes that may have a body. */
  body(): Promise<Body> | Body
  /** Fires when the client leaves before its answer. */
  gone(): AbortSignal
}

export class Tickets {
  readonly #intake: Intake
  readonly #options: TicketRoutesOptions
  readonly #context: TicketContext

  constructor(intake: Intake, options: TicketRoutesOptions = {}) {
    this.#intake = intake
    this.#options = options
    this.#context = {
      intake,
      access: ticketAccess(intake, options.namedTypes ?? []),
      outputOf: options.outputOf,
      pageBytesMax: options.pageBytesMax ?? limits.pageBytes,
      unreadMs: options.unreadMs ?? unreadMsDefault,
    }
  }

  async answer(route: TicketRoute, call: TicketCall): Promise<TicketAnswer> {
    // There may be no tables yet, and a failing statement would look like our defect.
    if (!this.#intake.presence.isReady) return refuse(notReady)
    try {
      const { request, id } = call
      const body: Body = route.method === 'GET' ? { ok: true, value: undefined } : await call.body()
      if (!body.ok) return refuse(body.problem)
      return await route.handle(this.#context, {
        id,
        body: route.body === undefined ? body.value : checked(route.body, 'body', body.value),
        query: checked(route.query, 'querystring', call.query),
        lastEventId: request.headers['last-event-id'],
        caller: callerOf(this.#intake, request, this.#options.viewer),
        gone: call.gone,
      })
    } catch (fault) {
      const problem = faultProblem(fault)
      if (problem === undefined) throw fault
      return refuse(problem)
    }
  }
}

const validators = new Map<TSchema, ReturnType<typeof validatorCompiler>>()

/** The value in its schema's types. Throws InvalidRequest. */
function checked(schema: TSchema, httpPart: 'body' | 'querystring', value: unknown): unknown {
  let validate = validators.get(schema)
  if (validate === undefined) {
    validate = validatorCompiler({ schema, httpPart, method: '', url: '' })
    validators.set(schema, validate)
  }
  const result = validate(value) as { value: unknown } | { error: Error }
  if ('error' in result) throw result.error
  return result.value
}

const forms = ticketTable.map((route) => ({
  route,
  form: new RegExp(`^${route.path.replace(':id', '([^/]+)')}$`),
}))

/** The route of a request, for bindings without a router. HEAD is a GET whose body is not sent. */
export function findTicketRoute(method: string, path: string): { route: TicketRoute; id: string } | null {
  const asked = method === 'HEAD' ? 'GET' : method
  for (const { route, form } of forms) {
    const match = route.method === asked && !(route.streams && method === 'HEAD') ? form.exec(path) : null
    if (match !== null) return { route, id: match[1] ?? '' }
  }
  return null
}

/** A query as an object; repeated names make a list. */
export function queryOf(parameters: URLSearchParams): Record<string, string | string[]> {
  const query: Record<string, string | string[]> = Object.create(null)
  for (const name of parameters.keys()) {
    const values = parameters.getAll(name)
    query[name] = values.length === 1 ? (values[0] ?? '') : values
  }
  return query
}
