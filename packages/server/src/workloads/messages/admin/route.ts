/** One row of the administration's route table, and what registers it. */
import { Problem } from '@spillway/protocol/schema'
import type { FastifyLike as App } from 'spillway/workload'
import { mayUseQueue, ProblemError } from 'spillway/workload'
import type { Static, TSchema } from 'typebox'
import type { AppReply as Reply, AppRequest as Request } from '../../../app.js'
import type { Principal, Role } from '../../../auth/identity.js'
import type { MessagesWorkload } from '../index.js'
import type { MessagesOptions } from '../options.js'
import type { patientReads } from './patient.js'
import type { Throughput } from './throughput.js'
import type { Visible } from './visible-queues.js'

/** What the handlers work with. */
export interface Admin extends Pick<MessagesWorkload, 'intake' | 'seal' | 'queues' | 'maintenance' | 'wake'> {
  schema: MessagesOptions['schema']
  pageBytesMax: MessagesOptions['pageBytesMax']
  /** For reads that take long. */
  query: ReturnType<typeof patientReads>
  throughput: Throughput
}

/** The names in a path. A route has those that are in its URL. */
interface PathNames {
  queue: string
  group: string
  partitionId: string
  transactionId: string
  traceId: string
  id: string
}

export interface AdminRequest<Query = unknown, Body = unknown> {
  params: PathNames
  query: Query
  body: Body
  bodyText: string
  principal: Principal
  visible: Visible
  /** Sets a header of the answer. */
  header(name: string, value: string): void
}

interface RouteDetails<Query extends TSchema, Body extends TSchema> {
  /** Not for keys that are bound to queues. */
  wholeServer?: true
  summary: string
  description?: string
  query?: Query
  body?: Body
  /** The answer's schema, for the API description. The answer is not cut to it. */
  answer?: TSchema
  /** Of the answer. Default 200. */
  status?: 200 | 201
  /** What does not exist if the handler returns null. */
  missing?: string
}

type Method = 'GET' | 'POST' | 'DELETE'
type Handler<Query, Body> = (admin: Admin, request: AdminRequest<Query, Body>) => unknown

export interface Route extends RouteDetails<TSchema, TSchema> {
  method: Method
  url: string
  role: Role | readonly Role[]
  handle: Handler<unknown, unknown>
}

/** A row of the table. The handler's request has the types of the schemas. */
export const route = <Query extends TSchema, Body extends TSchema>(
  method: Method,
  url: string,
  role: Route['role'],
  handle: Handler<Static<Query>, Static<Body>>,
  details: RouteDetails<Query, Body>,
): Route => ({ method, url, role, handle: handle as Route['handle'], ...details })

export function addRoutes(app: App, admin: Admin, routes: readonly Route[]): void {
  for (const row of routes) {
    const { method, url, role, wholeServer, status = 200, missing = 'thing' } = row
    app.route({
      method,
      url,
      schema: apiSchemaOf(row),
      config: { errorForm: true, role, ...(wholeServer && { wholeServer }) },
      handler: async (request, reply) => {
        const asked = toAdminRequest(request as Request, reply as Reply)
        const { queue } = asked.params as Partial<PathNames>
        // For a key that is bound to queues, other queues do not exist.
        const isHidden = queue !== undefined && !mayUse(asked, queue)
        const found = isHidden ? null : await row.handle(admin, asked)
        if (found === null) throw notFound(missing)
        return reply.code(status).send(found)
      },
    })
  }
}

function apiSchemaOf({ summary, description, query, body, answer, status = 200 }: Route) {
  return {
    tags: ['messages'],
    summary,
    ...(description !== undefined && { description }),
    ...(query !== undefined && { querystring: query }),
    ...(body !== undefined && { body }),
    ...(answer !== undefined && { response: { [status]: answer, '4xx': Problem, '5xx': Problem } }),
  }
}

function toAdminRequest(request: Request, reply: Reply): AdminRequest {
  const { params, query, body, bodyText = '', principal } = request
  return {
    params: params as PathNames,
    query,
    body,
    bodyText,
    principal,
    visible: principal.queues ?? null,
    header: (name, value) => void reply.header(name, value),
  }
}

export const mayUse = ({ visible }: Pick<AdminRequest, 'visible'>, queue: string): boolean =>
  mayUseQueue(visible ?? undefined, queue)

export const notFound = (what: string): ProblemError =>
  new ProblemError({ code: 'not_found', detail: `There is no such ${what}.` })
