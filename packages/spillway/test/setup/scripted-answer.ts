/**
 * One scripted answer of the upstream that tests talk to.
 *
 * The script is what follows `script:` in the message, as `name=value` separated by blanks; all of it is optional:
 *
 *   tokens=10     how many                          every=0     ms between two
 *   first=0       ms from the headers to the first, or hang: once it is released
 *   headers=0     ms until the headers
 *   marker=abc    names the request's tokens; otherwise its Idempotency-Key does
 *   stamp=1       each token says when it was sent (monotonicMs: one clock for all processes of a machine)
 *   pad=N         N more characters in each token   role=0      no chunk with the role before the first token
 *   comments=N    a comment every N ms
 *   end=done      a finish_reason and [DONE]; or nodone: only the former · cut: the body just ends · half: it ends in the
 *                 middle of a chunk · error: an error object · reset: the connection is reset, by which the client loses
 *                 what it has not read yet · hang: nothing more until released, then done
 *   garbage=K     after K tokens something that is no JSON      big=N    a chunk of N characters before the end
 *   status=500    instead of an answer              retry_after=1   with it (seconds, or `date:1` for the other form)
 *   times=N       only the first N requests of this marker misbehave (end, garbage, big, status); later ones are answered
 */
import type { ServerResponse } from 'node:http'

type Ending = 'done' | 'nodone' | 'cut' | 'half' | 'error' | 'reset' | 'hang'

interface Script {
  tokens: number
  every: number
  first: number
  /** The first token waits for its release. */
  isHeld: boolean
  headers: number
  marker: string
  stamp: boolean
  pad: number
  role: boolean
  comments: number
  end: Ending
  garbage: number
  big: number
  status: number
  retryAfter: string | null
}

export interface SeenRequest {
  marker: string
  idempotencyKey: string | null
  traceparent: string | null
  authorization: string | null
  /** Null when it had more than 64 KiB. */
  body: Record<string, unknown> | null
  /** All times by `monotonicMs`. */
  beganMs: number
  tokensSent: number
  /** `aborted`: the client left first. `cut`: this server ended it as scripted, without a proper end. */
  outcome: 'open' | 'finished' | 'aborted' | 'cut'
  /** When the answer was over, or the client's leaving was seen. */
  endedMs: number | null
}

/** One clock for all processes of a machine, which the wall clock is not to a millisecond. */
export function monotonicMs(): number {
  return Number(process.hrtime.bigint()) / 1e6
}

export function lastUserText(body: Record<string, unknown>): string {
  const messages = Array.isArray(body.messages) ? body.messages : []
  const content: unknown = Object(messages.findLast((message: unknown) => Object(message).role === 'user')).content
  if (typeof content === 'string') return content
  return Array.isArray(content) ? content.map((part: unknown) => String(Object(part).text ?? '')).join(' ') : ''
}

export function scriptOf(text: string, key: string): { script: Script; times: number } {
  const words = text.includes('script:') ? (text.split('script:')[1] ?? '').trim().split(/\s+/) : []
  const values = new Map(words.map((word) => [word.split('=')[0] ?? '', word.slice(word.indexOf('=') + 1)]))
  const number = (name: string, otherwise: number): number => Number(values.get(name) ?? otherwise)
  const script: Script = {
    tokens: number('tokens', 10),
    every: number('every', 0),
    first: values.get('first') === 'hang' ? 0 : number('first', 0),
    isHeld: values.get('first') === 'hang',
    headers: number('headers', 0),
    marker: values.get('marker') ?? key,
    stamp: values.get('stamp') === '1',
    pad: number('pad', 0),
    role: values.get('role') !== '0',
    comments: number('comments', 0),
    end: (values.get('end') ?? 'done') as Ending,
    garbage: number('garbage', -1),
    big: number('big', 0),
    status: number('status', 0),
    retryAfter: values.get('retry_after') ?? null,
  }
  return { script, times: number('times', Infinity) }
}

export function withoutFaults(script: Script): Script {
  return { ...script, end: 'done', garbage: -1, big: 0, status: 0 }
}

/** One answer, from its head to its end. */
export class ScriptedAnswer {
  readonly #script: Script
  readonly #seen: SeenRequest
  readonly #response: ServerResponse
  readonly #head: { id: string; created: number; model: string }
  readonly #isStream: boolean
  readonly #wantsUsage: boolean
  #startMs = 0
  #timer: NodeJS.Timeout | undefined
  #comments: NodeJS.Timeout | undefined
  isHanging = false

  constructor(script: Script, seen: SeenRequest, body: Record<string, unknown>, response: ServerResponse) {
    this.#script = script
    this.#seen = seen
    this.#response = response
    this.#isStream = body.stream === true
    this.#wantsUsage = Object(body.stream_options).include_usage === true
    this.#head = {
      id: `chatcmpl-${seen.marker}`,
      created: Math.floor(Date.now() / 1000),
      model: String(body.model ?? 'scripted'),
    }
    response.on('close', () => this.#closed())
  }

  begin(): void {
    this.#timer = setTimeout(() => this.#answer(), this.#script.headers)
  }

  release(): void {
    if (!this.isHanging) return
    this.isHanging = false
    if (this.#seen.tokensSent === 0 && this.#script.isHeld) this.#start()
    else this.#finish('done')
  }

  #closed(): void {
    clearTimeout(this.#timer)
    clearInterval(this.#comments)
    this.isHanging = false
    if (this.#seen.outcome === 'open') this.#seen.outcome = this.#response.writableFinished ? 'finished' : 'aborted'
    this.#seen.endedMs = monotonicMs()
  }

  #answer(): void {
    const { status, first, tokens, every, comments, isHeld } = this.#script
    if (status !== 0) {
      this.#refuse(status)
      return
    }
    if (!this.#isStream) {
      this.#timer = setTimeout(() => this.#finish(this.#script.end), first + tokens * every)
      return
    }
    this.#response.writeHead(200, { 'content-type': 'text/event-stream; charset=utf-8', 'cache-control': 'no-cache' })
    this.#response.flushHeaders()
    if (comments > 0) this.#comments = setInterval(() => this.#response.write(': still here\n\n'), comments)
    if (this.#script.role) this.#write({ role: 'assistant', content: '' })
    if (isHeld) this.isHanging = true
    else this.#start()
  }

  #start(): void {
    this.#startMs = performance.now() + this.#script.first
    this.#later()
  }

  #refuse(status: number): void {
    const { retryAfter } = this.#script
    const seconds = Number(retryAfter?.replace('date:', ''))
    if (retryAfter !== null) {
      const isDate = retryAfter.startsWith('date:')
      this.#response.setHeader('retry-after', isDate ? new Date(Date.now() + seconds * 1000).toUTCString() : retryAfter)
    }
    const error = { message: `scripted ${status}`, type: 'scripted_error', param: null, code: 'scripted' }
    this.#response.writeHead(status, { 'content-type': 'application/json' }).end(JSON.stringify({ error }))
  }

  /** Tokens that are due are sent as far as the client takes them; the pace goes by the start, not by the last token. */
  #send(): void {
    const { tokens, garbage } = this.#script
    while (!this.#response.destroyed) {
      if (this.#seen.tokensSent === garbage) {
        this.#response.write('data: {"id":oops\n\n')
        return void this.#end('finished')
      }
      if (this.#seen.tokensSent >= tokens) return void this.#finish(this.#script.end)
      if (performance.now() < this.#dueMs()) return void this.#later()
      const isTaken = this.#write({ content: this.#token(++this.#seen.tokensSent) })
      if (!isTaken) return void this.#response.once('drain', () => this.#send())
    }
  }

  #dueMs(): number {
    return this.#startMs + this.#seen.tokensSent * this.#script.every
  }

  #later(): void {
    this.#timer = setTimeout(() => this.#send(), Math.max(0, Math.ceil(this.#dueMs() - performance.now())))
  }

  #token(number: number): string {
    const { marker, stamp, pad } = this.#script
    return ` ${marker}#${number}${stamp ? `@${monotonicMs().toFixed(3)}` : ''}${pad > 0 ? ` ${'x'.repeat(pad)}` : ''}`
  }

  #chunk(delta: Record<string, unknown>, finishReason: string | null): string {
    const { id, created, model } = this.#head
    const choices = [{ index: 0, delta, logprobs: null, finish_reason: finishReason }]
    return JSON.stringify({ id, object: 'chat.completion.chunk', created, model, choices })
  }

  #write(delta: Record<string, unknown>, finishReason: string | null = null): boolean {
    return this.#response.write(`data: ${this.#chunk(delta, finishReason)}\n\n`)
  }

  #finish(end: Ending): void {
    if (this.#script.big > 0 && this.#isStream) this.#write({ content: ` ${'x'.repeat(this.#script.big)}` })
    if (end === 'reset') {
      this.#seen.outcome = 'cut'
      return void this.#response.socket?.resetAndDestroy()
    }
    if (end === 'hang') {
      this.isHanging = true
      return
    }
    if (this.#isStream) this.#finishStream(end)
    else this.#finishWhole(end)
  }

  #finishStream(end: Ending): void {
    if (end === 'half') this.#response.write(`data: ${this.#chunk({ content: 'half' }, null).slice(0, 60)}`)
    if (end === 'error') {
      const error = { message: 'scripted error', type: 'server_error', param: null, code: 'scripted' }
      this.#response.write(`data: ${JSON.stringify({ error })}\n\n`)
    }
    if (end === 'done' || end === 'nodone') this.#write({}, 'stop')
    if (end === 'done' && this.#wantsUsage) {
      const usage = {
        prompt_tokens: 1,
        completion_tokens: this.#seen.tokensSent,
        total_tokens: this.#seen.tokensSent + 1,
      }
      const { id, created, model } = this.#head
      const chunk = { id, object: 'chat.completion.chunk', created, model, choices: [], usage }
      this.#response.write(`data: ${JSON.stringify(chunk)}\n\n`)
    }
    if (end === 'done') this.#response.write('data: [DONE]\n\n')
    this.#end(end === 'done' || end === 'nodone' ? 'finished' : 'cut')
  }

  #finishWhole(end: Ending): void {
    if (end === 'error') {
      this.#refuse(500)
      return
    }
    const { tokens } = this.#script
    this.#seen.tokensSent = tokens
    const content = Array.from({ length: tokens }, (_, at) => this.#token(at + 1)).join('')
    const message = { role: 'assistant', content }
    const choices = [{ index: 0, message, logprobs: null, finish_reason: 'stop' }]
    const usage = { prompt_tokens: 1, completion_tokens: tokens, total_tokens: tokens + 1 }
    const { id, created, model } = this.#head
    const text = JSON.stringify({ id, object: 'chat.completion', created, model, choices, usage })
    this.#response.writeHead(200, { 'content-type': 'application/json' })
    const isCut = end === 'cut' || end === 'half'
    this.#response.write(isCut ? text.slice(0, text.length / 2) : text)
    this.#end(isCut ? 'cut' : 'finished')
  }

  #end(outcome: 'finished' | 'cut'): void {
    // Not yet `finished`: the client may still leave before it has taken everything.
    if (outcome === 'cut') this.#seen.outcome = 'cut'
    clearInterval(this.#comments)
    this.#response.end()
  }
}
