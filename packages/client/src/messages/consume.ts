/**
 *   taking ──a batch: one partition, one lease──► handled, one by one ──► acknowledged ──► taking
 *     │ `concurrency` batches at once, so as many partitions │ lease lost: left to others
 *     └ stop() ──► takes no more; messages in hand are finished and acknowledged ──► stopped
 */
import type { AckStatus, PoppedMessage } from '@spillway/protocol/wire'
import { number } from '../checks.js'
import type { Clock } from '../clock.js'
import { SpillwayError } from '../error.js'
import { calling, textOf, warnAbout } from '../hooks.js'
import type { Settings } from '../options.js'
import { idleMs, pauseMs, quickMs } from '../policy/pause.js'
import type { Address } from './address.js'
import { type KeptLease, keepLease, type Renewal, timesOf } from './lease.js'
import type { Ack, Messages, PopOptions } from './messages.js'

/**
 * Returning `failed`, `retry` or `dlq` sets the status; anything else means completed. An error thrown means failed, with
 * its text. After `failed` and `retry`, later messages of the partition are handed back unseen, to keep the order.
 */
export type Handler = (
  message: PoppedMessage,
  /** Aborted when the lease is lost or was not extended in time: another consumer has, or may have, the message. */
  context: { signal: AbortSignal },
) => unknown

export interface ConsumeOptions extends Pick<PopOptions, 'group' | 'subscriptionMode' | 'subscriptionFrom'> {
  /** Partitions processed at once. Default 1. */
  concurrency?: number
  /** Messages taken from a partition at once. Default 10. */
  batch?: number
  /** How the lease is renewed while the handler works. Default: to 60 s, every 20 s. False: never. */
  renewal?: Renewal | false
  /** The same as `stop()`. */
  signal?: AbortSignal
  /** Gets errors of taking and acknowledging, after which consuming continues, and the one that ends it. Default: the logger. */
  onError?(error: unknown): void
}

export interface Consumer {
  /** Takes no more; resolves when the messages in hand are finished and acknowledged. */
  stop(): Promise<void>
  /** Rejects when the server refuses for good: 400, 401 and 403, for example for a key that may not consume. */
  readonly finished: Promise<void>
}

interface ConsumeParts {
  messages: Messages
  settings: Settings
  clock: Clock
}

const waitMs = 20_000
const pauseMsMax = 30_000
/** The server's limit, in UTF-16 units so that it holds however it counts. */
const errorLengthMax = 10_000

export function consume(
  parts: ConsumeParts,
  { from, handler }: { from: Address; handler: Handler },
  options: ConsumeOptions,
): Consumer {
  const { concurrency = 1, batch = 10, renewal = {} } = options
  const bounds: Bounds = {
    concurrency: number('concurrency', concurrency, 1),
    batch: number('batch', batch, 1),
    lease: renewal === false ? false : timesOf(renewal),
  }
  const stopping = new AbortController()
  const stop = (): void => stopping.abort()
  options.signal?.addEventListener('abort', stop, { once: true })
  if (options.signal?.aborted === true) stop()
  const loop = new ConsumeLoop(parts, { from, handler, options, bounds, stopping: stopping.signal })
  const finished = loop.run().finally(() => options.signal?.removeEventListener('abort', stop))
  // A caller that only uses stop() gets the error there.
  finished.catch(() => undefined)
  return {
    finished,
    stop: () => {
      stop()
      return finished
    },
  }
}

interface Bounds {
  concurrency: number
  batch: number
  lease: ReturnType<typeof timesOf> | false
}

interface Consuming {
  from: Address
  handler: Handler
  options: ConsumeOptions
  bounds: Bounds
  stopping: AbortSignal
}

class ConsumeLoop {
  readonly #parts: ConsumeParts
  readonly #what: Consuming
  readonly #working = new Set<Promise<void>>()

  constructor(parts: ConsumeParts, what: Consuming) {
    this.#parts = parts
    this.#what = what
  }

  async run(): Promise<void> {
    const { stopping, bounds } = this.#what
    const { clock } = this.#parts
    try {
      for (let faults = 0, quick = 0; !stopping.aborted; ) {
        // One request waits for messages, however many are in work: a browser has few connections.
        if (this.#working.size >= bounds.concurrency) {
          await Promise.race(this.#working)
          continue
        }
        const askedAt = clock.now()
        const taken = await this.#take(faults + 1)
        faults = taken === null ? faults + 1 : 0
        const isQuick = taken?.length === 0 && clock.now() - askedAt < quickMs
        quick = isQuick ? quick + 1 : 0
        if (isQuick) await this.#pause(idleMs(quick, clock.random()))
        if (taken === null || taken.length === 0) continue
        const work = this.#settle(taken).finally(() => this.#working.delete(work))
        this.#working.add(work)
      }
    } finally {
      await Promise.all(this.#working)
    }
  }

  /** Null: it failed, and the pause is over. */
  async #take(tries: number): Promise<PoppedMessage[] | null> {
    const { from, options, bounds, stopping } = this.#what
    const { group, subscriptionMode, subscriptionFrom } = options
    const { messages, clock } = this.#parts
    try {
      return await messages.pop(from, {
        ...{ batch: bounds.batch, waitMs, signal: stopping },
        ...(group !== undefined && { group }),
        ...(subscriptionMode && { subscriptionMode }),
        ...(subscriptionFrom !== undefined && { subscriptionFrom }),
      })
    } catch (fault) {
      if (stopping.aborted) return null
      this.#report(fault)
      if (isFinal(fault)) throw fault
      const most = { maxMs: pauseMsMax, leftMs: Number.POSITIVE_INFINITY }
      const askedMs = fault instanceof SpillwayError ? (fault.retryAfterMs ?? 0) : 0
      const retryAfterMs = Math.min(askedMs, pauseMsMax)
      await this.#pause(pauseMs({ ...most, tries, retryAfterMs, random: clock.random() }) ?? pauseMsMax)
      return null
    }
  }

  /** Ends early when it is stopped. */
  async #pause(ms: number): Promise<void> {
    await this.#parts.clock.sleep(ms, this.#what.stopping).catch(() => undefined)
  }

  /** Never rejects: messages without an ack are delivered again when their lease expires. */
  async #settle(taken: readonly PoppedMessage[]): Promise<void> {
    const { messages, settings } = this.#parts
    const lease = keepLease(messages, taken[0]?.leaseId ?? '', this.#what.bounds.lease)
    try {
      const acks = await this.#work(taken, lease)
      if (lease.isGone) {
        settings.logger.warn('a lease was lost while its messages were worked on', { messages: taken.length })
        return
      }
      await this.#answer(acks)
    } catch (fault) {
      this.#report(fault)
    } finally {
      lease.release()
    }
  }

  async #work(taken: readonly PoppedMessage[], { lost }: KeptLease): Promise<Ack[]> {
    const acks: Ack[] = []
    for (const [i, message] of taken.entries()) {
      const answer = lost.aborted ? handedBack : await this.#handle(message, lost)
      acks.push(ackOf(message, answer))
      if (answer.status === 'completed' || answer.status === 'dlq') continue
      return [...acks, ...taken.slice(i + 1).map((behind) => ackOf(behind, handedBack))]
    }
    return acks
  }

  async #handle(message: PoppedMessage, signal: AbortSignal): Promise<Outcome> {
    try {
      const outcome = await this.#what.handler(message, { signal })
      return { status: outcome === 'failed' || outcome === 'retry' || outcome === 'dlq' ? outcome : 'completed' }
    } catch (fault) {
      const error = ackText(textOf(fault))
      this.#parts.settings.logger.debug('a handler failed', { error, transactionId: message.transactionId })
      // The handler was asked to stop, which is not a failure of the message.
      return signal.aborted ? handedBack : { status: 'failed', error }
    }
  }

  async #answer(acks: readonly Ack[]): Promise<void> {
    const { messages, settings } = this.#parts
    try {
      const refused = (await messages.ack(acks)).filter(({ success }) => !success)
      const known = refused.filter(({ isUnknown }) => !isUnknown)
      if (known.length > 0) settings.logger.warn('acks were refused', { error: known[0]?.error })
      else if (refused.length > 0) settings.logger.debug('acks may have counted: their first answer was lost', {})
    } catch (fault) {
      const isInvalid = fault instanceof SpillwayError && fault.problem !== null && fault.status === 400
      if (!isInvalid || acks.length < 2) throw fault
      // One invalid ack must not hold up the others.
      for (const ack of acks) await this.#answer([ack]).catch((each: unknown) => this.#report(each))
    }
  }

  #report(fault: unknown): void {
    const { onError } = this.#what.options
    const { logger } = this.#parts.settings
    if (onError !== undefined) calling(() => onError(fault), warnAbout(logger))
    else logger.warn('consuming failed', { error: textOf(fault) })
  }
}

interface Outcome {
  status: AckStatus
  error?: string
}

const handedBack: Outcome = { status: 'retry' }

/** The server itself rejects the request, so a retry would not help. Errors of proxies, and all others, may pass. */
function isFinal(fault: unknown): boolean {
  return fault instanceof SpillwayError && fault.problem !== null && [400, 401, 403].includes(fault.status ?? 0)
}

/** As the server accepts it: not too long, no NUL, no lone surrogates. */
function ackText(text: string): string {
  const cut = text.slice(0, errorLengthMax).replace(/[\ud800-\udbff]$/, '')
  // With the u flag a pair is one character, so only lone surrogates match.
  return cut.replace(/[\0\p{Surrogate}]/gu, '\ufffd')
}

function ackOf(message: PoppedMessage, answer: Outcome): Ack {
  const { transactionId, partitionId, leaseId, consumerGroup } = message
  return { transactionId, partitionId, leaseId, consumerGroup, ...answer }
}
