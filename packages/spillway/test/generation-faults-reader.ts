/**
 * A client that does not give up: it asks, reads, and when its connection breaks it goes on behind the last event that it
 * has, wherever somebody answers. It notes everything that it was told.
 *
 *   asking ──200──► reading ──end told──► over
 *     │ ▲ 503, nobody there      │ broken, or told to resume ──► resuming ──200──► reading
 *     └─┘                        │                                  └──204──► over
 *     └──refused──► over         └ told an end that is none of the log's, and it does not resume ──► over
 */
import { type ClientRequest, type IncomingMessage, request } from 'node:http'
import { setTimeout as delay } from 'node:timers/promises'
import { monotonicMs } from './setup/scripted-upstream.js'

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

/** An end in words: the log's own has a number, one that only this connection was told has none. */
export interface ToldEnd {
  kind: 'done' | 'error'
  code: string | null
  number: number | null
  atMs: number
}

export interface Told {
  ask: Ask
  /** The numbers of the events, in the order in which they came, over all connections. */
  numbers: number[]
  text: string
  ends: ToldEnd[]
  /** Connections that ended before an end was told. */
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

/** Told by the process that has the connection, of itself: the stream goes on, or ends, elsewhere. */
const resumable = new Set(['draining', 'stream_log_unavailable'])
const pauseMs = 50

export class Reader {
  readonly told: Told
  readonly over: Promise<Told>
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
    this.told = {
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

  async #run(): Promise<Told> {
    const { told } = this
    for (;;) {
      const status = await this.#connect()
      if (this.#hasLeft || this.#isOver(status)) break
      if (monotonicMs() > this.#deadline) break
      this.#turn++
      await delay(pauseMs)
    }
    told.overMs = monotonicMs()
    this.#setPromised()
    this.#setBegun()
    return told
  }

  #isOver(status: number | null): boolean {
    const { told } = this
    const last = told.ends.at(-1)
    if (last !== undefined && (last.number !== null || !resumable.has(last.code ?? '') || !this.#goesOn)) return true
    if (status === null || status === 200 || status === 503 || status === 409) return false
    told.refused = status
    return true
  }

  /** Its status once the answer is over; null when there was none. */
  #connect(): Promise<number | null> {
    const { told } = this
    const { ask, streamId } = told
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
            : { 'last-event-id': String(told.numbers.at(-1) ?? 0) }),
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
          told.streamId = answer.headers['x-stream-id']?.toString() ?? null
          told.layer = answer.headers['x-resilience-layer']?.toString() ?? null
          this.#setPromised()
        } else {
          told.resumes++
        }
        this.#read(answer)
      })
      sent.on('close', () => resolve(status))
      sent.end(streamId === null ? JSON.stringify(bodyOf(ask)) : undefined)
    })
  }

  #read(answer: IncomingMessage): void {
    const { told } = this
    const before = told.ends.length
    const parser = new EventParser((event) => this.#take(event))
    answer.setEncoding('utf8')
    answer.on('data', (text: string) => parser.push(text))
    answer.on('error', () => undefined)
    answer.on('close', () => {
      if (told.ends.length === before && !this.#hasLeft) told.cuts++
    })
  }

  #take({ id, event, data }: SseEvent): void {
    const { told } = this
    const number = id === null ? null : Number(id)
    if (number !== null) told.numbers.push(number)
    const atMs = monotonicMs()
    const end = endOf(told.ask.format, event, data)
    if (end !== null) {
      told.ends.push({ ...end, number, atMs })
      return
    }
    const content = number === null ? '' : contentOf(told.ask.format, data)
    if (content === '') return
    told.firstTokenMs ??= atMs
    told.text += content
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

function endOf(format: Format, event: string | null, data: string): Pick<ToldEnd, 'kind' | 'code'> | null {
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
