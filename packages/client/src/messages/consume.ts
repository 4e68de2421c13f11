/**
 *   taking ──a batch: one partition, one lease──► worked on, one after the other ──► answered for ──► taking
 *     │ `concurrency` batches at once, so as many partitions           │ lease lost: left, others have it
 *     └ stop() ──► nothing more is taken; what is at hand is finished and answered for ──► stopped
 */
import type { AckStatus, PoppedMessage } from '@spillway/protocol/wire'
import type { Clock } from '../clock.js'
import { SpillwayError } from '../error.js'
import type { Settings } from '../options.js'
import { pauseMs } from '../policy/pause.js'
import type { Address } from './address.js'
import { keepLease, type Renewal } from './lease.js'
import type { Ack, Messages, PopOptions } from './messages.js'

/**
 * `failed`, `retry` or `dlq` returned says what became of it; anything else: completed. Thrown: failed, with the error's
 * text. After `failed` and `retry` what came behind it in its
 * partition is handed back unseen, so that it is not overtaken.
 */
export type Handler = (
  message: PoppedMessage,
  /** Aborted when the lease is lost: somebody else has, or will have, the message. */
  context: { signal: AbortSignal },
) => unknown

export interface ConsumeOptions extends Pick<PopOptions, 'group' | 'subscriptionMode' | 'subscriptionFrom'> {
  /** Partitions that are worked on at once. Default 1. */
  concurrency?: number
  /** Messages of a partition that are taken at once. Default 10. */
  batch?: number
  /** How the lease is kept while the handler works. Default: for 60 s, each 20 s. False: not. */
  renewal?: Renewal | false
  /** The same as `stop()`. */
  signal?: AbortSignal
  /** Hears of what could not be taken or answered for; it goes on by itself. Default: the logger. */
  onError?(error: unknown): void
}

export interface Consumer {
  /** Takes nothing more; resolves when what it has is finished and answered for. */
  stop(): Promise<void>
  /** Rejects with what cannot pass, such as a key that may not consume. */
  readonly finished: Promise<void>
}

interface ConsumeParts {
  messages: Messages
  settings: Settings
  clock: Clock
}

const waitMs = 20_000
const pauseMsMax = 30_000

export function consume(
  parts: ConsumeParts,
  { from, handler }: { from: Address; handler: Handler },
  options: ConsumeOptions,
): Consumer {
  const stopping = new AbortController()
  const stop = (): void => stopping.abort()
  options.signal?.addEventListener('abort', stop, { once: true })
  if (options.signal?.aborted === true) stop()
  const loop = new ConsumeLoop(parts, { from, handler, options, stopping: stopping.signal })
  const finished = loop.run().finally(() => options.signal?.removeEventListener('abort', stop))
  // Who only calls stop() hears of a fault there.
  finished.catch(() => undefined)
  return {
    finished,
    stop: () => {
      stop()
      return finished
    },
  }
}

interface Consuming {
  from: Address
  handler: Handler
  options: ConsumeOptions
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
    const { stopping, options } = this.#what
    const { concurrency = 1 } = options
    try {
      for (let faults = 0; !stopping.aborted; ) {
        // One request waits for messages, however many are worked on: a browser has few connections.
        if (this.#working.size >= concurrency) {
          await Promise.race(this.#working)
          continue
        }
        const taken = await this.#take(faults + 1)
        faults = taken === null ? faults + 1 : 0
        if (taken === null || taken.length === 0) continue
        const work = this.#settle(taken).finally(() => this.#working.delete(work))
        this.#working.add(work)
      }
    } finally {
      await Promise.all(this.#working)
    }
  }

  /** Null: it did not work, and the pause is over. */
  async #take(tries: number): Promise<PoppedMessage[] | null> {
    const { from, options, stopping } = this.#what
    const { group, subscriptionMode, subscriptionFrom, batch = 10 } = options
    const { messages, clock } = this.#parts
    try {
      return await messages.pop(from, {
        ...{ batch, waitMs, signal: stopping },
        ...(group !== undefined && { group }),
        ...(subscriptionMode && { subscriptionMode }),
        ...(subscriptionFrom !== undefined && { subscriptionFrom }),
      })
    } catch (fault) {
      if (stopping.aborted) return null
      if (!(fault instanceof SpillwayError && fault.retryable)) throw fault
      this.#tell(fault)
      const most = { maxMs: pauseMsMax, leftMs: Number.POSITIVE_INFINITY }
      const retryAfterMs = Math.min(fault.retryAfterMs ?? 0, pauseMsMax)
      const delayMs = pauseMs({ ...most, tries, retryAfterMs, random: clock.random() }) ?? pauseMsMax
      // Ends early when it is stopped.
      await clock.sleep(delayMs, stopping).catch(() => undefined)
      return null
    }
  }

  /** Never rejects: what is not answered for comes again when its lease is over. */
  async #settle(taken: readonly PoppedMessage[]): Promise<void> {
    const { messages, settings } = this.#parts
    const { renewal = {} } = this.#what.options
    const lease = keepLease(messages, taken[0]?.leaseId ?? '', renewal)
    try {
      const acks = await this.#work(taken, lease.lost)
      if (lease.lost.aborted) {
        settings.logger.warn('a lease was lost while its messages were worked on', { messages: taken.length })
        return
      }
      const refused = (await messages.ack(acks)).filter(({ success }) => !success)
      // Sent twice because the first answer was lost, it is refused although it counts.
      if (refused.length > 0) settings.logger.warn('acks were refused', { error: refused[0]?.error })
    } catch (fault) {
      this.#tell(fault)
    } finally {
      lease.release()
    }
  }

  async #work(taken: readonly PoppedMessage[], lost: AbortSignal): Promise<Ack[]> {
    const acks: Ack[] = []
    for (const [i, message] of taken.entries()) {
      if (lost.aborted) break
      const answer = await this.#handle(message, lost)
      acks.push(ackOf(message, answer))
      if (answer.status === 'completed' || answer.status === 'dlq') continue
      return [...acks, ...taken.slice(i + 1).map((behind) => ackOf(behind, { status: 'retry' }))]
    }
    return acks
  }

  async #handle(message: PoppedMessage, signal: AbortSignal): Promise<{ status: AckStatus; error?: string }> {
    try {
      const told = await this.#what.handler(message, { signal })
      return { status: told === 'failed' || told === 'retry' || told === 'dlq' ? told : 'completed' }
    } catch (fault) {
      const error = fault instanceof Error ? fault.message : String(fault)
      this.#parts.settings.logger.debug('a handler failed', { error, transactionId: message.transactionId })
      return { status: 'failed', error: error.slice(0, 10_000) }
    }
  }

  #tell(fault: unknown): void {
    const { onError } = this.#what.options
    if (onError !== undefined) onError(fault)
    else this.#parts.settings.logger.warn('consuming: trying again', { error: String(fault) })
  }
}

function ackOf(message: PoppedMessage, answer: { status: AckStatus; error?: string }): Ack {
  const { transactionId, partitionId, leaseId, consumerGroup } = message
  return { transactionId, partitionId, leaseId, consumerGroup, ...answer }
}
