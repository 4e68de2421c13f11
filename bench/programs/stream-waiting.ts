/** Streams that have to wait: how soon they hear of it, and what becomes of a burst. */
import { percentile } from '../statistics.js'
import { StreamReader, type StreamSite, streamRequest } from './stream-reader.js'
import type { StreamScript } from './stream-tokens.js'

export interface FirstBytes {
  readonly to: StreamSite
  readonly user: string
  readonly count: number
}

export interface FirstByted {
  readonly p50Ms: number
  readonly p99Ms: number
  /** Those that were queued, according to their answer. */
  readonly queued: number
}

/** One after the other; each leaves as soon as it has its first byte. */
export async function firstBytes({ to, user, count }: FirstBytes): Promise<FirstByted> {
  const took: number[] = []
  let queued = 0
  for (let n = 0; n < count; n++) {
    const began = performance.now()
    await new Promise<void>((resolve, reject) => {
      const reader = new StreamReader(streamRequest(to, { tokens: 1, every: 1 }, user), {
        onHead(status, head) {
          took.push(performance.now() - began)
          if (/\r\nx-resilience-layer: 3-queue-failover/i.test(head)) queued += 1
          if (status === 200) resolve()
          else reject(new Error(`refused with ${status}`))
          reader.close()
        },
        onClosed: () => reject(new Error('the connection broke')),
      })
    })
  }
  return { p50Ms: percentile(took, 0.5), p99Ms: percentile(took, 0.99), queued }
}

export interface Burst {
  readonly to: StreamSite
  readonly user: string
  readonly requests: number
  readonly script: StreamScript
}

export interface BurstOutcome {
  readonly status: number
  /** Came to its proper end. */
  readonly isDone: boolean
  /** It waited longer than was promised. */
  readonly isTimeout: boolean
  readonly firstTokenMs: number | null
  readonly totalMs: number
}

/** All at once, each read to its end. */
export async function burst({ to, user, requests, script }: Burst): Promise<{ outcomes: BurstOutcome[] }> {
  const one = (): Promise<BurstOutcome> =>
    new Promise((resolve) => {
      const began = performance.now()
      let status = 0
      let firstTokenMs: number | null = null
      let tokens = 0
      let tail = ''
      const over = (): void =>
        resolve({
          status,
          isDone: tokens === script.tokens && tail.includes('data: [DONE]'),
          isTimeout: tail.includes('queue_timeout'),
          firstTokenMs,
          totalMs: performance.now() - began,
        })
      new StreamReader(streamRequest(to, script, user), {
        onHead(code) {
          status = code
        },
        onToken() {
          tokens += 1
          firstTokenMs ??= performance.now() - began
        },
        onText(text) {
          tail = (tail + text).slice(-1_000)
        },
        onClosed: over,
      })
    })
  return { outcomes: await Promise.all(Array.from({ length: requests }, one)) }
}
