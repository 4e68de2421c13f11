/**
 * A client that does not give up: it asks, reads, and when its connection breaks it goes on after the last event that it
 * has, at any instance that answers. It records everything that it received.
 *
 *   asking ──200──► reading ──end──► over
 *     │ ▲ 503, no connection     │ broken, or asked to resume ──► resuming ──200──► reading
 *     └─┘                        │                                   └──204──► over
 *     └──refused──► over         └ an end that is not in the log, and it does not resume ──► over
 */
import { type ClientRequest, type IncomingMessage, request } from 'node:http'
import { setTimeout as delay } from 'node:timers/promises'
import { monotonicMs } from '../../spillway/test/setup/scripted-upstream.js'

export type Format = 'openai' | 'native'

export interface Ask {
  format: Format
  /** Names the tokens of this stream; nobody else's. */
  marker: string
  user: string
  tokens: number
  everyMs: number
  /** More of the script's words. */
  script?: string
  headers?: Readonly<Record<string, string>>
}

/** An end event. One from the log has a number; one that was sent on this connection only has none. */
export interface StreamEnd {
  kind: 'done' | 'error'
  code: string | null
  number: number | null
  atMs: number
}

export interface Transcript {
  ask: Ask
  /** The numbers of the events, in the order in which they came, over all connections. */
  numbers: number[]
  text: string
  ends: StreamEnd[]
  /** Connections that closed before an end event. */
  cuts: number
  resumes: number
  layer: string | null
  streamId: string | null
  /** A status other than 200 that was not to be tried again; or that there is nothing (left) to resume. */
  refused: number | null
  askedMs: number
  firstTokenMs: number | null
  overMs: number
}

/** The process that has the connection ends it with these codes. The stream goes on, or ends, elsewhere. */
const resumable = new Set(['draining', 'stream_log_unavailable'])
const pauseMs = 50

export class Reader {
  readonly transcript: Transcript
  readonly over: Promise<Transcript>
  readonly #origins: () => readonly string[]
  readonly #goesOn: boolean
  readonly #deadline: number
  /** It has the head of its answer, or will not get one. */
  readonly promised: Promise<void>
  /** The first of its content came, or it is over without any. */
  readonly begun: Promise<void>
  #setPromised: () => void = () => undefined
  #setBegun: () => void = () => undefined
  #turn: number
  #request: ClientRequest | null = null
  #hasLeft = false

  constructor(
    origins: () => readonly string[],
    ask: Ask,
    options: { goesOn?: boolean; turn?: number; patienceMs?: number } = {},
  ) {
    this.#origins = origins
    this.#goesOn = options.goesOn ?? true
    this.#turn = options.turn ?? 0
    this.#deadline = monotonicMs() + (options.patienceMs ?? 60_000)
    this.transcript = {
      ...{ ask, numbers: [], text: '', ends: [], cuts: 0, resumes: 0, layer: null, streamId: null, refused: null },
      ...{ askedMs: monotonicMs(), firstTokenMs: null, overMs: 0 },
    }
    this.promised = new Promise((resolve) => {
      this.#setPromised = resolve
    })
    this.begun = new Promise((resolve) => {
      this.#setBegun = resolve
    })
    this.over = this.#run()
  }

  /** Breaks the connection for good; when that was. */
  leave(): number {
    this.#hasLeft = true
    this.#request?.destroy()
    return monotonicMs()
  }

  async #run(): Promise<Transcript> {
    const { transcript } = this
    for (;;) {
      const status = await this.#connect()
      if (this.#hasLeft || this.#isOver(status)) break
      if (monotonicMs() > this.#deadline) break
      this.#turn++
      await delay(pauseMs)
    }
    transcript.overMs = monotonicMs()
    this.#setPromised()
    this.#setBegun()
    return transcript
  }

  #isOver(status: number | null): boolean {
    const { transcript } = this
    const last = transcript.ends.at(-1)
    if (last !== undefined && (last.number !== null || !resumable.has(last.code ?? '') || !this.#goesOn)) return true
    if (status === null || status === 200 || status === 503 || status === 409) return false
    transcript.refused = status
    return true
  }

  /** Its status once the answer is over; null when there was none. */
  #connect(): Promise<number | null> {
    const { transcript } = this
    const { ask, streamId } = transcript
    const origins = this.#origins()
    const origin = origins[this.#turn % origins.length] ?? ''
    const path = streamId === null ? paths[ask.format] : `/api/v1/streams/${streamId}`
    return new Promise((resolve) => {
      const sent = request(`${origin}${path}`, {
        agent: false,
        method: streamId === null ? 'POST' : 'GET',
        headers: {
          'x-user-id': ask.user,
          ...(streamId === null
            ? { 'content-type': 'application/json', 'idempotency-key': ask.marker }
            : { 'last-event-id': String(transcript.numbers.at(-1) ?? 0) }),
          ...ask.headers,
        },
      })
      this.#request = sent
      // Nobody there, or gone before the answer: `close` follows.
      sent.on('error', () => undefined)
      let status: number | null = null
      sent.on('response', (answer) => {
        status = answer.statusCode ?? 0
        if (status !== 200) return void answer.on('error', () => undefined).resume()
        if (streamId === null) {
          transcript.streamId = answer.headers['x-stream-id']?.toString() ?? null
          transcript.layer = answer.headers['x-resilience-layer']?.toString() ?? null
          this.#setPromised()
        } else {
          transcript.resumes++
        }
        this.#read(answer)
      })
      sent.on('close', () => resolve(status))
      sent.end(streamId === null ? JSON.stringify(bodyOf(ask)) : undefined)
    })
  }

  #read(answer: IncomingMessage): void {
    const { transcript } = this
    const before = transcript.ends.length
    const parser = new EventParser((event) => this.#take(event))
    answer.setEncoding('utf8')
    answer.on('data', (text: string) => parser.push(text))
    answer.on('error', () => undefined)
    answer.on('close', () => {
      if (transcript.ends.length === before && !this.#hasLeft) transcript.cuts++
    })
  }

  #take({ id, event, data }: SseEvent): void {
    const { transcript } = this
    const number = id === null ? null : Number(id)
    if (number !== null) transcript.numbers.push(number)
    const atMs = monotonicMs()
    const end = endOf(transcript.ask.format, event, data)
    if (end !== null) {
      transcript.ends.push({ ...end, number, atMs })
      return
    }
    const content = number === null ? '' : contentOf(transcript.ask.format, data)
    if (content === '') return
    transcript.firstTokenMs ??= atMs
    transcript.text += content
    this.#setBegun()
  }
}

const paths: Readonly<Record<Format, string>> = { openai: '/v1/chat/completions', native: '/api/v1/stream' }

function bodyOf({ format, marker, tokens, everyMs, script = '' }: Ask): object {
  const text = `script: marker=${marker} tokens=${tokens} every=${everyMs} stamp=1 ${script}`
  if (format === 'native') return { query: text, model: 'scripted' }
  return { model: 'scripted', stream: true, messages: [{ role: 'user', content: text }] }
}

export interface SseEvent {
  id: string | null
  event: string | null
  data: string
}

/** By the rules of WHATWG's event streams, as far as we use them. */
export class EventParser {
  readonly #take: (event: SseEvent) => void
  #rest = ''
  #id: string | null = null
  #event: string | null = null
  #data: string[] = []

  constructor(take: (event: SseEvent) => void) {
    this.#take = take
  }

  push(text: string): void {
    const lines = (this.#rest + text).split('\n')
    this.#rest = lines.pop() ?? ''
    for (const line of lines) this.#line(line)
  }

  #line(line: string): void {
    if (line === '') {
      if (this.#data.length > 0) this.#take({ id: this.#id, event: this.#event, data: this.#data.join('\n') })
      this.#id = null
      this.#event = null
      this.#data = []
      return
    }
    const [name = '', value = ''] = line.split(/: ?(.*)/s)
    if (name === 'id') this.#id = value
    if (name === 'event') this.#event = value
    if (name === 'data') this.#data.push(value)
  }
}

function endOf(format: Format, event: string | null, data: string): Pick<StreamEnd, 'kind' | 'code'> | null {
  if (format === 'openai') {
    if (data === '[DONE]') return { kind: 'done', code: null }
    const error = errorOf(data)
    return error === null ? null : { kind: 'error', code: error }
  }
  if (event === 'complete') return { kind: 'done', code: null }
  return event === 'error' ? { kind: 'error', code: String(Object(JSON.parse(data)).code) } : null
}

function errorOf(data: string): string | null {
  const { error } = Object(JSON.parse(data))
  return error === undefined ? null : String(Object(error).code)
}

function contentOf(format: Format, data: string): string {
  const parsed = Object(JSON.parse(data))
  const content: unknown = format === 'native' ? parsed.content : parsed.choices?.[0]?.delta?.content
  return typeof content === 'string' ? content : ''
}
