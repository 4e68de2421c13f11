import type { ServerResponse } from 'node:http'
import type { Socket } from 'node:net'
import { DueRing } from 'spillway/workload'
import { findStalled, Stall, stallLooks } from './stall.js'
import { leaveToOwner } from './unread-answers.js'

/** A colon and ONE newline. A blank line would end an empty block, which breaks OpenAI's decoders. */
const heartbeat = ':\n'
const newline = 10
const colon = 58

export interface SseHubOptions {
  /** A comment line is sent after this time without a write. */
  heartbeatMs: number
  /** A connection is closed when bytes wait for it and the client has read none of them for this time. */
  stallMs: number
  onStalled(): void
  now?: () => number
}

export interface SseConnection {
  /**
   * `text` is whole blocks, or a comment line. 'closed': the stream was ended, the client left, or it read nothing for
   * stallMs. A promise while the socket is full: await it before the next write.
   */
  write(text: string): Written | Promise<Written>
  readonly isClosed: boolean
  readonly wasStalled: boolean
  /** Called once; soon, if the connection is already closed. */
  onClosed(listener: () => void): void
  end(): void
}

type Written = 'open' | 'closed'

const headers = {
  'content-type': 'text/event-stream; charset=utf-8',
  'cache-control': 'no-cache, no-transform',
  // Otherwise nginx buffers the answer until it has a full page.
  'x-accel-buffering': 'no',
}

/**
 * All SSE answers of the process. Ten thousand of them mostly wait, so each costs one small object and an entry in two
 * collections. Timers are shared.
 */
export class SseHub {
  readonly #options: SseHubOptions
  readonly #now: () => number
  readonly #connections = new Map<ServerResponse, Connection>()
  readonly #beats: DueRing<Connection>
  readonly #beatTicks: number
  /** Connections with bytes waiting. */
  readonly #full = new Map<Connection, Stall>()
  readonly #owner: ConnectionOwner
  readonly #closed: (this: ServerResponse) => void
  readonly #drained: (this: ServerResponse) => void
  #looks: NodeJS.Timeout | undefined
  #isLooking = false

  constructor(options: SseHubOptions) {
    this.#options = options
    this.#now = options.now ?? (() => performance.now())
    this.#beats = new DueRing({
      tickMs: Math.max(1, options.heartbeatMs / 16),
      longestMs: options.heartbeatMs,
      look: (connection) => this.#beat(connection),
    })
    this.#beatTicks = this.#beats.ticksOf(options.heartbeatMs)
    const connections = this.#connections
    const full = this.#full
    // One listener per event serves all connections; `this` identifies the connection.
    this.#closed = function (this: ServerResponse) {
      const connection = connections.get(this)
      if (connection === undefined) return
      connections.delete(this)
      full.delete(connection)
      connection.left()
    }
    this.#drained = function (this: ServerResponse) {
      const connection = connections.get(this)
      if (connection === undefined) return
      full.delete(connection)
      connection.drained()
    }
    this.#owner = {
      tick: () => this.#beats.tick,
      filled: (connection, raw) => {
        raw.once('drain', this.#drained)
        this.#watch(connection)
      },
      ending: (connection, raw) => {
        // A client that never reads the rest would keep its socket open forever.
        if (raw.writableLength > 0) this.#watch(connection)
      },
    }
  }

  /** Open answers, including those that have ended but are not yet read by the client. */
  get size(): number {
    return this.#connections.size
  }

  /** Sends the head at once. From here on the server's timeouts and Nagle's delay do not apply to the connection. */
  open(raw: ServerResponse, more: Record<string, string>): SseConnection {
    const connection = new Connection(this.#owner, raw)
    if (raw.destroyed || raw.closed) {
      connection.left()
      return connection
    }
    raw.socket?.setNoDelay(true)
    raw.socket?.setTimeout(0)
    raw.writeHead(200, { ...headers, ...more })
    raw.flushHeaders()
    raw.once('close', this.#closed)
    this.#connections.set(raw, connection)
    leaveToOwner(raw)
    this.#beats.add(connection, this.#beatTicks)
    return connection
  }

  /** Destroys every unfinished connection: a clean end would look like the end of the stream. */
  close(): void {
    this.#beats.close()
    for (const connection of [...this.#connections.values()]) if (!connection.isClosed) connection.destroy()
  }

  #beat(connection: Connection): number {
    const { raw } = connection
    if (raw === null || connection.isClosed) return 0
    const ticks = connection.wroteTick + this.#beatTicks - this.#beats.tick
    if (ticks > 0) return ticks
    // While bytes are waiting, a heartbeat adds nothing.
    if (!connection.isBetweenBlocks || raw.writableLength > 0) return 1
    connection.write(heartbeat)
    return this.#beatTicks
  }

  #watch(connection: Connection): void {
    if (this.#full.has(connection)) return
    this.#full.set(connection, new Stall(this.#now()))
    this.#looks ??= setInterval(() => void this.#look(), Math.max(1, this.#options.stallMs / stallLooks)).unref()
  }

  async #look(): Promise<void> {
    if (this.#full.size === 0) {
      clearInterval(this.#looks)
      this.#looks = undefined
      return
    }
    if (this.#isLooking) return
    this.#isLooking = true
    const bySocket = new Map<Socket, Stall>()
    const connections = new Map<Socket, Connection>()
    for (const [connection, stall] of this.#full) {
      const socket = connection.raw?.socket
      if (!socket) continue
      bySocket.set(socket, stall)
      connections.set(socket, connection)
    }
    for (const socket of await findStalled(bySocket, this.#options.stallMs, this.#now)) {
      const connection = connections.get(socket)
      // It may have drained or closed meanwhile.
      if (connection === undefined || this.#full.get(connection) !== bySocket.get(socket)) continue
      connection.wasStalled = true
      connection.destroy()
      this.#options.onStalled()
    }
    this.#isLooking = false
  }
}

interface ConnectionOwner {
  tick(): number
  filled(connection: Connection, raw: ServerResponse): void
  ending(connection: Connection, raw: ServerResponse): void
}

/**
 *   open ◄──drain──► full        either ──end()──► ending ──taken by the client──► closed
 *                                any ──client left, stalled, destroyed──► closed
 */
class Connection implements SseConnection {
  /** Null once closed, so that references to the connection do not keep the response in memory. */
  raw: ServerResponse | null
  wasStalled = false
  isBetweenBlocks = true
  wroteTick: number
  readonly #owner: ConnectionOwner
  #isEnding = false
  #full: { promise: Promise<Written>; resolve(written: Written): void } | null = null
  #listener: (() => void) | null = null

  constructor(owner: ConnectionOwner, raw: ServerResponse) {
    this.#owner = owner
    this.raw = raw
    this.wroteTick = owner.tick()
  }

  get isClosed(): boolean {
    return this.#isEnding || this.raw === null || this.raw.destroyed
  }

  write(text: string): Written | Promise<Written> {
    const { raw } = this
    if (raw === null || this.isClosed) return 'closed'
    this.wroteTick = this.#owner.tick()
    const length = text.length
    const isBlock = text.charCodeAt(length - 1) === newline && text.charCodeAt(length - 2) === newline
    this.isBetweenBlocks = isBlock || (this.isBetweenBlocks && text.charCodeAt(0) === colon)
    if (raw.write(text)) return 'open'
    if (this.#full === null) {
      let resolve: (written: Written) => void = () => undefined
      const promise = new Promise<Written>((settle) => {
        resolve = settle
      })
      this.#full = { promise, resolve }
      this.#owner.filled(this, raw)
    }
    return this.#full.promise
  }

  onClosed(listener: () => void): void {
    if (this.raw === null) {
      queueMicrotask(listener)
      return
    }
    const before = this.#listener
    this.#listener =
      before === null
        ? listener
        : () => {
            before()
            listener()
          }
  }

  end(): void {
    const { raw } = this
    if (raw === null || this.isClosed) return
    this.#isEnding = true
    raw.end()
    this.#owner.ending(this, raw)
  }

  destroy(): void {
    this.raw?.destroy()
  }

  drained(): void {
    this.#full?.resolve('open')
    this.#full = null
  }

  left(): void {
    this.raw = null
    this.#full?.resolve('closed')
    this.#full = null
    const listener = this.#listener
    this.#listener = null
    listener?.()
  }
}
