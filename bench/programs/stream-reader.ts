/**
 * One reader of a stream: hand-written HTTP/1.1 on a connection of its own. A general HTTP client costs more for each token than
 * the server under test.
 */
import { connect, type Socket } from 'node:net'
import { type StreamScript, scriptText, TokenScanner } from './stream-tokens.js'

/** Takes the framing of a chunked body off, wherever it is cut. */
export class ChunkedBody {
  #rest = ''
  #left = 0
  #isBehind = false
  isOver = false

  feed(came: string): string {
    const text = this.#rest === '' ? came : this.#rest + came
    let out = ''
    let at = 0
    while (!this.isOver) {
      if (this.#left > 0) {
        const part = text.slice(at, at + this.#left)
        out = out === '' ? part : out + part
        at += part.length
        this.#left -= part.length
        if (this.#left > 0) break
        this.#isBehind = true
      }
      if (this.#isBehind) {
        if (text.length - at < 2) break
        at += 2
        this.#isBehind = false
      }
      const lineEnd = text.indexOf('\r\n', at)
      if (lineEnd === -1) break
      this.#left = Number.parseInt(text.slice(at, lineEnd), 16)
      at = lineEnd + 2
      this.isOver = this.#left === 0
    }
    this.#rest = text.slice(at)
    return out
  }
}

export interface ReadRequest {
  readonly host: string
  readonly port: number
  readonly method?: 'GET' | 'POST'
  readonly path: string
  readonly headers?: Readonly<Record<string, string>>
  readonly body?: string
}

export interface ReaderEvents {
  /** The first byte of the answer. */
  onHead?(status: number, head: string): void
  onToken?(number: number, sentMs: number): void
  /** What the body brings, without its framing. */
  onText?(text: string): void
  /** Once: at the end of the answer, or when the connection broke. */
  onClosed?(isWhole: boolean): void
}

function requestText({ host, port, method = 'POST', path, headers = {}, body = '' }: ReadRequest): string {
  const lines = Object.entries({
    host: `${host}:${port}`,
    accept: 'text/event-stream',
    ...(method === 'POST' && { 'content-type': 'application/json', 'content-length': String(Buffer.byteLength(body)) }),
    ...headers,
  }).map(([name, value]) => `${name}: ${value}\r\n`)
  return `${method} ${path} HTTP/1.1\r\n${lines.join('')}\r\n${body}`
}

export class StreamReader {
  readonly #events: ReaderEvents
  readonly #socket: Socket
  readonly #body = new ChunkedBody()
  readonly #scanner: TokenScanner | null
  #head: string | null = ''
  #isClosed = false

  constructor(request: ReadRequest, events: ReaderEvents) {
    this.#events = events
    const { onToken } = events
    this.#scanner = onToken === undefined ? null : new TokenScanner(onToken)
    this.#socket = connect({ host: request.host, port: request.port, noDelay: true })
    this.#socket.write(requestText(request))
    this.#socket.setEncoding('latin1')
    this.#socket.on('data', (text: string) => this.#came(text))
    // `close` follows, and reports the failure.
    this.#socket.on('error', () => undefined)
    this.#socket.on('close', () => this.#closed())
  }

  close(): void {
    this.#isClosed = true
    this.#socket.destroy()
  }

  #came(text: string): void {
    let body = text
    if (this.#head !== null) {
      this.#head += text
      const end = this.#head.indexOf('\r\n\r\n')
      if (end === -1) return
      const head = this.#head.slice(0, end)
      body = this.#head.slice(end + 4)
      this.#head = null
      this.#events.onHead?.(Number(head.slice(9, 12)), head)
      // No stream but a refusal, whose words are of no interest.
      if (!/\r\ntransfer-encoding: chunked/i.test(head)) {
        this.#closed()
        this.#socket.destroy()
        return
      }
    }
    const plain = this.#body.feed(body)
    if (plain !== '') {
      this.#scanner?.feed(plain)
      this.#events.onText?.(plain)
    }
    if (this.#body.isOver) {
      this.#closed()
      this.#socket.destroy()
    }
  }

  #closed(): void {
    if (this.#isClosed) return
    this.#isClosed = true
    this.#events.onClosed?.(this.#body.isOver)
  }
}

export interface StreamSite {
  readonly origin: string
  /** Of the requests that begin a stream. */
  readonly path: string
}

/** A request that begins a stream. */
export function streamRequest(to: StreamSite, script: StreamScript, user: string): ReadRequest {
  const { hostname: host, port } = new URL(to.origin)
  const said = scriptText(script)
  const body =
    to.path === '/api/v1/stream'
      ? { query: said, model: 'bench' }
      : { model: 'bench', stream: true, messages: [{ role: 'user', content: said }] }
  return { host, port: Number(port), path: to.path, headers: { 'x-user-id': user }, body: JSON.stringify(body) }
}
