/**
 * One client's connection: hand-written HTTP/1.1 over a socket, one request at a time. A general HTTP client costs as
 * much per request as the server under test, and the generator shares the machine with it.
 */
import { connect, type Socket } from 'node:net'

export interface Answer {
  readonly status: number
  readonly head: string
  readonly body: string
}

export interface ConnectionEvents {
  answered(connection: Connection, index: number, answer: Answer): void
  /** Closed by the other side; `index` is what was under way, or −1. */
  closed(connection: Connection, index: number): void
}

/** All sockets read into the same memory: each reading is looked at before the next can happen. */
const readBuffer = Buffer.allocUnsafeSlow(64 * 1_024)
const contentLengthPattern = /\r\ncontent-length: *(\d+)/i
const answerBytesMax = 1_048_576

export class Connection {
  readonly #socket: Socket
  readonly #events: ConnectionEvents
  /** Resolves when it is connected, or will not be. */
  readonly settled: Promise<void>
  #index = -1
  #text = ''
  #open = true

  constructor(address: { host: string; port: number }, events: ConnectionEvents) {
    this.#events = events
    this.#socket = connect({
      ...address,
      noDelay: true,
      onread: {
        buffer: readBuffer,
        callback: (bytes) => {
          this.#read(readBuffer.toString('latin1', 0, bytes))
          return true
        },
      },
    })
    // `close` follows, and reports a refused or reset connection.
    this.#socket.on('error', () => undefined)
    this.#socket.on('close', () => {
      if (!this.#open) return
      this.#open = false
      events.closed(this, this.#index)
    })
    this.settled = new Promise((resolve) => {
      this.#socket.once('connect', resolve).once('close', resolve)
    })
  }

  get isOpen(): boolean {
    return this.#open
  }

  send(index: number, request: string): void {
    this.#index = index
    this.#socket.write(request, 'latin1')
  }

  /** The client leaves. */
  leave(): void {
    this.#open = false
    this.#socket.destroy()
  }

  #read(chunk: string): void {
    // Something nobody asked for, e.g. 408 to a connection that was idle for too long: it is of no more use.
    if (this.#index < 0) return void this.#socket.destroy()
    const text = this.#text === '' ? chunk : this.#text + chunk
    const headEnd = text.indexOf('\r\n\r\n')
    const length = headEnd < 0 ? undefined : contentLengthPattern.exec(text)?.[1]
    if (headEnd >= 0 && length === undefined) throw new Error(`an answer without Content-Length: ${text}`)
    const total = headEnd + 4 + Number(length)
    if (headEnd < 0 || text.length < total) {
      if (text.length > answerBytesMax) throw new Error(`an answer of more than ${answerBytesMax} bytes`)
      this.#text = text
      return
    }
    if (text.length > total) throw new Error(`more than was asked for: ${text}`)
    const index = this.#index
    this.#text = ''
    this.#index = -1
    this.#events.answered(this, index, {
      status: Number(text.slice(9, 12)),
      head: text.slice(0, headEnd),
      body: text.slice(headEnd + 4),
    })
  }
}
