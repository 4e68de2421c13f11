/**
 * An OpenAI-compatible server that does what the last user message says, for tests, faults and figures. In this
 * process by `startScriptedUpstream()`, or as a program: `node --import tsx scripted-upstream.ts [port]`, whose first line is
 * `{"url": …}` and which ends with its stdin, a pipe of the process that started it.
 *
 * The script's language is described in scripted-answer.ts.
 *
 * A token is ` <marker>#<number>`, with stamp ` <marker>#<number>@<ms>`; numbers start at 1: see `scriptedTokens`.
 *
 * GET /control: counts and requests · POST /control/release?marker=abc: the hanging ones go on · POST /control/forget
 */
import { createServer, type IncomingMessage, type ServerResponse } from 'node:http'
import type { AddressInfo } from 'node:net'
import { fileURLToPath } from 'node:url'
import {
  lastUserText,
  monotonicMs,
  ScriptedAnswer,
  type SeenRequest,
  scriptOf,
  withoutFaults,
} from './scripted-answer.js'

export { monotonicMs, type SeenRequest } from './scripted-answer.js'

export interface ScriptedState {
  counts: Record<SeenRequest['outcome'], number>
  /** The newest 20,000. */
  requests: SeenRequest[]
  /** GET /v1/models so far. */
  modelLists: number
}

export interface ScriptedUpstream extends ScriptedState {
  /** What GENERATION_UPSTREAM_URL is set to; ends in /v1. */
  readonly url: string
  readonly port: number
  /** Lets those go on that hang, of one marker or all. */
  release(marker?: string): void
  forget(): void
  close(): Promise<void>
}

export interface ScriptedToken {
  marker: string
  number: number
  sentMs: number | null
}

const requestsMax = 20_000
const keptBodyBytesMax = 65_536

/** The tokens in a text, in order. */
export function scriptedTokens(text: string): ScriptedToken[] {
  return [...text.matchAll(/ ([^\s#]+)#(\d+)(?:@([\d.]+))?/g)].map(([, marker = '', number, sentMs]) => ({
    marker,
    number: Number(number),
    sentMs: sentMs === undefined ? null : Number(sentMs),
  }))
}

class ScriptedServer {
  readonly requests: SeenRequest[] = []
  modelLists = 0
  readonly #tries = new Map<string, number>()
  readonly #running = new Set<{ seen: SeenRequest; answer: ScriptedAnswer }>()
  readonly server = createServer((request, response) => {
    this.#serve(request, response).catch((fault: unknown) => {
      // A client that left in the middle of its body; anything else is a defect of this file.
      if (request.complete) response.destroy(fault instanceof Error ? fault : new Error(String(fault)))
    })
  })

  get counts(): ScriptedState['counts'] {
    const counts = { open: 0, finished: 0, aborted: 0, cut: 0 }
    for (const { outcome } of this.requests) counts[outcome]++
    return counts
  }

  release(marker?: string): void {
    for (const { seen, answer } of this.#running) {
      if (marker === undefined || seen.marker === marker) answer.release()
    }
  }

  forget(): void {
    this.requests.length = 0
    this.#tries.clear()
    this.modelLists = 0
  }

  async #serve(request: IncomingMessage, response: ServerResponse): Promise<void> {
    const { pathname, searchParams } = new URL(request.url ?? '/', 'http://scripted')
    const json = (value: unknown): void => {
      response.writeHead(200, { 'content-type': 'application/json' }).end(JSON.stringify(value))
    }
    const chunks: Buffer[] = []
    for await (const chunk of request) chunks.push(chunk)
    switch (`${request.method} ${pathname}`) {
      case 'POST /v1/chat/completions':
        return this.#perform(request, Buffer.concat(chunks), response)
      case 'GET /v1/models':
        this.modelLists++
        return json({ object: 'list', data: [{ id: 'scripted', object: 'model', created: 1, owned_by: 'tests' }] })
      case 'GET /control':
        return json({ counts: this.counts, requests: this.requests, modelLists: this.modelLists })
      case 'POST /control/release':
        this.release(searchParams.get('marker') ?? undefined)
        return json({})
      case 'POST /control/forget':
        this.forget()
        return json({})
      default:
        response.writeHead(404).end()
    }
  }

  #perform(request: IncomingMessage, bytes: Buffer, response: ServerResponse): void {
    const body: Record<string, unknown> = JSON.parse(bytes.toString())
    const header = (name: string): string | null => request.headers[name]?.toString() ?? null
    const idempotencyKey = header('idempotency-key')
    const asked = scriptOf(lastUserText(body), idempotencyKey ?? `request-${this.requests.length + 1}`)
    const { marker } = asked.script
    const tries = (this.#tries.get(marker) ?? 0) + 1
    this.#tries.set(marker, tries)
    const seen: SeenRequest = {
      marker,
      idempotencyKey,
      traceparent: header('traceparent'),
      authorization: header('authorization'),
      body: bytes.length > keptBodyBytesMax ? null : body,
      beganMs: monotonicMs(),
      tokensSent: 0,
      outcome: 'open',
      endedMs: null,
    }
    this.requests.push(seen)
    if (this.requests.length > requestsMax) this.requests.shift()
    const script = tries > asked.times ? withoutFaults(asked.script) : asked.script
    const running = { seen, answer: new ScriptedAnswer(script, seen, body, response) }
    this.#running.add(running)
    response.on('close', () => this.#running.delete(running))
    running.answer.begin()
  }
}

export async function startScriptedUpstream({ port: wanted = 0 } = {}): Promise<ScriptedUpstream> {
  const scripted = new ScriptedServer()
  const { server } = scripted
  await new Promise<void>((resolve, reject) => {
    server.once('error', reject)
    server.listen(wanted, '127.0.0.1', () => resolve())
  })
  const { port } = server.address() as AddressInfo
  return {
    url: `http://127.0.0.1:${port}/v1`,
    port,
    get counts() {
      return scripted.counts
    },
    get requests() {
      return scripted.requests
    },
    get modelLists() {
      return scripted.modelLists
    },
    release: (marker) => scripted.release(marker),
    forget: () => scripted.forget(),
    close: () =>
      new Promise((resolve, reject) => {
        server.close((fault) => (fault ? reject(fault) : resolve()))
        server.closeAllConnections()
      }),
  }
}

if (process.argv[1] === fileURLToPath(import.meta.url)) {
  const upstream = await startScriptedUpstream({ port: Number(process.argv[2] ?? 0) })
  console.log(JSON.stringify({ url: upstream.url }))
  const stop = (): void => void upstream.close().finally(() => process.exit(0))
  process.stdin.once('end', stop).resume()
  process.once('SIGTERM', stop)
}
