/**
 * The built-in model: answers from a stock of sentences at a fixed pace, always the same for the same question, so that
 * streaming can be tried without a model.
 *
 * A token is due by the time since its stream began, so that neither a late timer nor a slow reader shifts the pace.
 * One timer serves all streams, and runs only while one of them waits.
 */

import { DueRing } from 'spillway/workload'
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
const ringMs = 1_000

/** One stream; `wake` is null while it is not waiting. */
interface Sleeper {
  dueMs: number
  wake: (() => void) | null
}

const epochSeconds = (): number => Math.floor(Date.now() / 1000)

/** Makes the chunks of one stream. */
function chunksOf({ usage: wantsUsage, operationId }: UpstreamRequest) {
  const id = `chatcmpl-${operationId}`
  const head = { id, object: 'chat.completion.chunk', created: epochSeconds(), model: modelName }
  return {
    chunk(delta: Record<string, string>, content = '', finishReason: string | null = null): UpstreamChunk {
      const choices = [{ index: 0, delta, logprobs: null, finish_reason: finishReason }]
      return { text: JSON.stringify({ ...head, choices, ...(wantsUsage && { usage: null }) }), content, finishReason }
    },
    usage(answer: DemoAnswer): UpstreamChunk[] {
      const text = JSON.stringify({ ...head, choices: [], usage: usageOf(answer) })
      return wantsUsage ? [{ text, content: '', finishReason: null }] : []
    },
  }
}

function usageOf({ promptTokens, tokenCount }: DemoAnswer): Record<string, number> {
  return { prompt_tokens: promptTokens, completion_tokens: tokenCount, total_tokens: promptTokens + tokenCount }
}

function wholeCompletion(answer: DemoAnswer, operationId: string): UpstreamChunk {
  const content = [...answer.tokens()].join('')
  const { finishReason } = answer
  const message = { role: 'assistant', content, refusal: null }
  const text = JSON.stringify({
    id: `chatcmpl-${operationId}`,
    object: 'chat.completion',
    created: epochSeconds(),
    model: modelName,
    choices: [{ index: 0, message, logprobs: null, finish_reason: finishReason }],
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

export class DemoModel implements Upstream {
  readonly #msPerToken: number
  readonly #sleepers = new Set<Sleeper>()
  readonly #ring: DueRing<Sleeper>
  readonly #createdS = epochSeconds()
  #isClosed = false

  /** `tokensPerSecond`: above 0, per stream. */
  constructor({ tokensPerSecond }: { tokensPerSecond: number }) {
    this.#msPerToken = 1000 / tokensPerSecond
    const tickMs = Math.min(Math.max(this.#msPerToken / 4, tickMsMin), tickMsMax)
    this.#ring = new DueRing({ tickMs, longestMs: ringMs, look: (sleeper) => this.#look(sleeper) })
  }

  async *generate(
    request: UpstreamRequest,
    limits: UpstreamLimits,
    signal: AbortSignal,
  ): AsyncGenerator<readonly UpstreamChunk[]> {
    signal.throwIfAborted()
    const body = JSON.parse(request.chat) as Record<string, unknown>
    const param = badLimitOf(body)
    if (param !== null) throw badLimit(param)
    const sleeper: Sleeper = { dueMs: 0, wake: null }
    const abort = (): void => sleeper.wake?.()
    signal.addEventListener('abort', abort, { once: true })
    this.#sleepers.add(sleeper)
    try {
      const startMs = performance.now()
      const until: Until = (dueMs) => this.#sleep(sleeper, dueMs, startMs + limits.totalMs, signal)
      const answer = demoAnswer(body)
      if (request.stream) yield* this.#streamed(request, answer, startMs, until)
      else yield* this.#whole(request, answer, startMs, until)
    } finally {
      signal.removeEventListener('abort', abort)
      this.#sleepers.delete(sleeper)
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
    for (const sleeper of this.#sleepers) sleeper.wake?.()
    return Promise.resolve()
  }

  async *#streamed(request: UpstreamRequest, answer: DemoAnswer, startMs: number, until: Until) {
    const { chunk, usage } = chunksOf(request)
    const tokens = answer.tokens()
    let batch = [chunk({ role: 'assistant', content: '' })]
    for (let sent = 0; sent < answer.tokenCount; ) {
      const due = Math.floor((performance.now() - startMs) / this.#msPerToken) + 1
      const upTo = Math.min(answer.tokenCount, due, sent + batchTokensMax)
      for (; sent < upTo; sent++) {
        const content = tokens.next().value ?? ''
        batch.push(chunk({ content }, content))
      }
      if (sent === answer.tokenCount) break
      if (batch.length > 0) yield batch
      batch = []
      await until(startMs + sent * this.#msPerToken)
    }
    yield [...batch, chunk({}, '', answer.finishReason), ...usage(answer)]
  }

  async *#whole(request: UpstreamRequest, answer: DemoAnswer, startMs: number, until: Until) {
    await until(startMs + answer.tokenCount * this.#msPerToken)
    yield [wholeCompletion(answer, request.operationId)]
  }

  /** Throws on timeout, on abort, and when the model is closed. */
  async #sleep(sleeper: Sleeper, dueMs: number, endMs: number, signal: AbortSignal): Promise<void> {
    const nowMs = performance.now()
    if (nowMs < dueMs) {
      sleeper.dueMs = Math.min(dueMs, endMs)
      await new Promise<void>((resolve) => {
        sleeper.wake = resolve
        this.#ring.add(sleeper, this.#ring.ticksOf(sleeper.dueMs - nowMs))
      })
      sleeper.wake = null
    }
    signal.throwIfAborted()
    if (this.#isClosed) throw new UpstreamFault('upstream_unreachable', 'the model is closed', { retryable: true })
    if (performance.now() >= endMs) throw new UpstreamFault('upstream_timeout', 'the model took longer than it may')
  }

  /** Wakes a sleeper that is due; one that was woken early is no longer waiting. */
  #look({ dueMs, wake }: Sleeper): number {
    const leftMs = dueMs - performance.now()
    if (wake !== null && leftMs > 0) return this.#ring.ticksOf(leftMs)
    wake?.()
    return 0
  }
}
