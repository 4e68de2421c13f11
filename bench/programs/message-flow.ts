/**
 * From end to end: requests leave when they are due, whatever became of those before (an open loop), while consumers wait for
 * what comes. A message's time counts from when its request was due to when a consumer has it in hand.
 */
import { setTimeout as delay } from 'node:timers/promises'
import { poissonArrivals } from '../overload-arrivals.js'
import { type Spread, spreadOf } from '../overload-wire.js'
import { pushBody, pushPath, type Shape } from './message-body.js'
import { MessageConnection } from './message-connection.js'
import { Consumers, type Taking } from './message-consumers.js'

export interface Flow {
  readonly shape: Shape
  readonly first: number
  readonly requestsPerSecond: number
  readonly seconds: number
  /** Of the beginning, whose times do not count. */
  readonly warmUpSeconds: number
  readonly taking: Taking
}

export interface Flowed {
  /** Messages that were accepted, and those of them that had to queue first (202). */
  readonly pushed: number
  readonly queued: number
  /** Messages that were not accepted. */
  readonly refused: number
  /** By all groups. */
  readonly received: number
  /** Before the last push was due: what is worked off afterwards is not among them. */
  readonly receivedDuring: number
  readonly twice: number
  readonly receivedMs: Spread
  /** Until a push was answered. */
  readonly answeredMs: Spread
  /** How late the generator itself was. */
  readonly lagMs: Spread
  /** Share of one core that this process used, producers and consumers. */
  readonly cores: number
}

/** Open before it begins; more are made when all are busy. A request that finds none waits, and the wait counts. */
const connectionsAtOnce = 64
const connectionsMax = 500
const tickMs = 1
/** What has not come by then does not come. */
const patienceMs = 30_000

class Producers {
  readonly #flow: Flow
  readonly #free: MessageConnection[]
  readonly #all: MessageConnection[]
  readonly #waiting: ((free: MessageConnection) => void)[] = []
  #opened: number
  readonly #dueMs: Float64Array
  readonly #startedAt = performance.now()
  readonly lagMs: number[] = []
  readonly answeredMs: number[] = []
  pushed = 0
  queued = 0
  refused = 0

  constructor(flow: Flow, connections: MessageConnection[], dueMs: Float64Array) {
    this.#flow = flow
    this.#all = connections
    this.#free = [...connections]
    this.#opened = connections.length
    this.#dueMs = dueMs
  }

  get nowMs(): number {
    return performance.now() - this.#startedAt
  }

  /** When the request of a message was due. */
  dueOf(n: number): number {
    return this.#dueMs[Math.floor((n - this.#flow.first) / this.#flow.shape.items)] ?? Number.NaN
  }

  async run(): Promise<void> {
    const underWay = new Set<Promise<void>>()
    const faults: unknown[] = []
    for (let next = 0; next < this.#dueMs.length && faults.length === 0; ) {
      for (let due = this.#dueMs[next]; due !== undefined && due <= this.nowMs; due = this.#dueMs[++next]) {
        const push: Promise<void> = this.#push(next, due)
          .catch((fault: unknown) => void faults.push(fault))
          .finally(() => underWay.delete(push))
        underWay.add(push)
      }
      await delay(tickMs)
    }
    await Promise.all(underWay)
    if (faults.length > 0) throw faults[0]
  }

  leave(): void {
    for (const connection of this.#all) connection.leave()
  }

  async #push(request: number, due: number): Promise<void> {
    const { shape, first, taking } = this.#flow
    const connection = this.#freeOne() ?? (await this.#another(taking.origin))
    this.lagMs.push(this.nowMs - due)
    const { status, body } = await connection.post(pushPath, pushBody(shape, { first }, request))
    this.answeredMs.push(this.nowMs - due)
    const next = this.#waiting.shift()
    if (next === undefined) this.#free.push(connection)
    else next(connection)
    if (status === 201) this.pushed += shape.items
    else if (status === 202) {
      this.pushed += shape.items
      this.queued += shape.items
    } else if (status === 429 || status === 503) this.refused += shape.items
    else throw new Error(`a push was answered ${status}: ${body.slice(0, 500)}`)
  }

  /** The one that has been idle for longest: a server closes those that are never used. */
  #freeOne(): MessageConnection | undefined {
    for (let free = this.#free.shift(); free !== undefined; free = this.#free.shift()) {
      if (free.isOpen) return free
      this.#opened--
    }
    return undefined
  }

  async #another(origin: string): Promise<MessageConnection> {
    if (this.#opened >= connectionsMax) return new Promise((resolve) => this.#waiting.push(resolve))
    this.#opened++
    const made = await MessageConnection.open(origin)
    this.#all.push(made)
    return made
  }
}

export async function flow(options: Flow): Promise<Flowed> {
  const { requestsPerSecond: ratePerSecond, seconds, warmUpSeconds, taking } = options
  const dueMs = poissonArrivals({ ratePerSecond, seconds, seed: 1 })
  const producers = new Producers(options, await MessageConnection.openAll(taking.origin, connectionsAtOnce), dueMs)
  const receivedMs: number[] = []
  let received = 0
  let receivedDuring = 0
  const consumers = new Consumers(taking, (n) => {
    received++
    if (producers.nowMs <= seconds * 1_000) receivedDuring++
    const due = producers.dueOf(n)
    if (due >= warmUpSeconds * 1_000) receivedMs.push(producers.nowMs - due)
  })
  const cpu = process.cpuUsage()
  const consuming = consumers.run()
  try {
    // Whichever fails ends it.
    await Promise.race([producers.run(), consuming.then(() => Promise.reject(new Error('the consumers ended first')))])
    const deadline = performance.now() + patienceMs
    const expected = producers.pushed * taking.groups.length
    while (received < expected && performance.now() < deadline) await delay(tickMs)
  } finally {
    producers.leave()
    consumers.stop()
  }
  await consuming
  const { user, system } = process.cpuUsage(cpu)
  const spread = (values: readonly number[]): Spread => spreadOf(Float64Array.from(values))
  return {
    ...{ pushed: producers.pushed, queued: producers.queued, refused: producers.refused },
    ...{ received, receivedDuring, twice: consumers.twice },
    receivedMs: spread(receivedMs),
    answeredMs: spread(producers.answeredMs),
    lagMs: spread(producers.lagMs),
    cores: (user + system) / 1_000 / producers.nowMs,
  }
}
