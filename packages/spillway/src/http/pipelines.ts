/**
 * Limits what one socket can have under way. A client may send any number of requests without waiting for answers, and
 * Node dispatches all of them that came in one read (64 kB, some 2,000 requests) at once.
 *
 *   arrives ──its socket has nothing else under way──► begins            (every ordinary client; no bookkeeping)
 *      ├──fewer than underWayMax before it──► begins
 *      └──else──► held ──one before it was answered──► begins
 *
 * While requests are held their socket is not read, so at most one read's worth is held. Node itself writes the answers in
 * order. All sockets together may hold heldMax; one that would hold more is closed.
 *
 * Node leaves two things to us for answers that wait for their turn:
 *   - If the socket closes first, Node emits no 'close' on them. It is emitted here, or their resources are never released.
 *   - Node's request timeout runs while its socket is not read. The client is not late then.
 */
import type { IncomingMessage, ServerResponse } from 'node:http'
import type { Socket } from 'node:net'

/** Clients pipeline a handful. 20,000 GETs on one socket take as long with 8 as with 128 (6,000 to 8,000 a second). */
const underWayMax = 32
/** About 10 kB each, before work has begun. */
const heldMax = 8_192
/** For the rest of a request that Node's timeout no longer watches. */
const restMs = 10_000

interface Held {
  readonly request: IncomingMessage
  readonly response: ServerResponse
}

/** The requests of one socket behind the first. */
interface Line {
  readonly socket: Socket
  readonly begun: Set<ServerResponse>
  readonly held: Held[]
  /** How many of the held ones have begun. */
  taken: number
  last: ServerResponse
  /** For the incomplete request, if there is one. */
  isUnwatched: boolean
  keepPaused: () => void
}

const lines = new WeakMap<Socket, Line>()
let heldInAll = 0

const isHolding = (line: Line): boolean => line.taken < line.held.length

/** The last answer that the socket has to carry, of those that wait behind another. */
export function lastInLine(socket: Socket): ServerResponse | undefined {
  const last = lines.get(socket)?.last
  return last === undefined || last.destroyed ? undefined : last
}

export class Pipelines {
  readonly #begin: (request: IncomingMessage, response: ServerResponse) => void
  readonly #onClosed: () => void

  /** `onClosed`: a socket is gone, and nobody waits for its answers. */
  constructor(begin: (request: IncomingMessage, response: ServerResponse) => void, onClosed: () => void) {
    this.#begin = begin
    this.#onClosed = onClosed
  }

  /** For a request whose answer has to wait for another on its socket: `response.socket` is null. */
  add(request: IncomingMessage, response: ServerResponse): void {
    const { socket } = request
    if (socket.destroyed) return
    const line = lines.get(socket) ?? this.#open(socket, response)
    line.last = response
    if (!isHolding(line) && line.begun.size < underWayMax) {
      this.#start(line, request, response)
      return
    }
    if (heldInAll >= heldMax) {
      socket.destroy()
      return
    }
    if (!isHolding(line)) {
      socket.on('resume', line.keepPaused)
      socket.pause()
    }
    heldInAll++
    line.held.push({ request, response })
  }

  #open(socket: Socket, last: ServerResponse): Line {
    const line: Line = {
      ...{ socket, last, begun: new Set(), held: [], taken: 0, isUnwatched: false },
      // Node resumes the socket after each parsed request.
      keepPaused: () => void socket.pause(),
    }
    lines.set(socket, line)
    socket.once('close', () => this.#close(line))
    return line
  }

  #start(line: Line, request: IncomingMessage, response: ServerResponse): void {
    line.begun.add(response)
    if (line.isUnwatched && !request.complete) watchRest(request)
    response.once('close', () => {
      if (line.begun.delete(response)) this.#next(line)
    })
    this.#begin(request, response)
  }

  #next(line: Line): void {
    if (line.socket.destroyed) return
    while (line.begun.size < underWayMax) {
      const next = line.held[line.taken]
      if (next === undefined) return
      line.taken++
      heldInAll--
      if (!isHolding(line)) this.#release(line)
      this.#start(line, next.request, next.response)
    }
  }

  #release(line: Line): void {
    line.held.length = 0
    line.taken = 0
    line.socket.off('resume', line.keepPaused)
    line.socket.resume()
  }

  #close(line: Line): void {
    heldInAll -= line.held.length - line.taken
    line.held.length = 0
    line.taken = 0
    const abandoned = [...line.begun]
    line.begun.clear()
    for (const response of abandoned) {
      if (response.destroyed) continue
      response.destroy()
      response.emit('close')
    }
    this.#onClosed()
  }
}

/**
 * Takes over a Node timeout that fired while the socket was not read. False: the client is late. Node no longer watches that
 * request: the connection's idle time ends it if its head is incomplete, and its body has restMs.
 */
export function outlastsTimeout(socket: Socket): boolean {
  const line = lines.get(socket)
  if (line === undefined || !isHolding(line)) return false
  line.isUnwatched = true
  return true
}

function watchRest(request: IncomingMessage): void {
  const timer = setTimeout(() => {
    if (!request.complete) request.socket.destroy()
  }, restMs).unref()
  request.once('close', () => clearTimeout(timer))
}
