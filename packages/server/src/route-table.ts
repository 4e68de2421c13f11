/** Routes of a workload as a table: each row has its schemas and its handler, whose request has the types of the schemas. */
import { Problem } from '@spillway/protocol/schema'
import {
  type ErrorForm,
  type FastifyLike,
  type Intake,
  jsonOf,
  ProblemError,
  refuseUntilReady,
} from 'spillway/workload'
import Type, { type Static, type TSchema } from 'typebox'
import type { AppReply, AppRequest } from './app.js'

type Method = 'GET' | 'POST' | 'DELETE'
/** Role, and what else is particular about the route. */
type Access = Omit<AppRequest['routeOptions']['config'], 'url' | 'method'>

/** The names behind colons in a URL. */
type NamesIn<Url extends string> = Url extends `${string}:${infer Name}/${infer Rest}`
  ? Name | NamesIn<Rest>
  : Url extends `${string}:${infer Name}`
    ? Name
    : never

export type RouteRequest<Query = unknown, Body = unknown, Name extends string = never> = Omit<
  AppRequest,
  'params' | 'query' | 'body'
> & { params: Record<Name, string>; query: Query; body: Body }

export interface Details<Context, Query extends TSchema, Body extends TSchema, Name extends string> {
  summary: string
  description?: string
  params?: TSchema
  query?: Query
  body?: Body
  /** The handler checks the body: its schema is for the API description only. */
  isBodyDescribed?: boolean
  /** Default: the server's. */
  bodyLimitBytes?: number
  /** A HEAD would hold something open that nobody reads. */
  hasNoHead?: boolean
  /** The answer's schema, for the API description. The answer is not cut to it. */
  answer?: TSchema
  /** Of the answer. Default 200. */
  status?: 200 | 201
  /** Further answers, for the API description. */
  otherAnswers?: Readonly<Record<number, TSchema>>
  /** What does not exist if the handler returns null. */
  missing?: string
  /** Returns the answer, or the reply if it has sent one. */
  handle(context: Context, request: RouteRequest<Static<Query>, Static<Body>, Name>, reply: AppReply): unknown
}

export interface Route<Context> extends Details<Context, TSchema, TSchema, string> {
  method: Method
  url: string
  access: Access
}

export type MakeRoute<Context> = <const Url extends string, Query extends TSchema, Body extends TSchema>(
  method: Method,
  url: Url,
  access: Access,
  details: Details<Context, Query, Body, NamesIn<Url>>,
) => Route<Context>

/** Makes rows of a table whose handlers get a `Context`. */
export function routeFor<Context>(): MakeRoute<Context> {
  return (method, url, access, details) => ({
    method,
    url,
    access,
    ...(details as Omit<Route<Context>, 'method' | 'url' | 'access'>),
  })
}

export const notFound = (what: string): ProblemError =>
  new ProblemError({ code: 'not_found', detail: `There is no such ${what}.` })

export interface TableOptions {
  intake: Intake
  tag: string
  /** Of all routes, and its schema. Default: problem documents. */
  errorForm?: ErrorForm
  problem?: TSchema
}

/** Routes that use the store: refused until it is ready. */
export function tableRoutes<Context>(
  { intake, tag, errorForm, problem = Problem }: TableOptions,
  context: Context,
  routes: readonly Route<Context>[],
): (app: FastifyLike) => Promise<void> {
  return async (app) => {
    app.setSerializerCompiler(() => jsonOf)
    refuseUntilReady(app, intake)
    for (const row of routes) {
      const { method, url, access, status = 200, missing = 'thing', bodyLimitBytes: bodyLimit } = row
      app.route({
        method,
        url,
        schema: apiSchemaOf(tag, problem, row),
        ...(bodyLimit !== undefined && { bodyLimit }),
        ...(row.isBodyDescribed && { validatorCompiler: () => () => true }),
        config: { ...access, ...(errorForm !== undefined && { errorForm }) },
        // A HEAD would consume something that nobody sees.
        ...((access.consumes || row.hasNoHead) && { exposeHeadRoute: false }),
        handler: async (request, reply) => {
          const found = await row.handle(context, request as RouteRequest<unknown, unknown, string>, reply)
          if (found === null) throw notFound(missing)
          // A reply can be awaited like a promise, which gives undefined once it is sent.
          return found === reply || reply.sent ? reply : reply.code(status).send(found)
        },
      })
    }
  }
}

function apiSchemaOf<Context>(tag: string, problem: TSchema, row: Route<Context>) {
  const { summary, description, params, query, body, answer, status = 200, otherAnswers } = row
  return {
    tags: [tag],
    summary,
    ...(description !== undefined && { description }),
    ...(params !== undefined && { params }),
    ...(query !== undefined && { querystring: query }),
    ...(body !== undefined && { body }),
    response: { [status]: answer ?? Type.Unknown(), ...otherAnswers, '4xx': problem, '5xx': problem },
  }
}
