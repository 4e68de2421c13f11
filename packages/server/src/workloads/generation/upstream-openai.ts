/** Any server with OpenAI's chat API: OpenAI, vLLM, Ollama, llama.cpp, LiteLLM, … */
import { errors, Pool } from 'undici'
import { malformed, type Upstream, UpstreamFault, type UpstreamLimits, type UpstreamRequest } from './upstream.js'
import type { Conceal } from './upstream-chunks.js'
import { Reading } from './upstream-reading.js'
import { networkFault, refusalFault } from './upstream-refusal.js'

export interface OpenAiUpstreamOptions {
  /** The base URL in the form of OpenAI's SDKs, mostly ending in `/v1`. */
  url: string
  /** Sent as Bearer. */
  key: string | null
  /** Our version, for User-Agent. */
  version: string
  /** More generations than this wait for a connection. */
  connectionsMax: number
}

const connectTimeoutMs = 10_000
/** Servers on uvicorn and Node close an idle connection after 5 s; we close ours earlier. */
const keepAliveMs = 4_000
const answerHeaderBytesMax = 32_768
const modelsForMs = 60_000
const modelsTimeoutMs = 10_000
const modelsBytesMax = 1_048_576
/** A shorter key may be part of any word. */
const concealedCharactersMin = 4

function concealing(base: URL, key: string | null): Conceal {
  const secrets = [...(key === null ? [] : [key]), base.host, base.hostname].filter(
    (secret) => secret.length >= concealedCharactersMin,
  )
  return (text) => secrets.reduce((left, secret) => left.replaceAll(secret, '***'), text)
}

function pathOf(base: URL, leaf: string): string {
  return `${base.pathname.replace(/\/+$/, '')}/${leaf}${base.search}`
}

export class OpenAiUpstream implements Upstream {
  readonly #pool: Pool
  /** Separate, so that the list of models does not wait for generations. */
  readonly #listPool: Pool
  readonly #base: URL
  readonly #headers: Readonly<Record<string, string>>
  readonly #conceal: Conceal
  #models: { value: Promise<unknown>; untilMs: number } | null = null

  constructor({ url, key, version, connectionsMax }: OpenAiUpstreamOptions) {
    this.#base = new URL(url)
    this.#conceal = concealing(this.#base, key)
    this.#headers = {
      'user-agent': `spillway/${version}`,
      'accept-encoding': 'identity',
      ...(key === null ? {} : { authorization: `Bearer ${key}` }),
    }
    const pool = (connections: number, maxResponseSize = -1): Pool =>
      new Pool(this.#base.origin, {
        connections,
        maxResponseSize,
        pipelining: 1,
        keepAliveTimeout: keepAliveMs,
        maxHeaderSize: answerHeaderBytesMax,
        // A generation has its own limits; undici's would cut off a slow first token.
        headersTimeout: 0,
        bodyTimeout: 0,
        connect: { timeout: connectTimeoutMs },
      })
    this.#pool = pool(connectionsMax)
    this.#listPool = pool(1, modelsBytesMax)
  }

  async *generate(request: UpstreamRequest, limits: UpstreamLimits, signal: AbortSignal) {
    signal.throwIfAborted()
    const { chat, stream, operationId, traceparent } = request
    const reading = new Reading(request, limits, this.#conceal)
    const abort = (): void => reading.abort(signal.reason)
    signal.addEventListener('abort', abort, { once: true })
    try {
      this.#pool.dispatch(
        {
          method: 'POST',
          path: pathOf(this.#base, 'chat/completions'),
          headers: {
            ...this.#headers,
            'content-type': 'application/json',
            accept: stream ? 'text/event-stream' : 'application/json',
            'idempotency-key': operationId,
            traceparent,
          },
          body: chat,
        },
        reading,
      )
      for (let batch = await reading.next(); batch !== null; batch = await reading.next()) yield batch
    } finally {
      signal.removeEventListener('abort', abort)
      reading.stop()
    }
  }

  models(): Promise<unknown> {
    const nowMs = performance.now()
    if (this.#models !== null && nowMs < this.#models.untilMs) return this.#models.value
    const asked = { value: this.#askModels(), untilMs: nowMs + modelsForMs }
    this.#models = asked
    // A fault goes to all concurrent callers and is not cached.
    asked.value.catch(() => {
      if (this.#models === asked) this.#models = null
    })
    return asked.value
  }

  unknownModel(): null {
    return null
  }

  async close(): Promise<void> {
    await Promise.all([this.#pool.destroy(), this.#listPool.destroy()])
  }

  async #askModels(): Promise<unknown> {
    const signal = AbortSignal.timeout(modelsTimeoutMs)
    try {
      const {
        statusCode: status,
        headers,
        body: stream,
      } = await this.#listPool.request({
        method: 'GET',
        path: pathOf(this.#base, 'models'),
        headers: { ...this.#headers, accept: 'application/json' },
        signal,
      })
      const body = await stream.text()
      if (status < 200 || status >= 300) {
        throw refusalFault({ status, retryAfter: headers['retry-after'], body, conceal: this.#conceal })
      }
      return JSON.parse(body)
    } catch (fault) {
      if (fault instanceof UpstreamFault) throw fault
      if (fault instanceof SyntaxError) throw malformed('the list of models is no JSON', { cause: fault })
      if (fault instanceof errors.ResponseExceededMaxSizeError) {
        throw malformed('the upstream has too long a list of models', { cause: fault })
      }
      if (signal.aborted) {
        throw new UpstreamFault('upstream_timeout', 'the upstream did not list its models in time', { retryable: true })
      }
      throw networkFault(fault, false)
    }
  }
}
