/**
 * The built-in model: answers from a stock of sentences at a fixed pace, always the same for the same question, so that
 * streaming can be tried without a model.
 *
 * A token is due by the time since its stream began, so that neither a late timer nor a slow reader shifts the pace.
 * One timer serves all streams, and runs only while one of them waits.
 */

import { badLimitOf, type DemoAnswer, demoAnswer } from './demo-text.js'
import {
  type OpenAiError,
  type Upstream,
  type UpstreamChunk,
  UpstreamFault,
  type UpstreamLimits,
  type UpstreamRequest,
} from './upstream.js'

const modelName = 'demo'
/** Maximum tokens in one batch; then the reader is asked whether it wants more. */
const batchTokensMax = 256
const tickMsMin = 5
const tickMsMax = 20

/** One stream in the pacer; `wake` is null while it is not waiting. */
interface Sleeper {
  dueMs: number
  wake: (() => void) | null
}

/** Wakes sleepers when they are due. */
class Pacer {
  readonly #sleepers = new Set<Sleeper>()
  readonly #tickMs: number
  #timer: NodeJS.Timeout | null = null

  constructor(tickMs: number) {
    this.#tickMs = tickMs
  }

  /** Sleeps until due or woken early: the caller checks which. */
  sleep(sleeper: Sleeper): Promise<void> {
    return new Promise((resolve) => {
      sleeper.wake = () => {
        sleeper.wake = null
        this.#sleepers.delete(sleeper)
        resolve()
      }
      this.#sleepers.add(sleeper)
      this.#timer ??= setInterval(() => this.#tick(), this.#tickMs)
    })
  }

  /** Wakes all before they are due. */
  wakeAll(): void {
    for (const sleeper of this.#sleepers) sleeper.wake?.()
    this.#tick()
  }

  #tick(): void {
    const nowMs = performance.now()
    for (const sleeper of this.#sleepers) {
      if (sleeper.dueMs <= nowMs) sleeper.wake?.()
    }
    if (this.#sleepers.size > 0 || this.#timer === null) return
    clearInterval(this.#timer)
    this.#timer = null
  }
}

/** The texts of one stream's chunks; shared parts are built once. */
class ChunkTexts {
  readonly #head: string
  readonly #wantsUsage: boolean

  constructor({ usage, operationId }: UpstreamRequest) {
    this.#wantsUsage = usage
    const created = Math.floor(Date.now() / 1000)
    const head = { id: `chatcmpl-${operationId}`, object: 'chat.completion.chunk', created, model: modelName }
    this.#head = JSON.stringify(head).slice(0, -1)
  }

  role(): UpstreamChunk {
    return { text: this.#choice('{"role":"assistant","content":""}', null), content: '', finishReason: null }
  }

  token(content: string): UpstreamChunk {
    return { text: this.#choice(`{"content":${JSON.stringify(content)}}`, null), content, finishReason: null }
  }

  end(answer: DemoAnswer): UpstreamChunk[] {
    const { finishReason } = answer
    const chunks: UpstreamChunk[] = [{ text: this.#choice('{}', finishReason), content: '', finishReason }]
    if (this.#wantsUsage) {
      const text = `${this.#head},"choices":[],"usage":${JSON.stringify(usageOf(answer))}}`
      chunks.push({ text, content: '', finishReason: null })
    }
    return chunks
  }

  #choice(delta: string, finishReason: string | null): string {
    const usage = this.#wantsUsage ? ',"usage":null' : ''
    const finish = JSON.stringify(finishReason)
    return `${this.#head},"choices":[{"index":0,"delta":${delta},"logprobs":null,"finish_reason":${finish}}]${usage}}`
  }
}

function usageOf({ promptTokens, tokenCount }: DemoAnswer): Record<string, number> {
  return { prompt_tokens: promptTokens, completion_tokens: tokenCount, total_tokens: promptTokens + tokenCount }
}

function wholeCompletion(answer: DemoAnswer, operationId: string): UpstreamChunk {
  const content = [...answer.tokens()].join('')
  const { finishReason } = answer
  const text = JSON.stringify({
    id: `chatcmpl-${operationId}`,
    object: 'chat.completion',
    created: Math.floor(Date.now() / 1000),
    model: modelName,
    choices: [
      { index: 0, message: { role: 'assistant', content, refusal: null }, logprobs: null, finish_reason: finishReason },
    ],
    usage: usageOf(answer),
  })
  return { text, content, finishReason }
}

function badLimit(param: string): UpstreamFault {
  const message = `${param} must be a whole number of at least 1.`
  const error = { message, type: 'invalid_request_error', param, code: 'invalid_request' }
  return new UpstreamFault('upstream_rejected', message, { status: 400, error })
}

type Until = (dueMs: number) => Promise<void>

class DemoModel implements Upstream {
  readonly provider = 'demo'
  readonly #msPerToken: number
  readonly #pacer: Pacer
  readonly #createdS = Math.floor(Date.now() / 1000)
  #isClosed = false

  constructor(tokensPerSecond: number) {
    this.#msPerToken = 1000 / tokensPerSecond
    this.#pacer = new Pacer(Math.min(Math.max(this.#msPerToken / 4, tickMsMin), tickMsMax))
  }

  async *generate(
    request: UpstreamRequest,
    limits: UpstreamLimits,
    signal: AbortSignal,
    onHeaders: () => void = () => undefined,
  ): AsyncGenerator<readonly UpstreamChunk[]> {
    signal.throwIfAborted()
    const body = JSON.parse(request.chat) as Record<string, unknown>
    const param = badLimitOf(body)
    if (param !== null) throw badLimit(param)
    const sleeper: Sleeper = { dueMs: 0, wake: null }
    const abort = (): void => sleeper.wake?.()
    signal.addEventListener('abort', abort, { once: true })
    try {
      onHeaders()
      const startMs = performance.now()
      const until: Until = (dueMs) => this.#sleep(sleeper, dueMs, startMs + limits.totalMs, signal)
      const answer = demoAnswer(body)
      if (request.stream) yield* this.#streamed(request, answer, startMs, until)
      else yield* this.#whole(request, answer, startMs, until)
    } finally {
      signal.removeEventListener('abort', abort)
    }
  }

  models(): Promise<unknown> {
    const model = { id: modelName, object: 'model', created: this.#createdS, owned_by: 'spillway' }
    return Promise.resolve({ object: 'list', data: [model] })
  }

  unknownModel(model: string): OpenAiError | null {
    if (model === modelName) return null
    const shown = model.slice(0, 100)
    return {
      message: `The model \`${shown}\` does not exist: this server has only \`${modelName}\`.`,
      type: 'invalid_request_error',
      param: 'model',
      code: 'model_not_found',
    }
  }

  close(): Promise<void> {
    this.#isClosed = true
    this.#pacer.wakeAll()
    return Promise.resolve()
  }

  async *#streamed(request: UpstreamRequest, answer: DemoAnswer, startMs: number, until: Until) {
    const texts = new ChunkTexts(request)
    const tokens = answer.tokens()
    let batch = [texts.role()]
    for (let sent = 0; sent < answer.tokenCount; ) {
      const due = Math.floor((performance.now() - startMs) / this.#msPerToken) + 1
      const upTo = Math.min(answer.tokenCount, due, sent + batchTokensMax)
      for (; sent < upTo; sent++) batch.push(texts.token(tokens.next().value ?? ''))
      if (sent === answer.tokenCount) break
      if (batch.length > 0) yield batch
      batch = []
      await until(startMs + sent * this.#msPerToken)
    }
    yield [...batch, ...texts.end(answer)]
  }

  async *#whole(request: UpstreamRequest, answer: DemoAnswer, startMs: number, until: Until) {
    await until(startMs + answer.tokenCount * this.#msPerToken)
    yield [wholeCompletion(answer, request.operationId)]
  }

  /** Throws on timeout, on abort, and when the model is closed. */
  async #sleep(sleeper: Sleeper, dueMs: number, endMs: number, signal: AbortSignal): Promise<void> {
    if (performance.now() < dueMs) {
      sleeper.dueMs = Math.min(dueMs, endMs)
      await this.#pacer.sleep(sleeper)
    }
    signal.throwIfAborted()
    if (this.#isClosed) throw new UpstreamFault('upstream_unreachable', 'the model is closed', { retryable: true })
    if (performance.now() >= endMs) throw new UpstreamFault('upstream_timeout', 'the model took longer than it may')
  }
}

/** `tokensPerSecond`: above 0, per stream. */
export function demoModel({ tokensPerSecond }: { tokensPerSecond: number }): Upstream {
  return new DemoModel(tokensPerSecond)
}
