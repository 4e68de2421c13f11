/** Readers that lose their connection in the middle and come back for the rest. */
import { setTimeout as delay } from 'node:timers/promises'
import { percentile } from '../statistics.js'
import { type ReadRequest, StreamReader, type StreamSite, streamRequest } from './stream-reader.js'
import type { StreamScript } from './stream-tokens.js'

export interface Resuming {
  readonly to: StreamSite
  /** `id`: Spillway's, by the number of the last event; `characters`: by how many were read. */
  readonly by: 'id' | 'characters'
  readonly streams: number
  readonly script: StreamScript
  /** Tokens until the connection is lost. */
  readonly readFirst: number
  readonly awayMs: number
}

export interface Resumed {
  /** From asking again to the first token behind what was read. */
  readonly p50Ms: number
  readonly p99Ms: number
  /** Those that had all tokens in the end, each once and in order. */
  readonly whole: number
  /** Those that got no token when they came back. */
  readonly lost: number
  /** Tokens that were left out or came twice, of those that got some. */
  readonly gaps: number
}

interface One {
  readonly firstMs: number | null
  readonly gaps: number
  readonly isWhole: boolean
}

export async function resume(asked: Resuming): Promise<Resumed> {
  const all = await Promise.all(Array.from({ length: asked.streams }, (_, n) => resumeOne(asked, n)))
  const took = all.flatMap(({ firstMs }) => (firstMs === null ? [] : [firstMs]))
  return {
    p50Ms: took.length === 0 ? Number.NaN : percentile(took, 0.5),
    p99Ms: took.length === 0 ? Number.NaN : percentile(took, 0.99),
    whole: all.filter(({ isWhole }) => isWhole).length,
    lost: all.length - took.length,
    gaps: all.reduce((sum, { gaps }) => sum + gaps, 0),
  }
}

async function resumeOne(asked: Resuming, n: number): Promise<One> {
  // Not all in the same moment.
  await delay((n / asked.streams) * asked.script.every * asked.readFirst)
  const { to, script, readFirst, by, awayMs } = asked
  const request = streamRequest(to, script, `resumer-${n}`)
  let id = ''
  let last = 0
  let characters = 0
  await new Promise<void>((resolve, reject) => {
    const reader = new StreamReader(request, {
      onHead(status, head) {
        id = /\r\nx-stream-id: (\S+)/i.exec(head)?.[1] ?? ''
        if (status !== 200 || id === '') reject(new Error(`a stream began with ${status}`))
      },
      onToken(number) {
        last = number
      },
      onText(text) {
        characters += text.length
        if (last < readFirst) return
        reader.close()
        resolve()
      },
      onClosed: () => reject(new Error('a stream ended before it was to be left')),
    })
  })
  await delay(awayMs)
  const { host, port, headers } = request
  const base = { host, port, method: 'GET' } as const
  const again: ReadRequest =
    by === 'id'
      ? { ...base, path: `/api/v1/streams/${id}`, headers: { ...headers, 'last-event-id': String(last) } }
      : { ...base, path: `/streams/${id}?skip=${characters}` }
  return readRest(again, last, script.tokens)
}

function readRest(request: ReadRequest, from: number, tokens: number): Promise<One> {
  return new Promise((resolve) => {
    const began = performance.now()
    let firstMs: number | null = null
    let last = from
    let gaps = 0
    new StreamReader(request, {
      onToken(number) {
        firstMs ??= performance.now() - began
        if (number !== last + 1) gaps += 1
        last = number
      },
      onClosed: (isWhole) => resolve({ firstMs, gaps, isWhole: isWhole && gaps === 0 && last === tokens }),
    })
  })
}
