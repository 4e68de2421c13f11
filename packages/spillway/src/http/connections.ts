import type { IncomingMessage, RequestListener, Server, ServerResponse } from 'node:http'
import type { Socket } from 'node:net'
import type { FastifyInstance } from 'fastify'
import type { Door } from '../pressure/door.js'
import { newTraceId } from '../telemetry/trace.js'
import { type Problem, rawProblemAnswer } from './problem.js'

/**
 * Connections beyond the cap are still read, so that health answers and everyone else is told 503; beyond this many
 * more they are dropped unread.
 */
const connectionsReserve = 256

export interface ConnectionCap {
  /** Whether this request came over a connection beyond the cap. */
  isBeyond(request: IncomingMessage): boolean
}

export function capConnections(server: Server, connectionsMax: number): ConnectionCap {
  const beyond = new WeakSet<Socket>()
  let open = 0
  server.maxConnections = connectionsMax + connectionsReserve
  server.on('connection', (socket: Socket) => {
    open++
    if (open > connectionsMax) beyond.add(socket)
    socket.once('close', () => {
      open--
    })
  })
  return { isBeyond: (request) => open > connectionsMax && beyond.has(request.socket) }
}

/**
 * Puts the door before whoever answers requests so far. What is never shed (G8) does not wait at it: probes are few, and
 * cheap to answer.
 */
export function guardRequests(server: Server, door: Door, isNeverShed: (url: string) => boolean = () => false): void {
  const listeners = server.listeners('request') as RequestListener[]
  server.removeAllListeners('request')
  server.on('request', (request, response) => {
    const look = (): void => {
      // Who left while it waited needs no answer.
      if (response.destroyed) return
      for (const listener of listeners) listener.call(server, request, response)
    }
    if (isNeverShed(request.url ?? '')) look()
    else door.pass(look)
  })
}

interface ConnectionFault extends Error {
  code?: string
}

function problemOf(code: string | undefined): Problem {
  switch (code) {
    case 'HPE_HEADER_OVERFLOW':
    case 'HPE_CHUNK_EXTENSIONS_OVERFLOW':
      return { code: 'header_fields_too_large', detail: 'The header fields are too large.' }
    case 'ERR_HTTP_REQUEST_TIMEOUT':
      return { code: 'request_timeout', detail: 'The request did not arrive in time.' }
    default:
      return {
        code: 'invalid_request',
        detail: 'The request is not well-formed HTTP.',
        errors: [{ path: '', message: 'is not well-formed HTTP' }],
      }
  }
}

/** The answer that Node has under way on this socket, if any; it has no public name for it. */
function answerOf(socket: Socket): Partial<ServerResponse> | null {
  const message: unknown = Reflect.get(socket, '_httpMessage')
  return typeof message === 'object' ? message : null
}

/**
 * Answers what the HTTP parser refuses or gives up waiting for, and closes. Half an answer may be on the wire already:
 * a second one behind it would be read as its body.
 */
export function answerClientFault(this: FastifyInstance, fault: ConnectionFault, socket: Socket): void {
  const answer = answerOf(socket)
  if (fault.code === 'ECONNRESET' || !socket.writable || answer?.headersSent === true) {
    socket.destroy()
    return
  }
  const problem = problemOf(fault.code)
  const traceId = newTraceId()
  this.log.debug({ trace_id: traceId, fault: fault.code }, 'connection refused by the HTTP parser')
  socket.end(rawProblemAnswer(problem, traceId, answer?.req?.url), () => lingerThenDestroy(socket))
}

/** How long the rest of a refused request is read and thrown away, in milliseconds. */
const lingerMs = 2_000

/**
 * Closing a socket with unread bytes makes the kernel send a reset, which can destroy the answer before the client has
 * read it. So the rest is read for a moment first.
 */
function lingerThenDestroy(socket: Socket): void {
  socket.resume()
  const timer = setTimeout(() => socket.destroy(), lingerMs)
  timer.unref()
  socket.once('end', () => socket.destroy())
  socket.once('close', () => clearTimeout(timer))
}

/** For an answer given before its request was read: takes the rest of the body for a moment, then closes. */
export function discardRest(request: IncomingMessage): void {
  if (request.complete) return
  request.resume()
  const { socket } = request
  const timer = setTimeout(() => {
    if (!request.complete) socket.destroy()
  }, lingerMs)
  timer.unref()
  // Of the request, not of the socket: that one may carry a million more.
  request.once('close', () => clearTimeout(timer))
}

/**
 * Fires when the client leaves before its answer. Made only for those who wait: an AbortController costs as much as parsing
 * the body, and firing one as much again.
 */
export function goneSignal(response: ServerResponse): AbortSignal {
  const gone = new AbortController()
  const leave = (): void => {
    if (!response.writableFinished) gone.abort()
  }
  if (response.closed) leave()
  else response.once('close', leave)
  return gone.signal
}
