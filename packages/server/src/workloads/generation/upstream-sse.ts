/**
 * Parses server-sent events from bytes that are cut anywhere.
 *
 * Between two reads it keeps an unfinished line, the data lines of an unfinished event, and up to three bytes of an
 * unfinished character. The total is bounded.
 */
import { StringDecoder } from 'node:string_decoder'
import { malformed } from './upstream.js'

export interface SseEvent {
  /** '' if it has no name. */
  name: string
  data: string
}

/** Per line, and for the data lines of one event together. In characters, because kept text is decoded. */
const charactersMaxDefault = 1_048_576

const space = 0x20
const byteOrderMark = '\ufeff'

export class SseParser {
  readonly #decoder = new StringDecoder('utf8')
  readonly #charactersMax: number
  #isFirst = true
  /** The last character was a CR: a following LF belongs to it. */
  #afterCr = false
  #unfinished = ''
  #data: string | null = null
  #name = ''

  constructor(charactersMax = charactersMaxDefault) {
    this.#charactersMax = charactersMax
  }

  /** The events that these bytes complete. Throws `UpstreamFault` for a line or event over the limit. */
  push(bytes: Buffer): SseEvent[] {
    const events: SseEvent[] = []
    this.#take(this.#decoder.write(bytes), events)
    return events
  }

  /** The body is over. An event without its blank line counts: some servers omit the last one. */
  end(): SseEvent[] {
    const events: SseEvent[] = []
    this.#take(`${this.#decoder.end()}\n\n`, events)
    return events
  }

  #take(decoded: string, events: SseEvent[]): void {
    const text = this.#withPlainLineEnds(decoded)
    let from = 0
    // Searches only the new text: an unfinished line that grows byte by byte must not be scanned again each time.
    for (let to = text.indexOf('\n'); to !== -1; to = text.indexOf('\n', from)) {
      const line = text.slice(from, to)
      if (this.#unfinished === '') this.#line(line, events)
      else {
        const whole = this.#unfinished + line
        this.#unfinished = ''
        this.#line(whole, events)
      }
      from = to + 1
    }
    if (from < text.length) this.#unfinished += from === 0 ? text : text.slice(from)
    this.#bound(this.#unfinished.length)
  }

  #withPlainLineEnds(decoded: string): string {
    if (decoded === '') return decoded
    let text = decoded
    if (this.#isFirst) {
      this.#isFirst = false
      if (text.startsWith(byteOrderMark)) text = text.slice(1)
    }
    if (this.#afterCr && text.startsWith('\n')) text = text.slice(1)
    this.#afterCr = decoded.endsWith('\r')
    return text.includes('\r') ? text.replaceAll(/\r\n?/g, '\n') : text
  }

  #line(line: string, events: SseEvent[]): void {
    this.#bound(line.length)
    if (line === '') {
      if (this.#data !== null && this.#data !== '') events.push({ name: this.#name, data: this.#data })
      this.#data = null
      this.#name = ''
    } else if (line.startsWith('data:')) {
      const value = line.slice(line.charCodeAt(5) === space ? 6 : 5)
      this.#data = this.#data === null ? value : `${this.#data}\n${value}`
      this.#bound(this.#data.length)
    } else if (line.startsWith('event:')) this.#name = line.slice(6).trim()
    // Comments, `id:`, `retry:` and unknown fields are ignored.
  }

  #bound(characters: number): void {
    if (characters > this.#charactersMax) throw malformed('the upstream sent a line that is too long')
  }
}
