/**
 * The tokens of the generation section: ` #<number>@<ms>;`. The time is when it was sent, by a clock that all processes of a
 * machine share; none of `#`, `@` and `;` is anywhere else behind a `#` in what a server sends.
 */

export interface StreamScript {
  /** How many; 0: none, and no end either. */
  readonly tokens: number
  /** Milliseconds between two; 0: as fast as they are taken. */
  readonly every: number
}

/** What the last message of a request says. */
export const scriptText = ({ tokens, every }: StreamScript): string => `tokens=${tokens} every=${every}`

export function scriptIn(body: string): StreamScript {
  const [, tokens = '10', every = '0'] = /tokens=(\d+) every=(\d+)/.exec(body) ?? []
  return { tokens: Number(tokens), every: Number(every) }
}

/** Milliseconds; the wall clock is not the same to a fraction of one. */
export function sharedClockMs(): number {
  return Number(process.hrtime.bigint()) / 1e6
}

const head = '{"id":"chatcmpl-bench","object":"chat.completion.chunk","created":1700000000,"model":"bench","choices":'
const before = `data: ${head}[{"index":0,"delta":{"content":" #`
const behind = ';"},"logprobs":null,"finish_reason":null}]}\n\n'
export const firstBlock = `data: ${head}[{"index":0,"delta":{"role":"assistant","content":""},"logprobs":null,"finish_reason":null}]}\n\n`
export const endBlocks = `data: ${head}[{"index":0,"delta":{},"logprobs":null,"finish_reason":"stop"}]}\n\ndata: [DONE]\n\n`

export function tokenBlock(number: number, atMs: number): string {
  return `${before}${number}@${atMs.toFixed(3)}${behind}`
}

/** Finds tokens in what comes, wherever it is cut. */
export class TokenScanner {
  readonly #found: (number: number, sentMs: number) => void
  #rest = ''

  constructor(found: (number: number, sentMs: number) => void) {
    this.#found = found
  }

  feed(came: string): void {
    const text = this.#rest === '' ? came : this.#rest + came
    let from = 0
    for (;;) {
      const start = text.indexOf('#', from)
      if (start === -1) {
        this.#rest = ''
        return
      }
      const end = text.indexOf(';', start)
      if (end === -1) {
        this.#rest = text.slice(start)
        return
      }
      const middle = text.indexOf('@', start)
      this.#found(Number(text.slice(start + 1, middle)), Number(text.slice(middle + 1, end)))
      from = end
    }
  }
}
