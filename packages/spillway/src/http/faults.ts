import type { FastifyError, FastifyReply, FastifyRequest } from 'fastify'
import { StoreFault } from '../store/postgres/faults.js'
import { LogFault } from '../streams/port.js'
import { bodyCutOff, bodyTooLarge, notJson } from './body-form.js'
import { discardRest } from './connections.js'
import { type Problem, sendProblem, urlProblem } from './problem.js'
import { InvalidRequest } from './validation.js'

/** Carries a problem through Fastify's error path, where a value cannot be returned (parsers, hooks). */
export class ProblemError extends Error {
  readonly problem: Problem

  constructor(problem: Problem) {
    super(problem.detail)
    this.problem = problem
  }
}

const storeAwayRetryAfterMs = 2_000
const diskFullRetryAfterMs = 30_000

/** Undefined for faults that waiting does not fix: refused values, and statements that are our defect. */
function storeProblem({ code }: StoreFault): Problem | undefined {
  if (code === 'data' || code === 'other') return undefined
  return {
    code: 'store_unavailable',
    detail: 'The store did not answer. Try again later.',
    retryAfterMs: code === 'disk_full' ? diskFullRetryAfterMs : storeAwayRetryAfterMs,
  }
}

const logAway: Problem = {
  code: 'stream_log_unavailable',
  detail: 'The log of the streams did not answer. Try again later.',
  retryAfterMs: storeAwayRetryAfterMs,
}

function isFastifyError(fault: unknown): fault is FastifyError {
  return fault instanceof Error && 'code' in fault && typeof fault.code === 'string' && fault.code.startsWith('FST_')
}

/** The answer for our own defects. */
export const internalFault: Problem = {
  code: 'internal_error',
  detail: 'Something went wrong here; it was logged with this trace id.',
}

/** Undefined: our defect, which has to be logged. */
export function faultProblem(fault: unknown): Problem | undefined {
  if (fault instanceof ProblemError) return fault.problem
  if (fault instanceof InvalidRequest) {
    return { code: 'invalid_request', detail: 'The request is not valid.', errors: fault.errors }
  }
  if (fault instanceof StoreFault) return storeProblem(fault)
  if (fault instanceof LogFault) return logAway
  if (!isFastifyError(fault)) return undefined
  switch (fault.code) {
    case 'FST_ERR_CTP_BODY_TOO_LARGE':
      return bodyTooLarge
    case 'FST_ERR_CTP_INVALID_MEDIA_TYPE':
      return notJson
    case 'FST_ERR_CTP_INVALID_JSON_BODY':
      return bodyProblem('is not valid JSON')
    case 'FST_ERR_CTP_EMPTY_JSON_BODY':
      return bodyProblem('a JSON body is required')
    case 'FST_ERR_CTP_INVALID_CONTENT_LENGTH':
      return bodyProblem('its length is not what Content-Length says')
    case 'FST_ERR_BAD_URL':
      return urlProblem('the URL is not well-formed')
    case 'FST_ERR_MAX_PARAM_LENGTH':
      return { code: 'not_found', detail: 'There is nothing at this path.' }
    default:
      return undefined
  }
}

function bodyProblem(message: string): Problem {
  return { code: 'invalid_request', detail: 'The body is not valid.', errors: [{ path: '', message }] }
}

/** A body that was cut short: nobody reads this answer, but the request has to end. */
function isCutOff(fault: unknown): boolean {
  return fault instanceof Error && 'code' in fault && fault.code === 'ECONNRESET'
}

/** Undefined: our defect, or an error of the user's own functions. */
function problemFor(fault: unknown, { raw }: FastifyRequest): Problem | undefined {
  return faultProblem(fault) ?? (isCutOff(fault) && !raw.complete ? bodyCutOff : undefined)
}

/** Handles every error thrown in a request: known faults become their problem, all others a 500 without details. */
export function answerFault(fault: unknown, request: FastifyRequest, reply: FastifyReply): void {
  const problem = problemFor(fault, request)
  if (problem === undefined) {
    request.log.error({ err: fault, trace_id: request.id, route: request.routeOptions.url }, 'request failed')
  }
  sendFault(problem ?? internalFault, request, reply)
}

/** For a route in a user's own app: errors that are not ours go on to the app's error handler. */
export function answerKnownFault(fault: unknown, request: FastifyRequest, reply: FastifyReply): void {
  const problem = problemFor(fault, request)
  if (problem === undefined) throw fault
  sendFault(problem, request, reply)
}

function sendFault(problem: Problem, request: FastifyRequest, reply: FastifyReply): void {
  // Fastify closes after every parser error. That is needed only while the body is still arriving, or if the client has
  // closed its half: without the header Node would forget that this answer is the last.
  if (request.raw.socket.readableEnded !== true) reply.removeHeader('connection')
  discardRest(request.raw)
  sendProblem(reply, problem)
}
