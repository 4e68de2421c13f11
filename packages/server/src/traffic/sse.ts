import type { ServerResponse } from 'node:http'
import { DueRing, type Periodic, periodic } from 'spillway/workload'
import { StallWatch } from './stall.js'
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
  readonly #connections = new Set<SseConnection>()
  readonly #beats: DueRing<SseConnection>
  readonly #beatTicks: number
  /** Connections with bytes waiting. */
  readonly #full: StallWatch<SseConnection>
  #looks: Periodic | null = null

  constructor({ heartbeatMs, stallMs, onStalled }: SseHubOptions) {
    this.#beats = new DueRing({
      tickMs: Math.max(1, heartbeatMs / 16),
      longestMs: heartbeatMs,
      look: (connection) => this.#beat(connection),
    })
    this.#beatTicks = this.#beats.ticksOf(heartbeatMs)
    this.#full = new StallWatch({
      stallMs,
      socketOf: ({ raw }) => raw?.socket,
      onStalled: (connection) => {
        connection.wasStalled = true
        connection.raw?.destroy()
        onStalled()
      },
    })
  }

  /** Open answers, including those that have ended but are not yet read by the client. */
  get size(): number {
    return this.#connections.size
  }

  get tick(): number {
    return this.#beats.tick
  }

  /** Sends the head at once. From here on the server's timeouts and Nagle's delay do not apply to the connection. */
  open(raw: ServerResponse, more: Record<string, string>): SseConnection {
    const connection = new SseConnection(this, raw)
    if (raw.destroyed || raw.closed) {
      connection.left()
      return connection
    }
    raw.socket?.setNoDelay(true)
    raw.socket?.setTimeout(0)
    raw.writeHead(200, { ...headers, ...more })
    raw.flushHeaders()
    raw.once('close', () => {
      this.#connections.delete(connection)
      this.#full.delete(connection)
      connection.left()
    })
    this.#connections.add(connection)
    leaveToOwner(raw)
    this.#beats.add(connection, this.#beatTicks)
    return connection
  }

  /** Destroys every unfinished connection: a clean end would look like the end of the stream. */
  close(): void {
    this.#beats.close()
    for (const connection of this.#connections) if (!connection.isClosed) connection.raw?.destroy()
  }

  /** Bytes wait for its client. */
  filled(connection: SseConnection): void {
    this.#full.add(connection)
    this.#looks ??= periodic(this.#full.everyMs, () => this.#look())
  }

  drained(connection: SseConnection): void {
    this.#full.delete(connection)
  }

  #look(): void | Promise<void> {
    if (this.#full.size > 0) return this.#full.look()
    void this.#looks?.stop()
    this.#looks = null
  }

  #beat(connection: SseConnection): number {
    const { raw } = connection
    if (raw === null || connection.isClosed) return 0
    const ticks = connection.wroteTick + this.#beatTicks - this.#beats.tick
    if (ticks > 0) return ticks
    // While bytes are waiting, a heartbeat adds nothing.
    if (!connection.isBetweenBlocks || raw.writableLength > 0) return 1
    connection.write(heartbeat)
    return this.#beatTicks
  }
}

/**
 *   open ◄──drain──► full        either ──end()──► ending ──taken by the client──► closed
 *                                any ──client left, stalled, destroyed──► closed
 */
export class SseConnection {
  /** Null once closed, so that references to the connection do not keep the response in memory. */
  raw: ServerResponse | null
  wasStalled = false
  isBetweenBlocks = true
  wroteTick: number
  readonly #hub: SseHub
  #isEnding = false
  #full: { promise: Promise<Written>; resolve(written: Written): void } | null = null
  #listeners: (() => void)[] = []

  constructor(hub: SseHub, raw: ServerResponse) {
    this.#hub = hub
    this.raw = raw
    this.wroteTick = hub.tick
  }

  get isClosed(): boolean {
    return this.#isEnding || this.raw === null || this.raw.destroyed
  }

  /**
   * `text` is whole blocks, or a comment line. 'closed': the stream was ended, the client left, or it read nothing for
   * stallMs. A promise while the socket is full: await it before the next write.
   */
  write(text: string): Written | Promise<Written> {
    const { raw } = this
    if (raw === null || this.isClosed) return 'closed'
    this.wroteTick = this.#hub.tick
    const length = text.length
    const isBlock = text.charCodeAt(length - 1) === newline && text.charCodeAt(length - 2) === newline
    this.isBetweenBlocks = isBlock || (this.isBetweenBlocks && text.charCodeAt(0) === colon)
    if (raw.write(text)) return 'open'
    if (this.#full !== null) return this.#full.promise
    let resolve: (written: Written) => void = () => undefined
    const promise = new Promise<Written>((settle) => {
      resolve = settle
    })
    this.#full = { promise, resolve }
    raw.once('drain', () => {
      this.#hub.drained(this)
      this.#settle('open')
    })
    this.#hub.filled(this)
    return promise
  }

  /** Called once; soon, if the connection is already closed. */
  onClosed(listener: () => void): void {
    if (this.raw === null) queueMicrotask(listener)
    else this.#listeners.push(listener)
  }

  end(): void {
    const { raw } = this
    if (raw === null || this.isClosed) return
    this.#isEnding = true
    raw.end()
    // A client that never reads the rest would keep its socket open forever.
    if (raw.writableLength > 0) this.#hub.filled(this)
  }

  left(): void {
    this.raw = null
    this.#settle('closed')
    for (const listener of this.#listeners.splice(0)) listener()
  }

  #settle(written: Written): void {
    this.#full?.resolve(written)
    this.#full = null
  }
}
