/**
 * Decides how to accept a generation: at once in this process (a pool place and a slot are free), through the queue, or
 * not now.
 *
 *   asked ──pool──► place ──submit──► runs here                         1-Direct
 *             │                └────► no slot here: queued, place returned     3-Queue-Failover
 *             └──► none ──waiting room──► queued in one of the user's lanes    3-Queue-Failover
 *                              └──► full, or no failover: refused
 *
 * A place belongs to this process: it is returned after the generation has run here, and lost with the process.
 */
import { randomUUID } from 'node:crypto'
import type { Problem } from 'spillway/workload'
import {
  type ConnectionPool,
  type Definition,
  digestUuid,
  type LaneName,
  type Permit,
  type Refusal,
} from 'spillway/workload'
import type { GenerationDeps } from './parts.js'
import { poolStateOf } from './pool-state.js'
import type { Format, Generation } from './request.js'

export const queueName = 'spillway:generation'
/** Leaves room in the name for the lane's number. */
const identityCharactersMax = 240
const roomRetryMs = 5_000

export interface Asked {
  format: Format
  /** As JSON text. */
  chat: string
  /** The members that we read. */
  stream: boolean
  usage: boolean
  identity: string
  threadId: string
  idempotencyKey: string | undefined
  /** A repeated key must match this. */
  keyedOn: string
  traceparent: string
  /** How long the caller waits; null if unknown. */
  patienceMs: number | null
}

export interface Admitted {
  ok: true
  id: string
  layer: '1-Direct' | '3-Queue-Failover'
  /** It runs in this process. */
  here: boolean
  replayed: boolean
  place: number
  etaMs: number
  /** Limit until the first token; null if it did not have to wait. */
  waitMs: number | null
  /** It no longer waits: frees its place in the waiting room. */
  leaveRoom(): void
}

/** This process's places in the pool, by the names that generations carry. */
export interface Places {
  has(place: string): boolean
  giveBack(place: string): void
}

type FailoverReason = 'user_limit' | 'pool_full' | 'no_slot'

export class Admission {
  readonly #deps: GenerationDeps
  readonly #definition: Definition<Generation>
  readonly #pool: ConnectionPool
  readonly #room: ConnectionPool
  readonly #places = new Map<string, Permit>()
  #turn = Math.floor(Math.random() * 1_000)

  constructor(deps: GenerationDeps, define: (places: Places) => Definition<Generation>) {
    const { intake, settings } = deps
    this.#deps = deps
    this.#pool = intake.pool({ name: 'generation', ...settings.pool })
    const { depthMax } = settings.failover
    this.#room = intake.pool({ name: 'generation.waiting', perIdentity: depthMax, total: depthMax })
    this.#definition = define({ has: (place) => this.#places.has(place), giveBack: (place) => this.#giveBack(place) })
  }

  /** As of the last heartbeat, over all instances. */
  get waiting(): number {
    return this.#room.held
  }

  get poolState(): number {
    return poolStateOf(this.#pool.held, this.#pool.total)
  }

  async admit(asked: Asked): Promise<Admitted | { ok: false; problem: Problem }> {
    const taken = await this.#pool.take(asked.identity)
    let reason: FailoverReason = taken === 'identity_full' ? 'user_limit' : 'pool_full'
    if (typeof taken === 'object') {
      if (this.#hasSlot) return this.#direct(asked, taken)
      taken.release()
      reason = 'no_slot'
    }
    if (!this.#deps.settings.failover.enabled) return { ok: false, problem: this.#noFailover(reason) }
    return this.#queue(asked, reason)
  }

  /**
   * Without a slot it would wait in a separate lane and bypass its user's limit. Under concurrent requests some may
   * find the last slot taken.
   */
  get #hasSlot(): boolean {
    return this.#deps.intake.hasSlot(this.#definition)
  }

  /** The caller gets a refusal, so the operation must not run and its key stays free. */
  async takeBack(id: string, asked: Asked, why: string): Promise<void> {
    await this.#deps.intake.cancel(id, why)
    await this.forgetKey(id, asked)
  }

  async forgetKey(operationId: string, { identity, idempotencyKey: key }: Asked): Promise<void> {
    if (key !== undefined) await this.#deps.intake.forgetKey(this.#definition, { identity, key, operationId })
  }

  #noFailover(reason: FailoverReason): Problem {
    const { perIdentity } = this.#deps.settings.pool
    return reason === 'user_limit'
      ? {
          code: 'connection_limit',
          detail: `At most ${perIdentity} generations of one user run at once. Try again when one has ended.`,
          retryAfterMs: roomRetryMs,
        }
      : { code: 'overloaded', detail: 'All connections are taken. Try again later.', retryAfterMs: roomRetryMs }
  }

  async #direct(asked: Asked, permit: Permit): Promise<Admitted | { ok: false; problem: Problem }> {
    const place = randomUUID()
    this.#places.set(place, permit)
    const waitMs = this.#waitMs(asked)
    const generation = this.#generation(asked, { lane: place, place, waitMs })
    const answer = await this.#submit(generation, asked).catch((fault: unknown) => {
      this.#giveBack(place)
      throw fault
    })
    if (answer.kind === 'refused') {
      this.#giveBack(place)
      return { ok: false, problem: problemOf(answer.refusal) }
    }
    const here = answer.kind === 'queued' && answer.reason === 'still_running' && !answer.replayed
    if (here) return { ...admitted, id: answer.operationId, layer: '1-Direct', here, leaveRoom: nothing }
    this.#giveBack(place)
    const position = answer.kind === 'queued' ? { place: answer.place, etaMs: answer.waitMs } : {}
    const { operationId: id, replayed } = answer
    if (replayed || answer.kind !== 'queued') {
      return { ...admitted, ...position, id, layer: '3-Queue-Failover', here: false, replayed, leaveRoom: nothing }
    }
    if (!this.#deps.settings.failover.enabled) {
      await this.takeBack(id, asked, 'there is no slot, and failover is off')
      return { ok: false, problem: this.#noFailover('pool_full') }
    }
    const room = await this.#room.take(asked.identity)
    if (typeof room !== 'object') {
      await this.takeBack(id, asked, 'the waiting room is full')
      return { ok: false, problem: this.#roomFull() }
    }
    this.#deps.metrics.failedOver('no_slot')
    const leaveRoom = (): void => room.release()
    return { ...admitted, ...position, id, layer: '3-Queue-Failover', here: false, waitMs, leaveRoom }
  }

  async #queue(asked: Asked, reason: FailoverReason): Promise<Admitted | { ok: false; problem: Problem }> {
    const lanes = this.#shortestLane(asked.identity)
    // Both start at once; without a place in the room the lane is not needed.
    lanes.catch(() => undefined)
    const room = await this.#room.take(asked.identity)
    if (typeof room !== 'object') return { ok: false, problem: this.#roomFull() }
    const waitMs = this.#waitMs(asked)
    const leaveRoom = (): void => room.release()
    try {
      const lane = await lanes
      const answer = await this.#submit(this.#generation(asked, { lane, place: null, waitMs }), asked)
      if (answer.kind === 'refused') {
        leaveRoom()
        return { ok: false, problem: problemOf(answer.refusal) }
      }
      const { operationId: id, replayed } = answer
      const position = answer.kind === 'queued' ? { place: answer.place, etaMs: answer.waitMs } : {}
      const here = answer.kind === 'queued' && answer.reason === 'still_running' && !replayed
      if (replayed || here) leaveRoom()
      if (!replayed) {
        this.#deps.metrics.failedOver(reason)
        // Refuses now instead of making a promise it cannot keep.
        const isLate = position.etaMs !== undefined && asked.patienceMs !== null && position.etaMs > asked.patienceMs
        if (isLate) {
          await this.takeBack(id, asked, 'it would wait longer than its caller does')
          leaveRoom()
          return { ok: false, problem: this.#tooLong(position.etaMs ?? 0) }
        }
      }
      return {
        ...admitted,
        ...position,
        ...{ id, layer: '3-Queue-Failover', here, replayed, leaveRoom },
        waitMs: replayed ? null : waitMs,
      }
    } catch (fault) {
      leaveRoom()
      throw fault
    }
  }

  #generation(asked: Asked, of: Pick<Generation, 'lane' | 'place' | 'waitMs'>): Generation {
    const { format, chat, stream, usage, threadId } = asked
    const patienceMs = stream ? null : asked.patienceMs
    return { format, chat, stream, usage, threadId, patienceMs, watcher: this.#deps.intake.instance, ...of }
  }

  #submit(generation: Generation, asked: Asked) {
    return this.#deps.intake.submit(this.#definition, generation, {
      identity: asked.identity,
      traceparent: asked.traceparent,
      keyedOn: asked.keyedOn,
      ...(asked.idempotencyKey !== undefined && { idempotencyKey: asked.idempotencyKey }),
      waitMs: 0,
    })
  }

  #waitMs({ patienceMs }: Asked): number {
    const { timeoutMs } = this.#deps.settings.failover
    return patienceMs === null ? timeoutMs : Math.min(timeoutMs, patienceMs)
  }

  /** A user has as many lanes as it may have connections, so that this many of its queued generations run at once. */
  async #shortestLane(identity: string): Promise<string> {
    const name = identity.length <= identityCharactersMax ? identity : digestUuid(identity)
    const partitions = Array.from({ length: this.#deps.settings.pool.perIdentity }, (_, n) => `${name}#${n}`)
    const depths = await this.#deps.intake.laneDepths(partitions.map((partition): LaneName => [queueName, partition]))
    const least = Math.min(...depths)
    // Round robin among equals: concurrent requests see the same depths.
    const shortest = partitions.filter((_, n) => depths[n] === least)
    return shortest[this.#turn++ % shortest.length] ?? `${name}#0`
  }

  #giveBack(place: string): void {
    this.#places.get(place)?.release()
    this.#places.delete(place)
  }

  #roomFull(): Problem {
    return {
      code: 'overloaded',
      detail: 'As many generations wait as may. Try again later.',
      retryAfterMs: roomRetryMs,
    }
  }

  #tooLong(etaMs: number): Problem {
    return {
      code: 'overloaded',
      detail: 'It would take longer than you wait until this generation begins. Try again later.',
      retryAfterMs: Math.max(roomRetryMs, etaMs),
    }
  }
}

/** A full queue is our capacity limit, not the caller's quota. */
function problemOf(refusal: Refusal): Problem {
  return refusal.code === 'queue_full' ? { ...refusal, code: 'overloaded' } : refusal
}

const admitted = { ok: true, place: 0, etaMs: 0, replayed: false, waitMs: null } as const
function nothing(): void {}
