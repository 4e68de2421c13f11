/** Answers as status, headers and text, for the bindings that write them themselves: node:http, Express and fetch. */
import { jsonOf } from './carried-json.js'
import type { Wire } from './mount.js'
import { encodeProblem, type Problem, type ProblemPlace } from './problem.js'
import type { TicketAnswer } from './ticket-table.js'

export interface EncodedAnswer {
  status: number
  headers: Record<string, string>
  body: string | undefined
}

/** They must not submit work: a crawler sends them too. For bindings without a router before them. */
export const safeMethods: ReadonlySet<string> = new Set(['GET', 'HEAD', 'OPTIONS', 'TRACE'])
const allow = 'POST, PUT, PATCH, DELETE'
export const methodRefused: Wire = {
  ok: false,
  problem: { code: 'method_not_allowed', detail: `Use ${allow}.` },
  headers: { allow },
}

const jsonContentType = 'application/json; charset=utf-8'

export function encodeWire(wire: Wire, place: ProblemPlace): EncodedAnswer {
  if (!wire.ok) return problemAnswer(wire.problem, place, wire.headers)
  const { status, headers, body } = wire.answer
  if (body === undefined) return { status, headers, body }
  return { status, headers: { ...headers, 'content-type': jsonContentType }, body: JSON.stringify(body) }
}

export function encodeTicket(answer: Exclude<TicketAnswer, { kind: 'events' }>, place: ProblemPlace): EncodedAnswer {
  switch (answer.kind) {
    case 'json':
      return { status: answer.status, headers: { 'content-type': jsonContentType }, body: jsonOf(answer.body) }
    case 'problem':
      return problemAnswer(answer.problem, place)
    case 'empty':
      return { status: 204, headers: {}, body: undefined }
  }
}

export function problemAnswer(
  problem: Problem,
  place: ProblemPlace,
  more: Readonly<Record<string, string>> = {},
): EncodedAnswer {
  const { status, headers, body } = encodeProblem(problem, place, undefined)
  return { status, headers: { ...more, ...headers }, body }
}
