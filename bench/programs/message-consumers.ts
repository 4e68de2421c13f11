/** Consumers over HTTP: pop, look at what came, ack all of it, again. Each message is counted for each group. */
import { setTimeout as delay } from 'node:timers/promises'
import { percentile } from '../statistics.js'
import { MessageConnection } from './message-connection.js'

export interface Taking {
  readonly origin: string
  readonly queue: string
  /** Consumer groups; the empty name is the group of those who name none. */
  readonly groups: readonly string[]
  /** Of each group. */
  readonly consumers: number
  /** Messages of one pop, and the partitions they may come from. */
  readonly batch: number
  readonly partitions: number
}

export interface Consumption extends Taking {
  /** Ends after so long… */
  readonly seconds?: number
  /** …or when each group has seen this many messages since its queue was created. */
  readonly each?: number
}

export interface Consumed {
  readonly seconds: number
  /** Acked: all groups together. */
  readonly deliveries: number
  readonly pops: number
  /** Pops that found nothing until their time was over. */
  readonly empty: number
  /** Answered 503. */
  readonly refused: number
  /** Deliveries of what this group had before. */
  readonly twice: number
  /** What the group that has seen the fewest has seen, all loads together. */
  readonly seenEach: number
  /** From asking for messages to their ack. */
  readonly p50Ms: number
  readonly p99Ms: number
}

/** An empty pop waits so long: those who have to end are not waited for any longer. */
const popTimeoutMs = 500
const refusedPauseMs = 20

interface Popped {
  readonly leaseId: string
  readonly messages: readonly {
    readonly transactionId: string
    readonly partitionId: string
    readonly data: { readonly n: number }
  }[]
}

/** All numbers that a group of a queue has seen, over all loads of this process. */
const seen = new Map<string, Set<number>>()

function seenBy(queue: string, group: string): Set<number> {
  const key = `${queue} ${group}`
  const known = seen.get(key)
  if (known !== undefined) return known
  const made = new Set<number>()
  seen.set(key, made)
  return made
}

export class Consumers {
  readonly #taking: Taking
  readonly #onMessage: (n: number) => void
  readonly #tookMs: number[] = []
  #over = false
  #startedAt = 0
  #lastAckAt = 0
  deliveries = 0
  pops = 0
  empty = 0
  refused = 0
  twice = 0

  constructor(taking: Taking, onMessage: (n: number) => void = () => undefined) {
    this.#taking = taking
    this.#onMessage = onMessage
  }

  get seenEach(): number {
    const { queue, groups } = this.#taking
    return Math.min(...groups.map((group) => seenBy(queue, group).size))
  }

  /** Each ends with its next ack, or with its pop when that is empty. */
  stop(): void {
    this.#over = true
  }

  async run(): Promise<void> {
    const { origin, groups, consumers } = this.#taking
    const connections = await MessageConnection.openAll(origin, groups.length * consumers)
    this.#startedAt = performance.now()
    this.#lastAckAt = this.#startedAt
    try {
      await Promise.all(connections.map((connection, i) => this.#consume(connection, groups[i % groups.length] ?? '')))
    } catch (fault) {
      this.#over = true
      throw fault
    } finally {
      for (const connection of connections) connection.leave()
    }
  }

  /** Until the last ack: who waits for more than there is does not count. */
  get seconds(): number {
    return (this.#lastAckAt - this.#startedAt) / 1_000
  }

  percentiles(): { p50Ms: number; p99Ms: number } {
    if (this.#tookMs.length === 0) return { p50Ms: 0, p99Ms: 0 }
    return { p50Ms: percentile(this.#tookMs, 0.5), p99Ms: percentile(this.#tookMs, 0.99) }
  }

  async #consume(connection: MessageConnection, group: string): Promise<void> {
    const { queue, batch, partitions } = this.#taking
    const named = group === '' ? '' : `&consumerGroup=${group}`
    const path = `/api/v1/pop/queue/${queue}?batch=${batch}&partitions=${partitions}&wait=true&timeout=${popTimeoutMs}${named}`
    const numbers = seenBy(queue, group)
    while (!this.#over) {
      const began = performance.now()
      const { status, body } = await connection.get(path)
      this.pops++
      if (status === 204) this.empty++
      else if (status === 503) {
        this.refused++
        await delay(refusedPauseMs)
      } else if (status !== 200) throw new Error(`a pop was answered ${status}: ${body.slice(0, 500)}`)
      if (status !== 200) continue
      const popped = JSON.parse(body) as Popped
      for (const { data } of popped.messages) {
        if (numbers.has(data.n)) this.twice++
        numbers.add(data.n)
        this.#onMessage(data.n)
      }
      await this.#ack(connection, popped, group)
      this.#lastAckAt = performance.now()
      this.#tookMs.push(this.#lastAckAt - began)
    }
  }

  async #ack(connection: MessageConnection, { messages, leaseId }: Popped, group: string): Promise<void> {
    const acknowledgments = messages.map(({ transactionId, partitionId }) => ({
      ...{ transactionId, partitionId, leaseId, status: 'completed' },
    }))
    const { status, body } = await connection.post(
      '/api/v1/ack/batch',
      JSON.stringify({ ...(group !== '' && { consumerGroup: group }), acknowledgments }),
    )
    const results = status === 200 ? (JSON.parse(body) as { success: boolean }[]) : []
    if (results.length !== messages.length || !results.every(({ success }) => success)) {
      throw new Error(`an ack of ${messages.length} messages was answered ${status}: ${body.slice(0, 500)}`)
    }
    this.deliveries += messages.length
  }
}

const lookMs = 5
/** What is to be seen and is not by then will not come. */
const patienceMs = 180_000

export async function consume(consumption: Consumption): Promise<Consumed> {
  const { seconds, each } = consumption
  const consumers = new Consumers(consumption)
  const began = performance.now()
  const isOver = (): boolean => {
    const passedMs = performance.now() - began
    return each === undefined ? passedMs >= (seconds ?? 0) * 1_000 : consumers.seenEach >= each || passedMs > patienceMs
  }
  const look = (): void => {
    if (isOver()) consumers.stop()
  }
  const timer = setInterval(look, lookMs)
  // There may be nothing left to see.
  look()
  try {
    await consumers.run()
  } finally {
    clearInterval(timer)
  }
  const { deliveries, pops, empty, refused, twice, seenEach } = consumers
  return {
    seconds: consumers.seconds,
    ...{ deliveries, pops, empty, refused, twice, seenEach },
    ...consumers.percentiles(),
  }
}
