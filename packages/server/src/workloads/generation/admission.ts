/**
 * Decides how to accept a generation: at once in this process (a permit and a slot are free), through the queue, or
 * not now.
 *
 *   asked ──pool──► permit ──submit──► runs here                        1-Direct
 *             │                └────► no slot here: queued, permit released    3-Queue-Failover
 *             └──► none ──waiting room──► queued in one of the user's lanes    3-Queue-Failover
 *                              └──► full, or no failover: refused
 *
 * A permit belongs to this process: it is released after the generation has run here, and lost with the process.
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
import type { GenerationDeps } from './index.js'
import { type FailoverReason, poolStateOf } from './metrics.js'
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
  /** It has a permit of the pool; else it is queued. */
  direct: boolean
  /** It runs in this process. */
  here: boolean
  replayed: boolean
  position: number
  etaMs: number
  /** Limit until the first token; null if it did not have to wait. */
  waitMs: number | null
  /** It no longer waits: releases its permit of the waiting room. */
  leaveRoom(): void
}

export interface Refused {
  ok: false
  problem: Problem
}

export class Admission {
  readonly #deps: GenerationDeps
  readonly #definition: Definition<Generation>
  readonly #pool: ConnectionPool
  readonly #room: ConnectionPool
  #turn = Math.floor(Math.random() * 1_000)

  constructor(deps: GenerationDeps, definition: Definition<Generation>) {
    const { intake, settings } = deps
    const { poolPerUser, poolGlobal, failoverDepthMax: depth } = settings
    this.#deps = deps
    this.#definition = definition
    this.#pool = intake.pool({ name: 'generation', perIdentity: poolPerUser, total: poolGlobal })
    this.#room = intake.pool({ name: 'generation.waiting', perIdentity: depth, total: depth })
  }

  /** As of the last heartbeat, over all instances. */
  get waiting(): number {
    return this.#room.held
  }

  get poolState(): number {
    return poolStateOf(this.#pool.held, this.#pool.total)
  }

  async admit(asked: Asked): Promise<Admitted | Refused> {
    const { intake, settings } = this.#deps
    const taken = await this.#pool.take(asked.identity)
    let reason: FailoverReason = taken === 'identity_full' ? 'user_limit' : 'pool_full'
    if (typeof taken === 'object') {
      // Without a slot it would wait in a separate lane and bypass its user's limit. Under concurrent requests some may
      // find the last slot taken.
      if (intake.hasSlot(this.#definition)) return this.#direct(asked, taken)
      taken.release()
      reason = 'no_slot'
    }
    if (settings.failoverEnabled) return this.#queue(asked, reason)
    if (reason !== 'user_limit') return refused(noConnection)
    return refused({
      code: 'connection_limit',
      detail: `At most ${settings.poolPerUser} generations of one user run at once. Try again when one has ended.`,
      retryAfterMs: roomRetryMs,
    })
  }

  /** The caller gets a refusal, so the operation must not run and its key stays free. */
  async takeBack(id: string, asked: Asked, why: string): Promise<void> {
    await this.#deps.intake.cancel(id, why)
    await this.forgetKey(id, asked)
  }

  async forgetKey(operationId: string, { identity, idempotencyKey: key }: Asked): Promise<void> {
    if (key !== undefined) await this.#deps.intake.forgetKey(this.#definition, { identity, key, operationId })
  }

  async #direct(asked: Asked, permit: Permit): Promise<Admitted | Refused> {
    const place = randomUUID()
    this.#deps.permits.set(place, permit)
    const waitMs = this.#waitMs(asked)
    const submitted = await this.#submit(asked, { lane: place, place, waitMs }).catch((fault: unknown) => {
      releasePermit(this.#deps, place)
      throw fault
    })
    if (submitted.ok && submitted.here) return { ...submitted, direct: true }
    releasePermit(this.#deps, place)
    if (!submitted.ok || submitted.replayed || !submitted.isQueued) return submitted
    const { id } = submitted
    if (!this.#deps.settings.failoverEnabled) {
      await this.takeBack(id, asked, 'there is no slot, and failover is off')
      return refused(noConnection)
    }
    const room = await this.#room.take(asked.identity)
    if (typeof room !== 'object') {
      await this.takeBack(id, asked, 'the waiting room is full')
      return refused(roomFull)
    }
    this.#deps.metrics.failedOver('no_slot')
    return { ...submitted, waitMs, leaveRoom: () => room.release() }
  }

  async #queue(asked: Asked, reason: FailoverReason): Promise<Admitted | Refused> {
    const lanes = this.#shortestLane(asked.identity)
    // Both start at once; without a permit of the room the lane is not needed.
    lanes.catch(() => undefined)
    const room = await this.#room.take(asked.identity)
    if (typeof room !== 'object') return refused(roomFull)
    const waitMs = this.#waitMs(asked)
    const leaveRoom = (): void => room.release()
    try {
      const submitted = await this.#submit(asked, { lane: await lanes, place: null, waitMs })
      if (!submitted.ok || submitted.replayed) {
        leaveRoom()
        return submitted
      }
      if (submitted.here) leaveRoom()
      this.#deps.metrics.failedOver(reason)
      const { id, etaMs } = submitted
      // Refuses now instead of making a promise it cannot keep.
      if (asked.patienceMs !== null && etaMs > asked.patienceMs) {
        await this.takeBack(id, asked, 'it would wait longer than its caller does')
        leaveRoom()
        const detail = 'It would take longer than you wait until this generation begins. Try again later.'
        return refused({ code: 'overloaded', detail, retryAfterMs: Math.max(roomRetryMs, etaMs) })
      }
      return { ...submitted, waitMs, leaveRoom }
    } catch (fault) {
      leaveRoom()
      throw fault
    }
  }

  async #submit(
    asked: Asked,
    of: Pick<Generation, 'lane' | 'place' | 'waitMs'>,
  ): Promise<(Admitted & { isQueued: boolean }) | Refused> {
    const { intake } = this.#deps
    const { format, chat, stream, usage, threadId, identity, traceparent, keyedOn, idempotencyKey } = asked
    const patienceMs = stream ? null : asked.patienceMs
    const generation = { format, chat, stream, usage, threadId, patienceMs, watcher: intake.instance, ...of }
    const options = {
      identity,
      traceparent,
      keyedOn,
      ...(idempotencyKey !== undefined && { idempotencyKey }),
      waitMs: 0,
    }
    const answer = await intake.submit(this.#definition, generation, options)
    if (answer.kind === 'refused') return refused(problemOf(answer.refusal))
    const { operationId: id, replayed } = answer
    const isQueued = answer.kind === 'queued'
    const here = isQueued && answer.reason === 'still_running' && !replayed
    const waiting = isQueued ? { position: answer.position, etaMs: answer.waitMs } : { position: 0, etaMs: 0 }
    return {
      ok: true,
      id,
      replayed,
      isQueued,
      here,
      direct: false,
      ...waiting,
      waitMs: null,
      leaveRoom: () => undefined,
    }
  }

  #waitMs({ patienceMs }: Asked): number {
    const timeoutMs = this.#deps.settings.failoverTimeoutSeconds * 1_000
    return patienceMs === null ? timeoutMs : Math.min(timeoutMs, patienceMs)
  }

  /** A user has as many lanes as it may have connections, so that this many of its queued generations run at once. */
  async #shortestLane(identity: string): Promise<string> {
    const name = identity.length <= identityCharactersMax ? identity : digestUuid(identity)
    const partitions = Array.from({ length: this.#deps.settings.poolPerUser }, (_, n) => `${name}#${n}`)
    const depths = await this.#deps.intake.lanes.depths(partitions.map((partition): LaneName => [queueName, partition]))
    const least = Math.min(...depths)
    // Round robin among equals: concurrent requests see the same depths.
    const shortest = partitions.filter((_, n) => depths[n] === least)
    return shortest[this.#turn++ % shortest.length] ?? `${name}#0`
  }
}

/** The generation with this permit has run, or will not run here. */
export function releasePermit({ permits }: GenerationDeps, name: string): void {
  permits.get(name)?.release()
  permits.delete(name)
}

const noConnection: Problem = {
  code: 'overloaded',
  detail: 'All connections are taken. Try again later.',
  retryAfterMs: roomRetryMs,
}

const roomFull: Problem = {
  code: 'overloaded',
  detail: 'As many generations wait as may. Try again later.',
  retryAfterMs: roomRetryMs,
}

function refused(problem: Problem): Refused {
  return { ok: false, problem }
}

/** A full queue is our capacity limit, not the caller's quota. */
function problemOf(refusal: Refusal): Problem {
  return refusal.code === 'queue_full' ? { ...refusal, code: 'overloaded' } : refusal
}
