import { SpillwayError } from '../error.js'

export interface SseEvent {
  /** Of this event, or of the last one that had an id. */
  id: string | null
  /** `message` by default. */
  event: string
  data: string
}

const eventCharactersMax = 4_194_304

/** Parses server-sent events from text in pieces of any size. Memory is bounded: a larger event is an error. */
export class SseParser {
  #rest = ''
  #isAfterCr = false
  #isFirst = true
  #id: string | null = null
  #event = ''
  #data: string[] = []
  #size = 0

  push(text: string): SseEvent[] {
    const events: SseEvent[] = []
    let from = 0
    if (this.#isFirst && text !== '') {
      this.#isFirst = false
      if (text.startsWith('\uFEFF')) from = 1
    }
    // CR LF may be split between two pieces.
    if (this.#isAfterCr && text.startsWith('\n', from)) from++
    if (text !== '') this.#isAfterCr = false
    const ends = /\r\n?|\n/g
    ends.lastIndex = from
    for (let end = ends.exec(text); end !== null; end = ends.exec(text)) {
      const line = this.#rest + text.slice(from, end.index)
      this.#rest = ''
      from = ends.lastIndex
      if (end[0] === '\r' && from === text.length) this.#isAfterCr = true
      const event = this.#line(line)
      if (event !== null) events.push(event)
    }
    this.#rest += text.slice(from)
    this.#bound(this.#rest.length)
    return events
  }

  #line(line: string): SseEvent | null {
    if (line === '') return this.#dispatch()
    const colon = line.indexOf(':')
    const name = colon === -1 ? line : line.slice(0, colon)
    const value = colon === -1 ? '' : line.slice(colon + 1).replace(/^ /, '')
    if (name === 'data') {
      this.#size += value.length + 1
      this.#bound(this.#size)
      this.#data.push(value)
    } else if (name === 'event') this.#event = value
    else if (name === 'id' && !value.includes('\0')) this.#id = value
    return null
  }

  #dispatch(): SseEvent | null {
    const event = { id: this.#id, event: this.#event === '' ? 'message' : this.#event, data: this.#data.join('\n') }
    const isEvent = this.#data.length > 0
    this.#event = ''
    this.#data = []
    this.#size = 0
    return isEvent ? event : null
  }

  #bound(size: number): void {
    if (size <= eventCharactersMax) return
    throw new SpillwayError('unexpected', `An event has more than ${eventCharactersMax} characters`, { status: 200 })
  }
}

/** Parses the data of an event as JSON. */
export function jsonOf<T>(data: string): T {
  try {
    return JSON.parse(data) as T
  } catch (cause) {
    throw new SpillwayError('unexpected', 'An event has something else than JSON', { status: 200, cause })
  }
}
