/**
 *   taking ──a batch: one partition, one lease──► worked on, one after the other ──► answered for ──► taking
 *     │ `concurrency` batches at once, so as many partitions           │ lease lost: left, others have it
 *     └ stop() ──► nothing more is taken; what is at hand is finished and answered for ──► stopped
 */
import type { AckStatus, PoppedMessage } from '@spillway/protocol/wire'
import { number } from '../checks.js'
import type { Clock } from '../clock.js'
import { SpillwayError } from '../error.js'
import { calling, tellsOf, textOf } from '../hooks.js'
import type { Settings } from '../options.js'
import { idleMs, pauseMs, quickMs } from '../policy/pause.js'
import type { Address } from './address.js'
import { type KeptLease, keepLease, type Renewal, timesOf } from './lease.js'
import type { Ack, Messages, PopOptions } from './messages.js'

/**
 * `failed`, `retry` or `dlq` returned says what became of it; anything else: completed. Thrown: failed, with the error's
 * text. After `failed` and `retry` what came behind it in its partition is handed back unseen, so that it is not overtaken.
 */
export type Handler = (
  message: PoppedMessage,
  /** Aborted when the lease is lost, or was not extended in time: somebody else has, or may have, the message. */
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
  /** Hears of what could not be taken or answered for, and of what ends it; else it goes on by itself. Default: the logger. */
  onError?(error: unknown): void
}

export interface Consumer {
  /** Takes nothing more; resolves when what it has is finished and answered for. */
  stop(): Promise<void>
  /** Rejects when the server says that it cannot be: 400, 401 and 403, such as for a key that may not consume. */
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
        // One request waits for messages, however many are worked on: a browser has few connections.
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

  /** Null: it did not work, and the pause is over. */
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
      this.#tell(fault)
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

  /** Never rejects: what is not answered for comes again when its lease is over. */
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
      this.#tell(fault)
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
      const told = await this.#what.handler(message, { signal })
      return { status: told === 'failed' || told === 'retry' || told === 'dlq' ? told : 'completed' }
    } catch (fault) {
      const error = ackText(textOf(fault))
      this.#parts.settings.logger.debug('a handler failed', { error, transactionId: message.transactionId })
      // It was told to stop: no failure of the message.
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
      // One that is wrong must not hold up the others.
      for (const ack of acks) await this.#answer([ack]).catch((each: unknown) => this.#tell(each))
    }
  }

  #tell(fault: unknown): void {
    const { onError } = this.#what.options
    const { logger } = this.#parts.settings
    if (onError !== undefined) calling(() => onError(fault), tellsOf(logger))
    else logger.warn('consuming failed', { error: textOf(fault) })
  }
}

interface Outcome {
  status: AckStatus
  error?: string
}

const handedBack: Outcome = { status: 'retry' }

/** Of the server itself, and about what is asked for: it will not be otherwise. What a proxy says, and the rest, may pass. */
function isFinal(fault: unknown): boolean {
  return fault instanceof SpillwayError && fault.problem !== null && [400, 401, 403].includes(fault.status ?? 0)
}

/** As the server takes it: not too long, without NUL and halves of characters. */
function ackText(text: string): string {
  const cut = text.slice(0, errorLengthMax).replace(/[\ud800-\udbff]$/, '')
  // Whole characters are one here, so that only halves are surrogates.
  return cut.replace(/[\0\p{Surrogate}]/gu, '\ufffd')
}

function ackOf(message: PoppedMessage, answer: Outcome): Ack {
  const { transactionId, partitionId, leaseId, consumerGroup } = message
  return { transactionId, partitionId, leaseId, consumerGroup, ...answer }
}
