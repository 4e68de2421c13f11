import type { IncomingMessage, RequestListener, Server, ServerResponse } from 'node:http'
import type { Socket } from 'node:net'
import type { Readable } from 'node:stream'
import type { FastifyInstance } from 'fastify'
import { newTraceId } from '../metrics/trace.js'
import type { Door } from '../pressure/door.js'
import { lastInLine, outlastsTimeout, Pipelines } from './pipelines.js'
import { type Problem, rawProblemAnswer } from './problem.js'
import { traceIdOf } from './trace.js'

/**
 * Connections beyond the limit are still read, so that health checks are answered and all other requests get 503; beyond
 * this many more, connections are dropped unread.
 */
const connectionsReserve = 256

export interface ConnectionCap {
  /** Whether this request came over a connection beyond the limit. */
  isBeyond(request: IncomingMessage): boolean
}

export function capConnections(server: Server, connectionsMax: number): ConnectionCap {
  const beyond = new WeakSet<Socket>()
  let open = 0
  server.maxConnections = connectionsMax + connectionsReserve
  server.on('connection', (socket: Socket) => {
    open++
    // Each of its waiting requests listens for its end.
    socket.setMaxListeners(0)
    if (open > connectionsMax) beyond.add(socket)
    socket.once('close', () => {
      open--
    })
  })
  return { isBeyond: (request) => open > connectionsMax && beyond.has(request.socket) }
}

/**
 * Puts the door before the server's request listeners. Requests that are never shed (G8) do not wait at it: probes are few,
 * and cheap to answer. Those behind other requests of the same socket wait like the rest.
 */
export function guardRequests(server: Server, door: Door, isNeverShed: (url: string) => boolean = () => false): void {
  const listeners = server.listeners('request') as RequestListener[]
  server.removeAllListeners('request')
  const pass = (request: IncomingMessage, response: ServerResponse): void =>
    door.pass(
      () => {
        // A client that left while it waited needs no answer.
        if (!response.destroyed) look(request, response)
      },
      () => response.destroyed,
    )
  const look = (request: IncomingMessage, response: ServerResponse): void => {
    for (const listener of listeners) listener.call(server, request, response)
  }
  // Each request of a socket keeps all the others of it in memory, perhaps thousands.
  let isForgetting = false
  const forget = (): void => {
    if (isForgetting) return
    isForgetting = true
    setImmediate(() => {
      isForgetting = false
      door.forgetGone()
    })
  }
  const pipelines = new Pipelines(pass, forget)
  server.on('request', (request, response) => {
    dropUnwanted(request)
    if (response.socket === null) pipelines.add(request, response)
    else if (isNeverShed(request.url ?? '')) look(request, response)
    else pass(request, response)
  })
}

/** How much of a GET's body is read before its connection is closed, and the overhead counted for each piece. */
const unwantedBytes = 65_536
const unwantedPieceBytes = 64

/**
 * Nobody reads the body of a GET. Node would keep what has arrived until the answer has ended; in pieces of one byte that
 * takes 5 MB, for as long as a pop waits. So it is discarded on arrival, and an endless one is cut off.
 */
function dropUnwanted(request: IncomingMessage): void {
  if (request.method !== 'GET' && request.method !== 'HEAD') return
  const { headers } = request
  if (headers['transfer-encoding'] === undefined && (headers['content-length'] ?? '0') === '0') return
  let left = unwantedBytes
  request.on('data', ({ length }: Buffer) => {
    left -= length + unwantedPieceBytes
    if (left < 0) request.socket.destroy()
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

/** The answer that Node currently writes on this socket, if any; there is no public name for it. */
export function answerOf(socket: Socket): Partial<ServerResponse> | null {
  const message: unknown = Reflect.get(socket, '_httpMessage')
  return typeof message === 'object' ? message : null
}

/**
 * Answers requests that the HTTP parser refuses or times out, and closes. Whole requests before it on the same socket get
 * their answers first. If half an answer is on the wire already, none is sent: it would be read as the body of the first.
 */
export function answerClientFault(this: FastifyInstance, fault: ConnectionFault, socket: Socket): void {
  if (fault.code === 'ERR_HTTP_REQUEST_TIMEOUT' && outlastsTimeout(socket)) return
  if (fault.code === 'ECONNRESET' || !socket.writable) return void socket.destroy()
  const last = lastInLine(socket) ?? answerOf(socket)
  if (last?.req?.complete !== true) return void refuseUnread(this, fault, socket)
  // The parser refuses each further chunk again.
  if (refused.has(socket)) return
  refused.add(socket)
  last.once?.('close', () => refuseUnread(this, fault, socket))
}

const refused = new WeakSet<Socket>()

function refuseUnread({ log }: FastifyInstance, { code }: ConnectionFault, socket: Socket): void {
  const answer = answerOf(socket)
  if (!socket.writable || answer?.headersSent === true) return void socket.destroy()
  const traceId = newTraceId()
  log.debug({ trace_id: traceId, fault: code }, 'connection refused by the HTTP parser')
  socket.end(rawProblemAnswer(problemOf(code), traceId, answer?.req?.url), () => lingerThenDestroy(socket))
}

const anyMethod = 'GET, HEAD, POST, PUT, PATCH, DELETE'

/** CONNECT asks for a tunnel, which this server does not offer. Node leaves the socket to the listener alone. */
export function refuseTunnels(server: Server): void {
  server.on('connect', (request: IncomingMessage, socket: Socket) => {
    socket.on('error', () => socket.destroy())
    // Answers to requests before it are not finished.
    if (answerOf(socket) !== null) return void socket.destroy()
    const problem: Problem = { code: 'method_not_allowed', detail: `CONNECT is not supported. Use ${anyMethod}.` }
    const traceId = traceIdOf(request.headers.traceparent)
    socket.end(rawProblemAnswer(problem, traceId, '/', { allow: anyMethod }), () => lingerThenDestroy(socket))
  })
}

/** How long the rest of a refused request is read and discarded, in milliseconds. */
const lingerMs = 2_000

/** How much of one stream is discarded per turn, and how often a turn comes: 64 MB a second in total. */
const discardBytes = 262_144
const discardTurnMs = 4

const waitingForTurn: Readable[] = []
let turns: NodeJS.Timeout | undefined

/**
 * Reads a stream slowly and discards it. Node reads up to 2 MB of a socket before it looks at the next: 200 refused uploads
 * read at full speed make turns of the event loop that last for seconds.
 */
function discard(stream: Readable): void {
  let left = discardBytes
  stream.on('data', ({ length }: Buffer) => {
    left -= length
    if (left > 0) return
    left = discardBytes
    stream.pause()
    waitingForTurn.push(stream)
    turns ??= setInterval(giveTurn, discardTurnMs).unref()
  })
  stream.resume()
}

function giveTurn(): void {
  const next = waitingForTurn.shift()
  if (next !== undefined) return void next.resume()
  clearInterval(turns)
  turns = undefined
}

/**
 * Closing a socket with unread bytes makes the kernel send a reset, which can destroy the answer before the client has read
 * it. So the rest is read for a moment first.
 */
function lingerThenDestroy(socket: Socket): void {
  discard(socket)
  const timer = setTimeout(() => socket.destroy(), lingerMs)
  timer.unref()
  socket.once('end', () => socket.destroy())
  socket.once('close', () => clearTimeout(timer))
}

/** For an answer given before its request was read: reads the rest of the body for a moment, then closes. */
export function discardRest(request: IncomingMessage): void {
  if (request.complete) return
  discard(request)
  const { socket } = request
  const timer = setTimeout(() => {
    if (!request.complete) socket.destroy()
  }, lingerMs)
  timer.unref()
  // Per request, not per socket: the socket may carry a million more.
  request.once('close', () => clearTimeout(timer))
}

/**
 * Calls back once when the client of an unfinished answer has left, or at once if it has already. A half-close (FIN) counts:
 * a killed client sends the same, so nothing may wait for it. Returns a function that ends the watch.
 */
export function whenGone(response: ServerResponse, leave: () => void): () => void {
  const { socket } = response.req
  const stop = (): void => {
    response.off('close', left)
    socket.off('end', left)
  }
  const left = (): void => {
    stop()
    if (!response.writableFinished) leave()
  }
  if (response.destroyed || socket.readableEnded) {
    left()
    return stop
  }
  response.once('close', left)
  socket.once('end', left)
  return stop
}

/**
 * Fires when the client leaves before its answer. `wait`: for pure waiting, already at the client's half-close. `work`: once
 * no answer can reach it. Created only on demand: an AbortController costs as much as parsing the body, and firing one as
 * much again.
 */
export function goneSignal(response: ServerResponse, during: 'wait' | 'work'): AbortSignal {
  const gone = new AbortController()
  const leave = (): void => {
    if (!response.writableFinished) gone.abort()
  }
  if (during === 'wait') whenGone(response, leave)
  else if (response.destroyed) leave()
  else response.once('close', leave)
  return gone.signal
}
