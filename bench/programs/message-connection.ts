/**
 * A consumer's or producer's connection: hand-written HTTP/1.1, one request at a time. A general HTTP client costs as much
 * as the server under test. Unlike overload-connection.ts it is awaited, and knows answers without a body.
 */
import { connect, type Socket } from 'node:net'

export interface Answer {
  readonly status: number
  readonly body: string
}

interface Asked {
  resolve(answer: Answer): void
  reject(fault: Error): void
}

/** All sockets read into the same memory: each reading is looked at before the next can happen. */
const readBuffer = Buffer.allocUnsafeSlow(256 * 1_024)
const contentLengthPattern = /\r\ncontent-length: *(\d+)/i
const noContent = 204

export class MessageConnection {
  readonly #host: string
  readonly #socket: Socket
  #asked: Asked | null = null
  #text = ''
  #left = false
  #open = true

  private constructor(host: string, socket: Socket) {
    this.#host = host
    this.#socket = socket
  }

  static async open(origin: string): Promise<MessageConnection> {
    const { hostname, port, host } = new URL(origin)
    let read = (_: string): void => undefined
    const socket = connect({
      host: hostname,
      port: Number(port),
      noDelay: true,
      onread: {
        buffer: readBuffer,
        callback: (bytes) => {
          read(readBuffer.toString('latin1', 0, bytes))
          return true
        },
      },
    })
    const own = new MessageConnection(host, socket)
    read = (chunk) => own.#read(chunk)
    await new Promise<void>((resolve, reject) => {
      socket.once('connect', resolve).once('error', reject)
    })
    // `close` follows, and reports the error.
    socket.on('error', () => undefined)
    socket.on('close', () => own.#lost())
    return own
  }

  static openAll(origin: string, count: number): Promise<MessageConnection[]> {
    return Promise.all(Array.from({ length: count }, () => MessageConnection.open(origin)))
  }

  get isOpen(): boolean {
    return this.#open
  }

  get(path: string): Promise<Answer> {
    return this.#ask(`GET ${path} HTTP/1.1\r\nhost: ${this.#host}\r\n\r\n`)
  }

  /** `body`: JSON, nothing but ASCII. */
  post(path: string, body: string): Promise<Answer> {
    const head = `POST ${path} HTTP/1.1\r\nhost: ${this.#host}\r\ncontent-type: application/json\r\n`
    return this.#ask(`${head}content-length: ${body.length}\r\n\r\n${body}`)
  }

  leave(): void {
    this.#left = true
    this.#socket.destroy()
  }

  #ask(request: string): Promise<Answer> {
    if (!this.#open) return Promise.reject(new Error(`the connection to ${this.#host} is closed`))
    return new Promise((resolve, reject) => {
      this.#asked = { resolve, reject }
      this.#socket.write(request, 'latin1')
    })
  }

  #lost(): void {
    this.#open = false
    if (this.#left) return
    this.#asked?.reject(new Error(`${this.#host} closed a connection that waited for an answer`))
    this.#asked = null
  }

  #read(chunk: string): void {
    const text = this.#text === '' ? chunk : this.#text + chunk
    this.#text = text
    const headEnd = text.indexOf('\r\n\r\n')
    if (headEnd < 0) return
    const status = Number(text.slice(9, 12))
    const length = contentLengthPattern.exec(text)?.[1]
    if (length === undefined && status !== noContent) {
      return void this.#socket.destroy(new Error('an answer without Content-Length'))
    }
    const end = headEnd + 4 + Number(length ?? 0)
    if (text.length < end) return
    const asked = this.#asked
    this.#asked = null
    this.#text = ''
    asked?.resolve({ status, body: text.slice(headEnd + 4, end) })
  }
}
