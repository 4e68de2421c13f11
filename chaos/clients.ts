/**
 * The callers. Each numbers its operations and sends them one after the other: the next number only when the one before is
 * certain, that is answered, or tried again with the same Idempotency-Key until it was.
 */
import { setMaxListeners } from 'node:events'
import { setTimeout as delay } from 'node:timers/promises'
import { Agent } from 'undici'
import { hasFailed, isRecord, messageIdOf, operationIdOf } from './answer-body.js'
import { call, callAndRecord } from './call.js'
import { now, pause } from './clock.js'
import { type Chance, chance } from './random.js'
import type { Read, Submitted, Try } from './records.js'
import type { Slot } from './slot.js'
import {
  attemptMaxMs,
  type Behaviour,
  behaviourOf,
  idempotencyKey,
  type Lane,
  petitionText,
  queueName,
  retriesMax,
  type Temper,
  transactionIdOf,
} from './workload.js'

export interface ClientsOptions {
  seed: number
  lanes: readonly Lane[]
  temper: Temper
  slots: readonly Slot[]
  sinkOrigin: string
  /** Operations per second that all clients together aim at. */
  rate: number
  deadlineMs: number
  /** Each entry is handed over once, when it is complete. */
  note(kind: 'try' | 'read', entry: Try | Read): void
}

/** Retry-After is obeyed in shortened form, to keep the run short; that it is there is checked. */
const retryAfterCapMs = 250
const againMsMin = 5
const againMsMax = 60
/** A client that fell behind its pace does not make up for more than this. */
const behindMsMax = 2_000
const burstShare = 0.12
const burstMax = 12

export class Clients {
  readonly submitted: Submitted[] = []
  readonly tries: Try[] = []
  readonly reads: Read[] = []
  /** The processes that have accepted something. */
  readonly acceptors = new Set<number>()
  readonly #o: ClientsOptions
  readonly #agent = new Agent({ connections: 64, pipelining: 1, connect: { timeout: 2_000 } })
  /** No new numbers. */
  readonly #finishing = new AbortController()
  /** Nothing any more, certain or not. */
  readonly #closing = new AbortController()
  readonly #all: Promise<void>[]
  #accepted = 0

  /** They begin at once. */
  constructor(options: ClientsOptions) {
    this.#o = options
    // Every client waits on it.
    setMaxListeners(0, this.#finishing.signal)
    this.#all = options.lanes.flatMap((lane) => {
      let last = 0
      const numbers = (): number | null => (lane.numbersMax !== undefined && last >= lane.numbersMax ? null : ++last)
      return Array.from({ length: lane.clients }, (_, i) => this.#work(lane, i, numbers))
    })
  }

  get accepted(): number {
    return this.#accepted
  }

  /** No new numbers from here on; resolves when every one that was begun is certain. */
  async finish(): Promise<void> {
    this.#finishing.abort()
    await Promise.all(this.#all)
  }

  async close(): Promise<void> {
    this.#closing.abort()
    this.#finishing.abort()
    await this.#agent.destroy()
    await Promise.all(this.#all)
  }

  /** One client: number after number, at its pace. */
  async #work(lane: Lane, client: number, numbers: () => number | null): Promise<void> {
    const luck = chance(this.#o.seed, `client ${lane.name} ${client}`)
    const everyMs = (this.#o.lanes.length * lane.clients * 1_000) / this.#o.rate
    const { signal } = this.#finishing
    let due = Date.now() + luck.next() * everyMs
    let burst = 0
    while (!signal.aborted) {
      const n = numbers()
      if (n === null) return
      await this.#submit(lane, n, luck)
      // Now and then several at once, as fast as they are answered: lanes that are deeper than one.
      if (burst > 0) {
        burst--
        continue
      }
      if (luck.happens(burstShare)) burst = luck.between(2, burstMax)
      due = Math.max(due + everyMs * (1 + burst * 0.9), Date.now() - behindMsMax)
      const waitMs = due - Date.now()
      if (waitMs > 0) await pause(waitMs, signal)
    }
  }

  /** Until it is certain what became of it. */
  async #submit(lane: Lane, n: number, luck: Chance): Promise<void> {
    const b = behaviourOf(this.#o.seed, lane, n, this.#o.temper)
    const { route, poison, token, keyed } = b
    const entry: Submitted = {
      ...{ lane: lane.name, n, route, poison, token, keyed },
      ...{ firstSentAt: now(), certainAt: null, operationId: null, messageId: null },
      ...{ refused: false, abandoned: false, moved: false },
    }
    this.submitted.push(entry)
    let { cutAfterMs } = b
    for (let againMs = againMsMin; !this.#closing.signal.aborted; againMs = Math.min(againMsMax, againMs * 2)) {
      const able = this.#o.slots.filter((slot) => slot.routes.has(route) && slot.origin !== null)
      if (able.length > 0) {
        const made = await this.#try(luck.pick(able), lane, n, b, cutAfterMs)
        cutAfterMs = null
        this.tries.push(made)
        this.#o.note('try', made)
        if (isAccepted(made)) {
          entry.certainAt = made.endedAt
          entry.operationId = operationIdOf(made.body)
          if (route === 'push' && (keyed || made.status === 201)) entry.messageId = messageIdOf(made.body)
          this.#accepted++
          this.acceptors.add(made.pid)
          if (b.reads && entry.operationId !== null) await this.#read(entry.operationId, lane, n, luck.pick(able))
          // What was queued is perhaps not there yet.
          if (b.moves && made.status === 201) entry.moved = await this.#move(entry.operationId, luck.pick(able))
          return
        }
        if (isFinal(made) || !b.repeated) {
          entry.refused = made.code === 'rate_limited'
          entry.abandoned = !b.repeated
          return
        }
        if (made.retryAfter !== undefined) againMs = Math.min(Number(made.retryAfter) * 1_000 || 0, retryAfterCapMs)
      }
      await delay(againMs * (0.5 + luck.next()))
    }
  }

  /** One request, and what became of it. */
  async #try(slot: Slot, lane: Lane, n: number, b: Behaviour, cutAfterMs: number | null): Promise<Try> {
    const options = {
      agent: this.#agent,
      method: 'POST',
      ...requestOf(lane, n, b, this.#o.sinkOrigin),
      headers: {
        ...(b.keyed && { 'idempotency-key': idempotencyKey(lane.name, n) }),
        'x-user-id': lane.name,
        ...(b.prefer !== null && { prefer: b.prefer }),
      },
    } as const
    const made = await callAndRecord(slot, options, { deadlineMs: this.#o.deadlineMs, cutAfterMs })
    return { lane: lane.name, n, ...made }
  }

  /** Whether it was answered that it is done; if not, it may be all the same. */
  async #move(petition: string | null, slot: Slot): Promise<boolean> {
    try {
      // Without a name: an operator, where nobody is authenticated.
      const { status } = await call(slot, {
        agent: this.#agent,
        method: 'POST',
        path: `${petitionsPath}/${petition}/transitions`,
        body: { to: 'ACKNOWLEDGED', reason: 'chaos' },
        signal: AbortSignal.timeout(this.#o.deadlineMs),
      })
      return status === 200
    } catch {
      // The process was ended under the request. Only what is answered can be wrong.
      return false
    }
  }

  async #read(operationId: string, lane: Lane, n: number, slot: Slot): Promise<void> {
    try {
      const { status, body } = await call(slot, {
        agent: this.#agent,
        method: 'GET',
        path: `/api/v1/operations/${operationId}`,
        headers: { 'x-user-id': lane.name },
        signal: AbortSignal.timeout(this.#o.deadlineMs),
      })
      const state = isRecord(body) && typeof body.status === 'string' ? body.status : null
      const seen: Read = { lane: lane.name, n, operationId, slot: slot.name, at: now(), status, state }
      this.reads.push(seen)
      this.#o.note('read', seen)
    } catch {
      // The process was ended under the request. Only what is answered can be wrong.
    }
  }
}

const petitionsPath = '/api/v1/petition-submissions'

const isAccepted = (made: Try): boolean =>
  made.end === 'answered' && made.status !== undefined && (made.status < 300 || hasFailed(made))

/** Not answered by waiting: a quota that is used up, or an answer that should not be (the checker says so). */
function isFinal(made: Try): boolean {
  if (made.end !== 'answered' || made.status === undefined) return false
  if (made.status === 429) return made.code === 'rate_limited'
  return made.status < 500 && made.status !== 409
}

function requestOf(lane: Lane, n: number, b: Behaviour, sinkOrigin: string): { path: string; body: unknown } {
  if (b.route === 'petition') {
    return { path: petitionsPath, body: { type: 'GENERAL', text: petitionText(lane.name, n), realm: queueName } }
  }
  const body = { lane: lane.name, n }
  if (b.route === 'push') {
    const item = { queue: queueName, partition: lane.name, transactionId: transactionIdOf(lane.name, n) }
    return { path: '/api/v1/push', body: { items: [{ ...item, payload: { ...body, token: b.token } }] } }
  }
  if (b.route !== 'forward') return { path: `/${b.route}`, body }
  return {
    path: '/api/v1/operations',
    body: {
      type: 'http.request',
      queue: queueName,
      partition: lane.name,
      max_retries: retriesMax,
      timeout_seconds: attemptMaxMs / 1_000,
      payload: { url: `${sinkOrigin}/forward`, body },
    },
  }
}
