/**
 * Submissions over hand-written HTTP, as a general client would cost as much as the server under test.
 *
 *   open loop    each leaves when it is due, whatever became of those before, and its time counts from then
 *   closed loop  each connection sends the next one when it is answered
 */
import { poissonArrivals } from '../overload-arrivals.js'
import { type Answer, Connection } from '../overload-connection.js'
import { deadlineMs, type Spread, spreadOf } from '../overload-wire.js'
import { petitionBody, petitionsPath, submitterPrefix } from './petition-body.js'

export interface Offer {
  readonly host: string
  readonly port: number
  /** Open before it begins. */
  readonly connections: number
  /** An open loop opens more if it needs them, up to this limit. */
  readonly connectionsMax: number
  readonly seconds: number
  /** Null: a closed loop. */
  readonly ratePerSecond: number | null
  /** An `Idempotency-Key` of its own for each. */
  readonly keyed: boolean
}

export interface Offered {
  /** From the first to the last answer. */
  readonly seconds: number
  readonly due: number
  readonly accepted: number
  readonly acceptedMs: Spread
  /** By the problem's code. */
  readonly refused: Readonly<Record<string, number>>
  readonly refusedMs: Spread
  /** No answer within the deadline, a connection that was lost, or none to be had. */
  readonly unanswered: number
  /** How late the generator itself was. */
  readonly lagMs: Spread
  /** Share of one core that the generator used. */
  readonly cores: number
}

const connectingAtOnce = 64
const codePattern = /"code":"(\w+)"/

export class Offering {
  readonly #offer: Offer
  readonly #prefix = submitterPrefix()
  readonly #all = new Set<Connection>()
  readonly #free: Connection[] = []
  readonly #dueAt: number[] = []
  readonly #lagMs: number[] = []
  readonly #acceptedMs: number[] = []
  readonly #refusedMs: number[] = []
  readonly #refused: Record<string, number> = {}
  #startedAt = 0
  #underWay = 0
  #unanswered = 0
  #allSent = false
  #finish: () => void = () => undefined

  constructor(offer: Offer) {
    this.#offer = offer
  }

  async run(): Promise<Offered> {
    const { seconds, ratePerSecond } = this.#offer
    await this.#open()
    const cpu = process.cpuUsage()
    this.#startedAt = performance.now()
    const lastAnswer = new Promise<void>((resolve) => {
      this.#finish = resolve
    })
    const patience = setTimeout(() => this.#finish(), seconds * 1_000 + deadlineMs)
    if (ratePerSecond === null) for (const connection of this.#free.splice(0)) this.#sendAgain(connection)
    else this.#sendDue(poissonArrivals({ ratePerSecond, seconds, seed: 1 }), 0)
    await lastAnswer
    clearTimeout(patience)
    const elapsedMs = performance.now() - this.#startedAt
    const { user, system } = process.cpuUsage(cpu)
    for (const connection of this.#all) connection.leave()
    const spread = (values: readonly number[]): Spread => spreadOf(Float64Array.from(values))
    return {
      seconds: elapsedMs / 1_000,
      due: this.#dueAt.length,
      accepted: this.#acceptedMs.length,
      acceptedMs: spread(this.#acceptedMs),
      refused: this.#refused,
      refusedMs: spread(this.#refusedMs),
      unanswered: this.#unanswered + this.#underWay,
      lagMs: spread(this.#lagMs),
      cores: (user + system) / 1_000 / elapsedMs,
    }
  }

  /** Some at a time: a connection that finds the listen queue full is retried only after a second. */
  async #open(): Promise<void> {
    while (this.#free.length < this.#offer.connections) {
      const missing = this.#offer.connections - this.#free.length
      const opening = Array.from({ length: Math.min(missing, connectingAtOnce) }, () => this.#connect())
      await Promise.all(opening.map((connection) => connection.settled))
      const open = opening.filter((connection) => connection.isOpen)
      if (open.length === 0) throw new Error(`nobody listens on ${this.#offer.host}:${this.#offer.port}`)
      this.#free.push(...open)
    }
  }

  #connect(): Connection {
    const made = new Connection(this.#offer, {
      answered: (connection, index, answer) => this.#answered(connection, index, answer),
      closed: (connection, index) => {
        this.#all.delete(connection)
        if (index < 0) return
        this.#unanswered++
        this.#ended()
      },
    })
    this.#all.add(made)
    return made
  }

  #now(): number {
    return performance.now() - this.#startedAt
  }

  #sendDue(arrivals: Float64Array, from: number): void {
    let next = from
    for (let due = arrivals[next]; due !== undefined && due <= this.#now(); due = arrivals[++next]) {
      const connection = this.#freeConnection()
      if (connection !== undefined) this.#send(connection, due)
      else {
        this.#dueAt.push(due)
        this.#unanswered++
      }
    }
    if (next < arrivals.length) return void setTimeout(() => this.#sendDue(arrivals, next), 1)
    this.#allSent = true
    if (this.#underWay === 0) this.#finish()
  }

  /** The one that has been idle for longest: a server closes those that are never used. */
  #freeConnection(): Connection | undefined {
    for (let free = this.#free.shift(); free !== undefined; free = this.#free.shift()) if (free.isOpen) return free
    return this.#all.size >= this.#offer.connectionsMax ? undefined : this.#connect()
  }

  #sendAgain(connection: Connection): void {
    if (this.#now() < this.#offer.seconds * 1_000) this.#send(connection, this.#now())
    else this.#allSent = true
  }

  #send(connection: Connection, due: number): void {
    const index = this.#dueAt.push(due) - 1
    this.#lagMs.push(this.#now() - due)
    this.#underWay++
    const body = petitionBody(this.#prefix, index)
    const text = JSON.stringify(body)
    const { host, port, keyed } = this.#offer
    connection.send(
      index,
      `POST ${petitionsPath} HTTP/1.1\r\nhost: ${host}:${port}\r\ncontent-type: application/json\r\n` +
        `${keyed ? `idempotency-key: ${body.submitter_id}\r\n` : ''}content-length: ${text.length}\r\n\r\n${text}`,
    )
  }

  #answered(connection: Connection, index: number, { status, body }: Answer): void {
    const tookMs = this.#now() - (this.#dueAt[index] ?? 0)
    if (status === 201) this.#acceptedMs.push(tookMs)
    else {
      const code = codePattern.exec(body)?.[1] ?? String(status)
      this.#refused[code] = (this.#refused[code] ?? 0) + 1
      this.#refusedMs.push(tookMs)
    }
    if (this.#offer.ratePerSecond === null) this.#sendAgain(connection)
    else this.#free.push(connection)
    this.#ended()
  }

  #ended(): void {
    this.#underWay--
    if (this.#allSent && this.#underWay === 0) this.#finish()
  }
}
