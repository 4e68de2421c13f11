/** Many streams at a pace: how long their tokens take from the model to the reader, and what that costs. */
import { setTimeout as delay } from 'node:timers/promises'
import { usageOf } from '../process-usage.js'
import { percentile } from '../statistics.js'
import { StreamReader, type StreamSite, streamRequest } from './stream-reader.js'
import { sharedClockMs } from './stream-tokens.js'

export interface Flow {
  readonly to: StreamSite
  readonly streams: number
  /** Milliseconds between two tokens of a stream; 0: as fast as they come. */
  readonly every: number
  readonly seconds: number
  /** Before it counts, once every stream has its first token. */
  readonly settleSeconds: number
  /** Processes whose CPU time is taken, each for itself. */
  readonly pids: readonly number[]
}

export interface Flowed {
  readonly tokens: number
  readonly perSecond: number
  readonly p50Ms: number
  readonly p99Ms: number
  readonly maxMs: number
  /** Streams that broke off, and tokens out of order. */
  readonly failed: number
  readonly gaps: number
  /** Until the last stream had its first token. */
  readonly rampMs: number
  /** Seconds of CPU time, in the order of `pids`. */
  readonly cpuSeconds: readonly number[]
  /** Of this process, which reads. */
  readonly ownCpuSeconds: number
}

/** How many are opened at once. */
const openingAtOnce = 50
const rampTimeoutMs = 120_000
const endless = 1_000_000_000
const againMs = 250

export async function flow({ to, streams, every, seconds, settleSeconds, pids }: Flow): Promise<Flowed> {
  let isCounting = false
  let isGivenUp = false
  let failed = 0
  let gaps = 0
  let begun = 0
  let refusal = ''
  const took: number[] = []
  const readers: StreamReader[] = []
  const openOne = (n: number): Promise<void> =>
    new Promise((resolve) => {
      let last = 0
      const open = (): void => {
        readers[n] = new StreamReader(streamRequest(to, { tokens: endless, every }, `user-${n}`), {
          onHead(status, head) {
            if (status !== 200) refusal = head.split('\r\n', 1)[0] ?? ''
          },
          onToken(number, sentMs) {
            if (number !== last + 1) gaps += 1
            last = number
            if (number === 1) {
              begun += 1
              resolve()
            }
            if (isCounting) took.push(sharedClockMs() - sentMs)
          },
          onText(text) {
            if (text.includes('{"error"')) refusal = text
          },
          onClosed() {
            // Opening many at once may be more than the machine can take; a client asks again.
            if (last === 0 && !isGivenUp) {
              setTimeout(open, againMs)
              return
            }
            failed += 1
            resolve()
          },
        })
      }
      open()
    })
  const began = performance.now()
  const late = delay(rampTimeoutMs, 'late', { ref: false })
  for (let from = 0; from < streams; from += openingAtOnce) {
    const some = Array.from({ length: Math.min(openingAtOnce, streams - from) }, (_, n) => openOne(from + n))
    if ((await Promise.race([Promise.all(some), late])) === 'late') break
  }
  const rampMs = performance.now() - began
  isGivenUp = true
  if (begun < streams) {
    for (const reader of readers) reader.close()
    throw new Error(`of ${streams} streams of ${to.origin} ${begun} began and ${failed} failed ${refusal}`)
  }
  await delay(settleSeconds * 1_000)
  const cpu = (): number[] => pids.map((pid) => usageOf(pid).cpuSeconds)
  const before = cpu()
  const own = process.cpuUsage()
  const countedFrom = performance.now()
  isCounting = true
  await delay(seconds * 1_000)
  isCounting = false
  const counted = (performance.now() - countedFrom) / 1_000
  const { user, system } = process.cpuUsage(own)
  const after = cpu()
  for (const reader of readers) reader.close()
  return {
    ...{ tokens: took.length, perSecond: took.length / counted, failed, gaps, rampMs },
    ...{ p50Ms: percentile(took, 0.5), p99Ms: percentile(took, 0.99), maxMs: percentile(took, 1) },
    cpuSeconds: after.map((seconds, n) => seconds - (before[n] ?? 0)),
    ownCpuSeconds: (user + system) / 1e6,
  }
}
