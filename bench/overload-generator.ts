/**
 * The clients: an open loop. Orders go out when they are due, whatever became of those before; an order's time counts
 * from when it was due; a client that has no answer by its deadline leaves.
 *
 *   due ──no connection left──► no connection
 *    └──sent──► answered (a status) │ timed out (the client leaves) │ connection lost
 */
import { poissonArrivals } from './overload-arrivals.js'
import { type Answer, Connection } from './overload-connection.js'
import {
  connectionsAtOnce,
  connectionsMax,
  deadlineMs,
  type EffectsReport,
  type Spread,
  type StepReport,
  type StepRequest,
  spreadOf,
} from './overload-wire.js'

/** Outcomes that are no HTTP status. */
const outcome = { due: 0, sent: 1, timedOut: 2, connectionLost: 3, noConnection: 4, wrongResult: 5 } as const
const retryAfterPattern = /\r\nretry-after: *(\d+)(?:\r\n|$)/i
const sweepMs = 20
const connectingAtOnce = 100
/** Customers are many, so that hardly ever two orders of one are under way at once. */
const customers = 100_000

/** One step of offered load, from its first order to its last answer. */
export class Step {
  readonly #request: StepRequest
  readonly #dueAt: Float64Array
  readonly #outcomes: Uint16Array
  readonly #tookMs: Float64Array
  readonly #lagMs: Float64Array
  readonly #retryAfter: number[] = []
  readonly #under: (Connection | undefined)[]
  readonly #free: Connection[] = []
  readonly #all = new Set<Connection>()
  #startedAt = 0
  #next = 0
  #oldest = 0
  #unanswered = 0
  #withoutRetryAfter = 0
  #finished: (() => void) | undefined

  constructor(request: StepRequest) {
    this.#request = request
    this.#dueAt = poissonArrivals(request)
    const count = this.#dueAt.length
    this.#outcomes = new Uint16Array(count)
    this.#tookMs = new Float64Array(count)
    this.#lagMs = new Float64Array(count)
    this.#under = new Array<Connection | undefined>(count)
  }

  get count(): number {
    return this.#dueAt.length
  }

  async run(): Promise<StepReport> {
    await this.#openFirst()
    const cpu = process.cpuUsage()
    this.#startedAt = performance.now()
    const sweep = setInterval(() => this.#giveUpLate(), sweepMs)
    this.#sendDue()
    await new Promise<void>((resolve) => {
      this.#finished = resolve
    })
    clearInterval(sweep)
    for (const connection of this.#all) connection.leave()
    const { user, system } = process.cpuUsage(cpu)
    return this.#report((user + system) / 1_000 / (performance.now() - this.#startedAt))
  }

  /** `done`: how often the downstream did each order of this step. */
  compare(done: Uint8Array): EffectsReport {
    const report = { lostDone: 0, queuedUndone: 0, queued: 0, doneTwice: 0, wasted: 0 }
    for (let i = 0; i < this.count; i++) {
      const result = this.#outcomes[i]
      const times = done[i] ?? 0
      if (times > 1) report.doneTwice++
      if (result === 202) report.queued++
      if ((result === 200 || result === 201) && times === 0) report.lostDone++
      else if (result === 202 && times === 0) report.queuedUndone++
      else if (times > 0 && result !== 200 && result !== 201 && result !== 202) report.wasted++
    }
    return report
  }

  #sendDue(): void {
    const now = performance.now() - this.#startedAt
    for (; this.#next < this.count; this.#next++) {
      const due = this.#dueAt[this.#next] ?? 0
      if (due > now) break
      this.#send(this.#next, due)
    }
    if (this.#next < this.count) setTimeout(() => this.#sendDue(), 1)
    else this.#endIfAnswered()
  }

  #send(index: number, due: number): void {
    const connection = this.#freeConnection()
    if (connection === undefined) {
      this.#outcomes[index] = outcome.noConnection
      return
    }
    this.#lagMs[index] = performance.now() - this.#startedAt - due
    this.#outcomes[index] = outcome.sent
    this.#under[index] = connection
    this.#unanswered++
    connection.send(index, this.#orderRequest(this.#request.first + index))
  }

  /** Some at a time: a connection that finds the door's listen queue full is retried only after a second. */
  async #openFirst(): Promise<void> {
    while (this.#free.length < connectionsAtOnce) {
      const opening = Array.from({ length: connectingAtOnce }, () => this.#connect())
      await Promise.all(opening.map((connection) => connection.settled))
      const open = opening.filter((connection) => connection.isOpen)
      if (open.length === 0) throw new Error(`nobody listens on ${this.#request.host}:${this.#request.port}`)
      this.#free.push(...open)
    }
  }

  /** The one that has been idle for longest: a server closes those that are never used. */
  #freeConnection(): Connection | undefined {
    for (let free = this.#free.shift(); free !== undefined; free = this.#free.shift()) if (free.isOpen) return free
    return this.#all.size >= connectionsMax ? undefined : this.#connect()
  }

  #connect(): Connection {
    const made = new Connection(this.#request, {
      answered: (connection, index, answer) => this.#answered(connection, index, answer),
      closed: (connection, index) => {
        this.#all.delete(connection)
        if (index >= 0) this.#end(index, outcome.connectionLost)
      },
    })
    this.#all.add(made)
    return made
  }

  #orderRequest(number: number): string {
    const customer = `c${100_000 + ((number * 7_919) % customers)}`
    const body = `{"n":${number},"customer":"${customer}","item":"a book about dams"}`
    const { host, port } = this.#request
    return (
      `POST /orders HTTP/1.1\r\nHost: ${host}:${port}\r\nX-Customer: ${customer}\r\n` +
      `Content-Type: application/json\r\nContent-Length: ${body.length}\r\n\r\n${body}`
    )
  }

  #answered(connection: Connection, index: number, { status, head, body }: Answer): void {
    this.#free.push(connection)
    const isDone = status === 200 || status === 201
    const isRight = !isDone || body.includes(`"n":${this.#request.first + index},`)
    if (status >= 400) {
      const seconds = retryAfterPattern.exec(head)?.[1]
      if (seconds === undefined) this.#withoutRetryAfter++
      else this.#retryAfter.push(Number(seconds))
    }
    this.#end(index, isRight ? status : outcome.wrongResult)
  }

  #end(index: number, result: number): void {
    const took = performance.now() - this.#startedAt - (this.#dueAt[index] ?? 0)
    this.#tookMs[index] = took
    // An answer between two sweeps, but after the deadline, came for nobody.
    this.#outcomes[index] = took > deadlineMs ? outcome.timedOut : result
    this.#under[index] = undefined
    this.#unanswered--
    this.#endIfAnswered()
  }

  #endIfAnswered(): void {
    if (this.#next >= this.count && this.#unanswered === 0) this.#finished?.()
  }

  /** Orders are due in order, so it is enough to look at the oldest unanswered ones. */
  #giveUpLate(): void {
    const late = performance.now() - this.#startedAt - deadlineMs
    for (; this.#oldest < this.#next && (this.#dueAt[this.#oldest] ?? 0) < late; this.#oldest++) {
      const connection = this.#under[this.#oldest]
      if (connection === undefined) continue
      connection.leave()
      this.#all.delete(connection)
      this.#end(this.#oldest, outcome.timedOut)
    }
  }

  #report(cores: number): StepReport {
    const count = (wanted: number): number =>
      this.#outcomes.reduce((sum, result) => sum + (result === wanted ? 1 : 0), 0)
    const spread = (values: Float64Array, isWanted: (result: number) => boolean): Spread =>
      spreadOf(values.filter((_, index) => isWanted(this.#outcomes[index] ?? 0)))
    const byStatus: Record<string, number> = {}
    for (const result of this.#outcomes) if (result >= 100) byStatus[result] = (byStatus[result] ?? 0) + 1
    const wrong = count(outcome.wrongResult)
    if (wrong > 0) throw new Error(`${wrong} answers had the result of another order`)
    const noConnection = count(outcome.noConnection)
    const isGood = (result: number): boolean => result === 200 || result === 201
    const goodMs = spread(this.#tookMs, isGood)
    const endsAt = this.#request.seconds * 1_000
    const goodDuring = this.#dueAt.filter(
      (due, index) => isGood(this.#outcomes[index] ?? 0) && due + (this.#tookMs[index] ?? 0) <= endsAt,
    ).length
    return {
      due: this.count,
      sent: this.count - noConnection,
      lagMs: spread(this.#lagMs, (result) => result !== outcome.noConnection),
      cores,
      good: goodMs.count,
      goodDuring,
      goodMs,
      byStatus,
      refusedMs: spread(this.#tookMs, (result) => result >= 300),
      withoutRetryAfter: this.#withoutRetryAfter,
      retryAfterSeconds: spreadOf(Float64Array.from(this.#retryAfter)),
      timedOut: count(outcome.timedOut),
      connectionLost: count(outcome.connectionLost),
      noConnection,
    }
  }
}
