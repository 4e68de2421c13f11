/**
 * The queue as it should be: lanes are arrays, a lease is who holds a lane and up to where. Every command changes the
 * model and the store alike, and then both have to report the same.
 */
import { expect } from 'vitest'
import type { Claimed } from '../../src/store/port.js'
import { type OpenedStore, TestWorker } from '../conformance/harness.js'

export interface ModelOperation {
  id: string
  seq: number
  attempts: number
  maxAttempts: number
  /** On the model's clock, in milliseconds; 0: at once. */
  notBefore: number
  started: boolean
  /** Its number among all that were accepted into the lane at first, to check whether they take effect in order. */
  accepted: number
}

export interface ModelLane {
  name: string
  ops: ModelOperation[]
  head: number
  tail: number
  /** Up to here operations are handed out alone. */
  careful: number
  held: { by: ModelWorker; claimed: Claimed[] } | null
}

export interface ModelWorker {
  real: TestWorker
  alive: boolean
  recovered: boolean
  /** What it had when it was last heard of. */
  remembers: Claimed[]
}

export const leaseMs = 10_000
export const laneNames = ['a', 'b', 'c', 'd']
export const workerCount = 3
const clockStart = Date.parse('2026-01-01T00:00:00Z')

export class QueueModel {
  readonly opened: OpenedStore
  readonly lanes = new Map<string, ModelLane>(
    laneNames.map((name) => [name, { name, ops: [], head: 0, tail: 0, careful: 0, held: null }]),
  )
  readonly workers: ModelWorker[] = []
  readonly zombies: ModelWorker[] = []
  readonly keys = new Map<string, string>()
  readonly pauses = new Set<string>()
  readonly completed: string[] = []
  readonly cancelled: string[] = []
  /** By id, in the order of their acceptance. */
  readonly dead = new Map<string, { lane: ModelLane; op: ModelOperation }>()
  accepted = 0
  now = 0

  private constructor(opened: OpenedStore) {
    this.opened = opened
  }

  static async on(opened: OpenedStore): Promise<QueueModel> {
    const model = new QueueModel(opened)
    await model.setClock()
    while (model.workers.length < workerCount) await model.enlist()
    return model
  }

  async enlist(): Promise<void> {
    const real = await TestWorker.enlist(this.opened.store, leaseMs)
    this.workers.push({ real, alive: true, recovered: false, remembers: [] })
  }

  setClock(): Promise<void> {
    return this.opened.freeze(new Date(clockStart + this.now).toISOString())
  }

  lane(name: string): ModelLane {
    const lane = this.lanes.get(name)
    if (lane === undefined) throw new Error(`no lane ${name}`)
    return lane
  }

  isPaused(lane: ModelLane): boolean {
    return this.pauses.has('*') || this.pauses.has(lane.name)
  }

  isDue(op: ModelOperation): boolean {
    return op.notBefore <= this.now
  }

  heldBy(worker: ModelWorker): ModelLane[] {
    return [...this.lanes.values()].filter((lane) => lane.held?.by === worker)
  }

  find(id: string): { lane: ModelLane; op: ModelOperation } | undefined {
    for (const lane of this.lanes.values()) {
      const op = lane.ops.find((o) => o.id === id)
      if (op !== undefined) return { lane, op }
    }
    return undefined
  }

  /** The process's leases end: operations that surely ran are charged. */
  giveBack(worker: ModelWorker, charged: boolean): void {
    for (const lane of this.heldBy(worker)) {
      const upto = lane.held?.claimed.at(-1)?.seq ?? 0
      const [first] = lane.ops
      if (charged && first?.started === true) {
        first.attempts++
        if (first.attempts >= first.maxAttempts) this.bury(lane, first)
      }
      if (charged) lane.careful = Math.max(lane.careful, upto)
      for (const op of lane.ops) op.started = false
      lane.held = null
    }
  }

  bury(lane: ModelLane, op: ModelOperation): void {
    lane.ops = lane.ops.filter((o) => o !== op)
    lane.head = Math.max(lane.head, op.seq)
    this.dead.set(op.id, { lane, op })
  }

  /** Is the store what the model is? */
  async compare(): Promise<void> {
    const { store, sql } = this.opened
    expect(await store.audit()).toEqual([])
    const rows = await sql<{ partition: string; id: string; attempts: number; started: boolean }>(
      `SELECT l.partition, o.id, o.attempts, o.started_at IS NOT NULL AS started
       FROM ops o JOIN lanes l ON l.id = o.lane ORDER BY l.partition, o.seq`,
    )
    const expected = [...this.lanes.values()].flatMap((lane) =>
      lane.ops.map(({ id, attempts, started }) => ({ partition: lane.name, id, attempts, started })),
    )
    expect(rows).toEqual(expected)
    const ended = await sql<{ id: string; status: string }>('SELECT id, status FROM history ORDER BY id')
    expect(ended.filter((h) => h.status === 'completed').map((h) => h.id)).toEqual([...this.completed].sort())
    expect(ended.filter((h) => h.status === 'cancelled').map((h) => h.id)).toEqual([...this.cancelled].sort())
    const dead = await sql<{ id: string; attempts: number }>('SELECT id, attempts FROM dead_letters ORDER BY id')
    expect(dead).toEqual(
      [...this.dead.values()]
        .map(({ op }) => ({ id: op.id, attempts: op.attempts }))
        .sort((a, b) => (a.id < b.id ? -1 : 1)),
    )
    for (const { op } of this.dead.values()) expect(op.attempts).toBeLessThanOrEqual(op.maxAttempts)
  }
}
