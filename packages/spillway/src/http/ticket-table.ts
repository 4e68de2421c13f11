/**
 * The ticket routes as data, whatever the web framework: tickets.ts validates query and body with the schemas of a route and
 * calls its handler; a binding reads the request and sends the answer.
 */
import { Problem as ProblemSchema } from '@spillway/protocol/schema'
import Type, { type TSchema } from 'typebox'
import type { Intake } from '../intake/intake.js'
import type { EventSink, OutputOf } from './operation-stream.js'
import type { Problem } from './problem.js'
import type { Caller, Role, TicketAccess } from './viewer.js'

export interface TicketRequest<Query = unknown, Body = unknown> {
  /** The id in the path; empty for a route without one. */
  id: string
  query: Query
  /** Undefined: none was sent. */
  body: Body
  lastEventId: string | undefined
  caller: Caller
  /** Fires when the client leaves before its answer. */
  gone(): AbortSignal
}

export type TicketAnswer =
  | { kind: 'json'; status: 200 | 202; body: unknown }
  | { kind: 'problem'; problem: Problem }
  /** 204 */
  | { kind: 'empty' }
  /** Server-sent events; `send` settles after the last one. */
  | { kind: 'events'; send(sink: EventSink): Promise<void> }

/** What the handlers work with. */
export interface TicketContext {
  intake: Intake
  access: TicketAccess
  outputOf: OutputOf | undefined
  pageBytesMax: number
  unreadMs: number
}

export interface TicketRoute<Query = unknown, Body = unknown> {
  method: 'GET' | 'POST' | 'DELETE'
  /** With `:id` for the operation's id. */
  path: string
  /** The role that the server requires before it reads the body. Default: any. */
  role?: Role
  summary: string
  description?: string
  query: TSchema
  /** Absent: the handler checks the body itself, or there is none. */
  body?: TSchema
  /** For the API description; the answer sent is not cut to it. */
  response?: Record<string, TSchema>
  /** It answers with events: a HEAD would hold a stream open that nobody reads. */
  streams?: true
  handle(context: TicketContext, request: TicketRequest<Query, Body>): Promise<TicketAnswer>
}

/** The answers of a route that succeeds with `schema`. */
export const answers = (schema: TSchema): Record<string, TSchema> => ({
  200: schema,
  '4xx': ProblemSchema,
  '5xx': ProblemSchema,
})

/** For a query or a body without members. */
export const Nothing = Type.Object({}, { additionalProperties: false })

export const json = (body: unknown, status: 200 | 202 = 200): TicketAnswer => ({ kind: 'json', status, body })

export const refuse = (problem: Problem): TicketAnswer => ({ kind: 'problem', problem })

export const notFound = refuse({ code: 'not_found', detail: 'There is no such operation.' })

export const needsOperate = refuse({ code: 'forbidden', detail: 'This needs the role operate.' })
