/**
 * Reads chat completion chunks from an upstream's body.
 *
 *   nothing yet ──a chunk with content──► streaming ──[DONE]──► done
 *        │                                    │
 *        └── chunks without content: kept     └── an error object, or no JSON: a fault
 */
import { malformed, type OpenAiError, type UpstreamChunk, UpstreamFault, type UpstreamRequest } from './upstream.js'
import { type SseEvent, SseParser } from './upstream-sse.js'

/** Removes secrets from a text: the key, the upstream's address. */
export type Conceal = (text: string) => string

type Members = Record<string, unknown>

/** More empty chunks than this are passed on, because their purpose is unknown. */
const keptBackMax = 16
const errorCharactersMax = 2_048

function isMembers(value: unknown): value is Members {
  return typeof value === 'object' && value !== null && !Array.isArray(value)
}

function bounded(value: unknown, conceal: Conceal): string | null {
  if (typeof value === 'number') return String(value)
  return typeof value === 'string' && value !== '' ? conceal(value.slice(0, errorCharactersMax)) : null
}

/**
 * The error in a body: `{error: {…}}` in OpenAI's form, `{error: "text"}`, or the bare members beside `object:
 * "error"`. Null: none.
 */
export function upstreamError(value: unknown, conceal: Conceal): OpenAiError | null {
  if (!isMembers(value)) return null
  const error = value.object === 'error' ? value : value.error
  if (error === undefined || error === null || error === false || error === '') return null
  const members = isMembers(error) ? error : { message: error }
  return {
    message: bounded(members.message, conceal) ?? 'the upstream reported an error',
    type: bounded(members.type, conceal) ?? 'upstream_error',
    param: bounded(members.param, conceal),
    code: bounded(members.code, conceal),
  }
}

/** An error inside a 2xx answer. Some servers put an HTTP status in `code`: one that blames the request is not retryable. */
function errorInside(error: OpenAiError): UpstreamFault {
  const blamesRequest = /^4\d\d$/.test(error.code ?? '') && !['408', '409', '429'].includes(error.code ?? '')
  return new UpstreamFault('upstream_error', error.message, { error, retryable: !blamesRequest })
}

function incomplete(message: string): UpstreamFault {
  return new UpstreamFault('upstream_incomplete', message, { retryable: true })
}

function contentOf(choice: unknown, part: 'delta' | 'message'): string {
  const message = isMembers(choice) ? choice[part] : undefined
  return isMembers(message) && typeof message.content === 'string' ? message.content : ''
}

function finishOf(choice: unknown): string | null {
  return isMembers(choice) && typeof choice.finish_reason === 'string' ? choice.finish_reason : null
}

/** A delta that only names the role means that the upstream has begun, not that it has a token. */
function hasSomething(choices: readonly unknown[]): boolean {
  return choices.some((choice) => {
    if (finishOf(choice) !== null) return true
    const delta = isMembers(choice) ? choice.delta : undefined
    if (!isMembers(delta)) return false
    return Object.entries(delta).some(
      ([name, value]) =>
        name !== 'role' && value !== null && value !== '' && !(Array.isArray(value) && value.length === 0),
    )
  })
}

const lineEnd = /[\r\n]/

function parsed(text: string): unknown {
  try {
    return JSON.parse(text)
  } catch (cause) {
    throw malformed('the upstream sent something that is no JSON', { cause })
  }
}

function completionOf(value: unknown, conceal: Conceal): { members: Members; choices: readonly unknown[] } {
  const error = upstreamError(value, conceal)
  if (error !== null) throw errorInside(error)
  if (!isMembers(value) || !Array.isArray(value.choices)) {
    throw malformed('the upstream sent something that is no chat completion')
  }
  return { members: value, choices: value.choices }
}

/** The one chunk of a `stream: false` answer. */
export function wholeCompletion(text: string, conceal: Conceal): UpstreamChunk[] {
  const value = parsed(text)
  const { choices } = completionOf(value, conceal)
  return [
    {
      text: lineEnd.test(text) ? JSON.stringify(value) : text,
      content: contentOf(choices[0], 'message'),
      finishReason: finishOf(choices[0]),
    },
  ]
}

function asDelta(message: unknown): unknown {
  if (!isMembers(message) || !Array.isArray(message.tool_calls)) return message ?? {}
  return {
    ...message,
    tool_calls: message.tool_calls.map((call, index) => (isMembers(call) ? { index, ...call } : call)),
  }
}

/** Converts a whole completion to a stream if one was requested: one chunk, and usage in a separate chunk if wanted. */
export function completionAsChunks(
  text: string,
  request: Pick<UpstreamRequest, 'operationId' | 'usage'>,
  conceal: Conceal,
): UpstreamChunk[] {
  const { members, choices } = completionOf(parsed(text), conceal)
  const { usage, ...rest } = members
  const id = typeof rest.id === 'string' && rest.id !== '' ? rest.id : ownId(request.operationId)
  const created = typeof rest.created === 'number' ? rest.created : epochSeconds()
  const head = { ...rest, id, object: 'chat.completion.chunk', created }
  const deltas = choices.map((choice) => {
    if (!isMembers(choice)) return choice
    const { message, ...other } = choice
    return { ...other, delta: asDelta(message) }
  })
  const chunks: UpstreamChunk[] = [
    {
      text: JSON.stringify({ ...head, choices: deltas }),
      content: contentOf(choices[0], 'message'),
      finishReason: finishOf(choices[0]),
    },
  ]
  if (request.usage && isMembers(usage)) {
    chunks.push({ text: JSON.stringify({ ...head, choices: [], usage }), content: '', finishReason: null })
  }
  return chunks
}

function ownId(operationId: string): string {
  return `chatcmpl-${operationId}`
}

function epochSeconds(): number {
  return Math.floor(Date.now() / 1000)
}

export class ChunkReader {
  readonly #operationId: string
  readonly #conceal: Conceal
  readonly #sse = new SseParser()
  #id: string | null = null
  #created = 0
  #keptBack: UpstreamChunk[] = []
  #hasToken = false
  #isDone = false
  #isFinished = false

  constructor(operationId: string, conceal: Conceal) {
    this.#operationId = operationId
    this.#conceal = conceal
  }

  /** A chunk with content has arrived. */
  get hasToken(): boolean {
    return this.#hasToken
  }

  /** `[DONE]` has arrived: the rest is ignored. */
  get isDone(): boolean {
    return this.#isDone
  }

  /** Appends the completed chunks to `chunks`, also if it throws: chunks before a fault are valid. */
  read(bytes: Buffer, chunks: UpstreamChunk[]): void {
    this.#take(this.#sse.push(bytes), chunks)
  }

  /**
   * The body is over. Without `[DONE]` this is a proper end only after a finish_reason, because some servers send
   * nothing more; otherwise the answer was cut off.
   */
  end(chunks: UpstreamChunk[]): void {
    try {
      this.#take(this.#sse.end(), chunks)
    } catch (fault) {
      // Half a chunk at the very end is not malformed: the connection was cut there.
      if (!(fault instanceof UpstreamFault) || fault.code !== 'upstream_malformed') throw fault
    }
    if (this.#isDone || this.#isFinished) return
    throw incomplete('the upstream ended in the middle of its answer')
  }

  #take(events: readonly SseEvent[], chunks: UpstreamChunk[]): void {
    for (const event of events) {
      if (this.#isDone) return
      if (event.data === '[DONE]' || event.data.trim() === '[DONE]') this.#done(chunks)
      else this.#readEvent(event, chunks)
    }
  }

  #done(chunks: UpstreamChunk[]): void {
    if (this.#id === null) throw incomplete('the upstream gave an empty answer')
    this.#isDone = true
    chunks.push(...this.#keptBack.splice(0))
  }

  #readEvent({ name, data }: SseEvent, chunks: UpstreamChunk[]): void {
    const value = parsed(data)
    const error = upstreamError(
      name === 'error' && isMembers(value) ? { error: value.error ?? value } : value,
      this.#conceal,
    )
    if (error !== null) throw errorInside(error)
    if (!isMembers(value) || !Array.isArray(value.choices)) {
      // A named event may be anything, for example a ping; an unnamed one must be a chunk.
      if (name !== '' && name !== 'message') return
      throw malformed('the upstream sent something that is no chat completion chunk')
    }
    const { choices } = value
    const finishReason = finishOf(choices[0])
    if (finishReason !== null) this.#isFinished = true
    const chunk = { text: this.#constant(value, data), content: contentOf(choices[0], 'delta'), finishReason }
    if (this.#hasToken) chunks.push(chunk)
    else this.#untilToken(chunk, choices, chunks)
  }

  #untilToken(chunk: UpstreamChunk, choices: readonly unknown[], chunks: UpstreamChunk[]): void {
    this.#keptBack.push(chunk)
    this.#hasToken = hasSomething(choices)
    if (this.#hasToken || this.#keptBack.length > keptBackMax) chunks.push(...this.#keptBack.splice(0))
  }

  /** Gives all chunks the first one's id and time; rewrites them only if these differ or the JSON contains line breaks. */
  #constant(value: Members, data: string): string {
    if (this.#id === null) {
      this.#id = typeof value.id === 'string' && value.id !== '' ? value.id : ownId(this.#operationId)
      this.#created = typeof value.created === 'number' && value.created > 0 ? value.created : epochSeconds()
    }
    if (value.id === this.#id && value.created === this.#created && !data.includes('\n')) return data
    value.id = this.#id
    value.created = this.#created
    return JSON.stringify(value)
  }
}
