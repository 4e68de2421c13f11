import type { IncomingMessage, RequestListener, Server, ServerResponse } from 'node:http'
import type { Socket } from 'node:net'
import type { Readable } from 'node:stream'
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
    dropUnwanted(request)
    const look = (): void => {
      // Who left while it waited needs no answer.
      if (response.destroyed) return
      for (const listener of listeners) listener.call(server, request, response)
    }
    if (isNeverShed(request.url ?? '')) look()
    else door.pass(look)
  })
}

/** What is read of the body of a GET before its connection is closed, and what a piece of it counts beside its length. */
const unwantedBytes = 65_536
const unwantedPieceBytes = 64

/**
 * Nobody reads the body of a GET. Left alone, Node keeps what has come of it until the answer has ended, and in pieces of one byte
 * that takes 5 MB, for as long as a pop waits. So it is thrown away as it comes, and one that has no end is cut off.
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

/** The answer that Node has under way on this socket, if any; it has no public name for it. */
export function answerOf(socket: Socket): Partial<ServerResponse> | null {
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

/** What is thrown away of one stream before others have their turn, and how often a turn comes: 64 MB a second in all. */
const discardBytes = 262_144
const discardTurnMs = 4

const waitingForTurn: Readable[] = []
let turns: NodeJS.Timeout | undefined

/**
 * Reads a stream and throws away what comes, slowly. Node reads up to 2 MB of a socket before it looks at the next: 200 refused uploads
 * that are read as fast as they come make turns of the event loop that last for seconds.
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
 * Closing a socket with unread bytes makes the kernel send a reset, which can destroy the answer before the client has
 * read it. So the rest is read for a moment first.
 */
function lingerThenDestroy(socket: Socket): void {
  discard(socket)
  const timer = setTimeout(() => socket.destroy(), lingerMs)
  timer.unref()
  socket.once('end', () => socket.destroy())
  socket.once('close', () => clearTimeout(timer))
}

/** For an answer given before its request was read: takes the rest of the body for a moment, then closes. */
export function discardRest(request: IncomingMessage): void {
  if (request.complete) return
  discard(request)
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
