/**
 * Generation as a stranger sees it: real servers over a scripted upstream, and a reader that keeps every byte of a stream
 * with the time of its arrival.
 */

import { freshDatabase, type TestDatabase } from '../../spillway/test/setup/database.js'
import {
  monotonicMs,
  type ScriptedUpstream,
  type SeenRequest,
  startScriptedUpstream,
} from '../../spillway/test/setup/scripted-upstream.js'
import { type Env, endAll, type ServerProcess, startServer, until } from './server-process.js'

const waitMs = 15_000
/** Neither refused nor queued because the machine is busy with other tests. */
const calm: Env = {
  SPILLWAY_ACCEPT_WAIT_BUDGET_MS: '60000',
  SPILLWAY_BUSY_QUEUE_ABOVE: '1',
  SPILLWAY_STORE_TIMEOUT_MS: '20000',
}

export interface SseEvent {
  id: string | null
  event: string | null
  data: string
  /** By `monotonicMs`. */
  atMs: number
}

export interface OpenOptions {
  method?: 'GET' | 'POST'
  headers?: Record<string, string>
  body?: unknown
}

/** One answer that streams. */
export class SseStream {
  readonly status: number
  readonly headers: Headers
  /** From the request to the head of its answer. */
  readonly headMs: number
  readonly events: SseEvent[] = []
  /** All that came, byte for byte. */
  raw = ''
  /** The body is over: it came to its end, was broken off, or was left. */
  isOver = false
  readonly #leaving: AbortController
  readonly #over: Promise<void>
  readonly #looks = new Set<() => void>()
  #fields: { id: string | null; event: string | null; data: string[] } = { id: null, event: null, data: [] }
  #parsed = 0

  constructor(answer: Response, headMs: number, leaving: AbortController) {
    this.status = answer.status
    this.headers = answer.headers
    this.headMs = headMs
    this.#leaving = leaving
    this.#over = this.#read(answer)
  }

  get id(): string {
    return this.headers.get('x-stream-id') ?? ''
  }

  get layer(): string | null {
    return this.headers.get('x-resilience-layer')
  }

  /** The events of one name; those without a name by null. */
  named(event: string | null): SseEvent[] {
    return this.events.filter((each) => each.event === event)
  }

  /** The parsed data of the events of one name. */
  dataOf(event: string | null): Record<string, unknown>[] {
    return this.named(event).map(({ data }) => JSON.parse(data))
  }

  get content(): string {
    return this.events.map(contentOf).join('')
  }

  /** What its end said, where that was no proper one. */
  get error(): Record<string, unknown> | undefined {
    const native = this.dataOf('error')[0]
    if (native !== undefined) return native
    const last = this.named(null).at(-1)?.data ?? ''
    return last.startsWith('{"error"') ? JSON.parse(last).error : undefined
  }

  /** The rest of the body. */
  async whole(): Promise<this> {
    await withinTime('the end of a stream', this.#over)
    return this
  }

  /** Until something is seen of it, looked for at each arrival. */
  seen<T>(what: string, look: (stream: this) => T | undefined | false): Promise<T> {
    const found = new Promise<T>((resolve, reject) => {
      const again = (): void => {
        const value = look(this)
        if (value !== undefined && value !== false) resolve(value)
        else if (this.isOver) reject(new Error(`The stream ended without ${what}: ${this.raw}`))
        else return
        this.#looks.delete(again)
      }
      this.#looks.add(again)
      again()
    })
    return withinTime(what, found)
  }

  /** Hangs up. Returns when that was. */
  leave(): number {
    const leftMs = monotonicMs()
    this.#leaving.abort()
    return leftMs
  }

  async #read(answer: Response): Promise<void> {
    const decoder = new TextDecoder()
    try {
      for await (const bytes of answer.body ?? []) {
        this.raw += decoder.decode(bytes, { stream: true })
        this.#parse()
        for (const look of this.#looks) look()
      }
    } catch {
      // Left by us, or broken off: what came so far says enough.
    }
    this.isOver = true
    for (const look of this.#looks) look()
  }

  #parse(): void {
    for (let end = this.raw.indexOf('\n', this.#parsed); end !== -1; end = this.raw.indexOf('\n', this.#parsed)) {
      const line = this.raw.slice(this.#parsed, end)
      this.#parsed = end + 1
      if (line === '') this.#dispatch()
      else this.#field(line)
    }
  }

  #field(line: string): void {
    const value = line.slice(line.indexOf(':') + 1).replace(/^ /, '')
    if (line.startsWith('id:')) this.#fields.id = value
    else if (line.startsWith('event:')) this.#fields.event = value
    else if (line.startsWith('data:')) this.#fields.data.push(value)
  }

  #dispatch(): void {
    const { data, ...fields } = this.#fields
    this.#fields = { id: null, event: null, data: [] }
    if (data.length > 0) this.events.push({ ...fields, data: data.join('\n'), atMs: monotonicMs() })
  }
}

function contentOf({ event, data }: SseEvent): string {
  if (data === '[DONE]' || (event !== null && event !== 'chunk')) return ''
  const parsed = JSON.parse(data)
  return event === 'chunk' ? parsed.content : (parsed.choices?.[0]?.delta?.content ?? '')
}

async function withinTime<T>(what: string, wanted: Promise<T>): Promise<T> {
  let timer: NodeJS.Timeout | undefined
  const late = new Promise<never>((_, reject) => {
    timer = setTimeout(() => reject(new Error(`Timed out after ${waitMs} ms: ${what}`)), waitMs)
  })
  try {
    return await Promise.race([wanted, late])
  } finally {
    clearTimeout(timer)
  }
}

/** Resolves with the head of the answer. */
export async function open(server: { origin: string }, path: string, options: OpenOptions = {}): Promise<SseStream> {
  const { method = options.body === undefined ? 'GET' : 'POST', headers = {}, body } = options
  const leaving = new AbortController()
  const began = performance.now()
  const answer = await withinTime(
    `the head of ${path}`,
    fetch(`${server.origin}${path}`, {
      method,
      headers: { ...(body !== undefined && { 'content-type': 'application/json' }), ...headers },
      ...(body !== undefined && { body: JSON.stringify(body) }),
      signal: leaving.signal,
    }),
  )
  return new SseStream(answer, performance.now() - began, leaving)
}

export const as = (user: string): Record<string, string> => ({ 'x-user-id': user })

export const chatBody = (script: string, members: object = {}) => ({
  model: 'demo',
  messages: [{ role: 'user', content: `script: ${script}` }],
  stream: true,
  ...members,
})

/** `POST /v1/chat/completions`, streamed. */
export const chat = (
  server: { origin: string },
  user: string,
  script: string,
  { members = {}, headers = {} }: { members?: object; headers?: Record<string, string> } = {},
) =>
  open(server, '/v1/chat/completions', {
    headers: { ...as(user), ...headers },
    body: chatBody(script, members),
  })

/** `POST /api/v1/stream`. */
export const native = (
  server: { origin: string },
  user: string,
  script: string,
  { members = {}, headers = {} }: { members?: object; headers?: Record<string, string> } = {},
) =>
  open(server, '/api/v1/stream', {
    headers: { ...as(user), ...headers },
    body: { query: `script: ${script}`, model: 'demo', ...members },
  })

export const resume = (
  server: { origin: string },
  user: string,
  id: string,
  from: { query?: number; header?: string | number } = {},
) =>
  open(server, `/api/v1/streams/${id}${from.query === undefined ? '' : `?starting_after=${from.query}`}`, {
    headers: { ...as(user), ...(from.header !== undefined && { 'last-event-id': String(from.header) }) },
  })

/** Blocks that end without data: OpenAI's decoders do not survive them. */
export const blocksWithoutData = (raw: string): string[] =>
  raw
    .split('\n\n')
    .slice(0, -1)
    .filter((block) => !/^data:/m.test(block))

/** What a stream says from behind event `after` on, as it stands in `raw`. */
export function rawBehind(raw: string, after: number): string {
  const at = raw.search(new RegExp(`^id: ${after + 1}$`, 'm'))
  if (at === -1) throw new Error(`There is no event ${after + 1} in ${raw}`)
  return raw.slice(at)
}

export interface Fleet {
  upstream: ScriptedUpstream
  /** On a schema of its own: nobody else runs what it accepts. */
  start(env?: Env): Promise<ServerProcess>
  /** Two of one schema. */
  startPair(env?: Env): Promise<readonly [ServerProcess, ServerProcess]>
  /** Without an upstream: the demo model answers. */
  startDemo(env?: Env): Promise<ServerProcess>
  /** The request of a marker, once it is there. */
  asked(marker: string): Promise<SeenRequest>
  /** How often a marker was asked for. */
  timesAsked(marker: string): number
  /** Resolves when the client of a marker's request has left; when that was seen. */
  abortedMs(marker: string): Promise<number>
  close(): Promise<void>
}

export async function startFleet(): Promise<Fleet> {
  const database: TestDatabase = await freshDatabase()
  const upstream = await startScriptedUpstream()
  let schemas = 0
  const ownEnv = (env: Env): Env => ({
    ...calm,
    DATABASE_URL: database.url,
    SPILLWAY_DB_SCHEMA: `fleet_${++schemas}`,
    ...env,
  })
  const scripted = { GENERATION_UPSTREAM_URL: upstream.url }
  const find = (marker: string): SeenRequest | undefined => upstream.requests.find((each) => each.marker === marker)
  return {
    upstream,
    start: (env = {}) => startServer(ownEnv({ ...scripted, ...env })),
    startPair: async (env = {}) => {
      const own = ownEnv({ ...scripted, ...env })
      // One after the other: the first makes the schema.
      return [await startServer(own), await startServer(own)]
    },
    startDemo: (env = {}) => startServer(ownEnv(env)),
    asked: (marker) => until(`the upstream is asked for ${marker}`, () => find(marker)),
    timesAsked: (marker) => upstream.requests.filter((each) => each.marker === marker).length,
    abortedMs: async (marker) => {
      const { endedMs } = await until(`${marker} is left`, () => {
        const seen = find(marker)
        return seen?.outcome === 'aborted' && seen
      })
      return endedMs ?? Number.NaN
    },
    close: async () => {
      await endAll()
      await upstream.close()
      await database.drop()
    },
  }
}

/** Takes a user's place and its only lane, on a server with one place for each user: whatever it asks next, waits. */
export async function occupy(fleet: Fleet, server: { origin: string }, user: string): Promise<{ release(): void }> {
  const markers = [`${user}-held-1`, `${user}-held-2`]
  for (const marker of markers) {
    const held = await native(server, user, `marker=${marker} tokens=1 end=hang`)
    await held.seen('its token', ({ content }) => content !== '')
  }
  return {
    release: () => {
      for (const marker of markers) fleet.upstream.release(marker)
    },
  }
}
