import fc from 'fast-check'
import { expect } from 'vitest'
import type { Claimed, Settlement } from '../../src/store/port.js'
import { contextOf, executing, item, leaving, must, nobody, settlement } from '../conformance/harness.js'
import {
  laneNames,
  leaseMs,
  type ModelLane,
  type ModelOperation,
  type ModelWorker,
  type QueueModel,
  workerCount,
} from './queue-model.js'

/** The store is reached through the model: there is nothing else to hand on. */
export type Real = Record<string, never>

abstract class Command implements fc.AsyncCommand<QueueModel, Real> {
  check(_model: Readonly<QueueModel>): boolean {
    return true
  }

  protected abstract act(model: QueueModel): Promise<void>

  async run(model: QueueModel): Promise<void> {
    await this.act(model)
    await model.compare()
  }

  toString(): string {
    return `${this.constructor.name}(${JSON.stringify(Object.values(this)).slice(1, -1)})`
  }
}

const append = (
  model: QueueModel,
  lane: ModelLane,
  id: string,
  delayMs: number,
  maxAttempts: number,
): ModelOperation => {
  const notBefore = delayMs > 0 ? model.now + delayMs : 0
  const op = { id, seq: ++lane.tail, attempts: 0, maxAttempts, notBefore, started: false, accepted: ++model.accepted }
  lane.ops.push(op)
  return op
}

interface Asked {
  lane: string
  delayMs: number
  maxAttempts: number
  key: number | null
}

class Enqueue extends Command {
  constructor(readonly asked: readonly Asked[]) {
    super()
  }

  protected async act(model: QueueModel): Promise<void> {
    const keys = new Set<number>()
    const asked = this.asked.filter(({ key }) => key === null || (!keys.has(key) && keys.add(key)))
    const list = asked.map(({ lane, delayMs, maxAttempts, key }) =>
      item(lane, { delayMs, maxAttempts, ...(key !== null && { key: `${key}` }) }),
    )
    const accepted = await model.opened.store.accept(list, { ...contextOf(nobody), keyTtlMs: 1_000_000_000 })
    for (const [n, { lane, delayMs, maxAttempts, key }] of asked.entries()) {
      const { id } = must(list[n])
      const known = key === null ? undefined : model.keys.get(`${key}`)
      if (known !== undefined) {
        expect(accepted[n]).toMatchObject({ verdict: 'replay', operationId: known })
        continue
      }
      const op = append(model, model.lane(lane), id, delayMs, maxAttempts)
      if (key !== null) model.keys.set(`${key}`, id)
      expect(accepted[n]).toMatchObject({ verdict: 'queue', seq: op.seq })
    }
  }
}

abstract class ByWorker extends Command {
  constructor(readonly worker: number) {
    super()
  }

  override check(model: Readonly<QueueModel>): boolean {
    return model.workers[this.worker]?.alive === true
  }

  protected of(model: QueueModel): ModelWorker {
    return must(model.workers[this.worker])
  }
}

class ExecuteNow extends ByWorker {
  constructor(
    worker: number,
    readonly lane: string,
    readonly maxAttempts: number,
  ) {
    super(worker)
  }

  protected async act(model: QueueModel): Promise<void> {
    const by = this.of(model)
    const lane = model.lane(this.lane)
    const may = lane.ops.length === 0 && lane.held === null && !model.isPaused(lane)
    const asked = item(this.lane, { execute: true, maxAttempts: this.maxAttempts })
    const [accepted] = await by.real.accept([asked])
    const op = append(model, lane, asked.id, 0, this.maxAttempts)
    expect(accepted).toMatchObject({ verdict: may ? 'execute' : 'queue', seq: op.seq })
    if (!may) return
    op.started = true
    lane.held = { by, claimed: [executing(asked, accepted)] }
    by.remembers.push(...lane.held.claimed)
  }
}

class Claim extends ByWorker {
  constructor(
    worker: number,
    readonly lanes: number,
    readonly each: number,
  ) {
    super(worker)
  }

  protected async act(model: QueueModel): Promise<void> {
    const by = this.of(model)
    const waiting = [...model.lanes.values()].filter(
      (lane) => lane.held === null && !model.isPaused(lane) && lane.ops[0] !== undefined && model.isDue(lane.ops[0]),
    )
    const claimed = await by.real.claim({ lanes: this.lanes, each: this.each })
    const byLane = group(claimed)
    expect(byLane.size).toBeLessThanOrEqual(this.lanes)
    if (model.pauses.size === 0) expect(byLane.size).toBeGreaterThanOrEqual(Math.min(this.lanes, waiting.length))
    const back: Settlement[] = []
    for (const [name, ops] of byLane) {
      const lane = model.lane(name)
      expect(lane.held).toBeNull()
      // One at a time as long as a suspect is first. Once all of them are gone, by a cancel that does not move the head, the
      // store may still be careful or not.
      const isSuspect = lane.careful >= must(lane.ops[0]).seq
      const count = isSuspect || (lane.careful > lane.head && ops.length === 1) ? 1 : this.each
      const handed = lane.ops.slice(0, count)
      expect(ops.map((op) => [op.id, op.seq, op.attempts])).toEqual(handed.map((op) => [op.id, op.seq, op.attempts]))
      expect(ops.map((op) => op.due)).toEqual(handed.map((op) => model.isDue(op) && !model.isPaused(lane)))
      const first = must(ops[0])
      if (first.due) lane.held = { by, claimed: ops }
      else back.push(settlement(first, {}))
    }
    by.remembers.push(...claimed.filter((op) => model.lane(op.partition).held?.by === by))
    if (back.length > 0) expect(await by.real.settle(back)).toEqual([])
  }
}

type Ending = 'all' | 'some' | 'retry' | 'fail' | 'nothing' | 'keep'

class Settle extends ByWorker {
  constructor(
    worker: number,
    readonly pick: number,
    readonly ending: Ending,
    readonly delayMs: number,
  ) {
    super(worker)
  }

  override check(model: Readonly<QueueModel>): boolean {
    return super.check(model) && (model as QueueModel).heldBy(this.of(model as QueueModel)).length > 0
  }

  protected async act(model: QueueModel): Promise<void> {
    const by = this.of(model)
    const lanes = model.heldBy(by)
    const lane = must(lanes[this.pick % lanes.length])
    const held = must(lane.held)
    const wait = held.claimed.findIndex((op) => !op.due)
    const due = wait < 0 ? held.claimed : held.claimed.slice(0, wait)
    const { ending } = this
    const most =
      ending === 'all' || ending === 'fail' ? due.length : ending === 'nothing' ? 0 : Math.floor(due.length / 2)
    const done = due.slice(0, most)
    const first = must(held.claimed[0])
    const next = due[most]
    const keeps = ending === 'keep' && done.length > 0 && done.length < held.claimed.length
    // A worker whose last attempt failed says so, and asks for no other.
    const tried = lane.ops[most]
    const retries =
      ending === 'retry' && next !== undefined && tried !== undefined && tried.attempts + 1 < tried.maxAttempts
    const lost = await by.real.settle([
      settlement(first, {
        leaving: done.map((op) => leaving(op, ending === 'fail' ? { status: 'failed', error: 'no' } : 'completed')),
        retry: retries ? { delayMs: this.delayMs, error: 'again' } : null,
        release: !keeps,
      }),
    ])
    expect(lost).toEqual([])
    for (const { seq } of done) {
      const op = must(lane.ops[0])
      expect(op.seq).toBe(seq)
      lane.ops.shift()
      lane.head = seq
      op.attempts++
      op.started = false
      if (ending === 'fail') model.dead.set(op.id, { lane, op })
      else model.completed.push(op.id)
    }
    if (retries) {
      const op = must(lane.ops[0])
      op.attempts++
      op.started = false
      op.notBefore = model.now + this.delayMs
    }
    lane.held = keeps ? { by, claimed: held.claimed.slice(done.length) } : null
  }
}

class Mark extends ByWorker {
  override check(model: Readonly<QueueModel>): boolean {
    return super.check(model) && (model as QueueModel).heldBy(this.of(model as QueueModel)).length > 0
  }

  protected async act(model: QueueModel): Promise<void> {
    const lane = must(model.heldBy(this.of(model))[0])
    const held = must(lane.held)
    const op = must(held.claimed[0])
    await model.opened.store.mark(this.of(model).real.id, [
      { fence: op.fence, lane: op.lane, seq: op.seq, startedMsAgo: 60 },
    ])
    must(lane.ops[0]).started = true
    held.claimed = [op]
  }
}

class Retire extends ByWorker {
  protected async act(model: QueueModel): Promise<void> {
    const worker = this.of(model)
    expect(await model.opened.store.retire(worker.real.id)).toBe(model.heldBy(worker).length)
    model.giveBack(worker, false)
    worker.recovered = true
    model.zombies.push(worker)
    await replace(model, this.worker)
  }
}

/** Heard of no more. Its leases hold until somebody notices. */
class Crash extends ByWorker {
  protected async act(model: QueueModel): Promise<void> {
    this.of(model).alive = false
  }
}

class Recover extends Command {
  protected async act(model: QueueModel): Promise<void> {
    const { store } = model.opened
    const dead = model.workers.filter((worker) => !worker.alive)
    model.now += leaseMs + 1
    await model.setClock()
    for (const worker of model.workers) if (worker.alive) await store.pulse(worker.real.id, leaseMs, {})
    for (let n = 0; n < dead.length; n++) {
      const recovered = await store.recover()
      expect(dead.map((worker) => worker.real.id)).toContain(recovered?.worker)
    }
    expect(await store.recover()).toBeNull()
    for (const worker of dead) {
      model.giveBack(worker, true)
      worker.recovered = true
      model.zombies.push(worker)
    }
    for (let n = 0; n < workerCount; n++) if (model.workers[n]?.alive === false) await replace(model, n)
  }
}

async function replace(model: QueueModel, index: number): Promise<void> {
  await model.enlist()
  const [fresh] = model.workers.splice(-1)
  model.workers[index] = must(fresh)
}

class ZombieSettles extends Command {
  constructor(readonly pick: number) {
    super()
  }

  override check(model: Readonly<QueueModel>): boolean {
    return model.zombies.some((worker) => worker.remembers.length > 0)
  }

  protected async act(model: QueueModel): Promise<void> {
    const zombies = model.zombies.filter((worker) => worker.remembers.length > 0)
    const { real, remembers } = must(zombies[this.pick % zombies.length])
    const op = must(remembers[this.pick % remembers.length])
    expect(await real.settle([settlement(op, { leaving: [leaving(op)] })])).toEqual([op.fence])
    expect(await real.claim()).toEqual([])
    const tx = await model.opened.store.begin(30_000)
    expect(await model.opened.store.settleWithin(tx, real.id, settlement(op, { leaving: [leaving(op)] }))).toBe(false)
    await tx.rollback()
  }
}

class Cancel extends Command {
  constructor(
    readonly lane: string,
    readonly pick: number,
  ) {
    super()
  }

  override check(model: Readonly<QueueModel>): boolean {
    return (model as QueueModel).lane(this.lane).ops.length > 0
  }

  protected async act(model: QueueModel): Promise<void> {
    const lane = model.lane(this.lane)
    const index = this.pick % lane.ops.length
    const op = must(lane.ops[index])
    const upto = lane.held?.claimed.at(-1)?.seq ?? 0
    const outcome = await model.opened.store.cancel(op.id, [], 'model')
    expect(outcome).toBe(op.seq <= upto ? 'running' : 'cancelled')
    if (outcome !== 'cancelled') return
    lane.ops.splice(index, 1)
    if (index === 0 && lane.held === null) lane.head = op.seq
    model.cancelled.push(op.id)
  }
}

class CancelFinished extends Command {
  override check(model: Readonly<QueueModel>): boolean {
    return model.completed.length > 0
  }

  protected async act(model: QueueModel): Promise<void> {
    expect(await model.opened.store.cancel(must(model.completed.at(-1)), [], 'model')).toBe('gone')
  }
}

class Pause extends Command {
  constructor(readonly lane: string | null) {
    super()
  }

  protected async act(model: QueueModel): Promise<void> {
    await model.opened.store.pause('q', this.lane)
    model.pauses.add(this.lane ?? '*')
  }
}

class Resume extends Command {
  constructor(readonly lane: string | null) {
    super()
  }

  protected async act(model: QueueModel): Promise<void> {
    await model.opened.store.resume('q', this.lane)
    if (this.lane === null) model.pauses.clear()
    else model.pauses.delete(this.lane)
  }
}

class Redrive extends Command {
  constructor(readonly most: number) {
    super()
  }

  override check(model: Readonly<QueueModel>): boolean {
    return model.dead.size > 0
  }

  protected async act(model: QueueModel): Promise<void> {
    const ids = [...model.dead.keys()].slice(0, this.most)
    expect(await model.opened.store.redrive(ids)).toEqual({ moved: ids.length, skipped: 0 })
    const chosen = ids.map((id) => must(model.dead.get(id))).sort((a, b) => a.op.accepted - b.op.accepted)
    for (const { lane, op } of chosen) {
      model.dead.delete(op.id)
      lane.ops.push({ ...op, seq: ++lane.tail, attempts: 0, notBefore: 0, started: false })
    }
  }
}

class Wait extends Command {
  constructor(readonly ms: number) {
    super()
  }

  protected async act(model: QueueModel): Promise<void> {
    model.now += this.ms
    await model.setClock()
    for (const worker of model.workers) if (worker.alive) await model.opened.store.pulse(worker.real.id, leaseMs, {})
  }
}

function group(claimed: readonly Claimed[]): Map<string, Claimed[]> {
  const lanes = new Map<string, Claimed[]>()
  for (const op of claimed) lanes.set(op.partition, [...(lanes.get(op.partition) ?? []), op])
  return lanes
}

/** Nothing is lost: once all obstacles are gone, everything that is left comes out, in order. */
export async function drainAll(model: QueueModel): Promise<void> {
  await new Resume(null).run(model)
  await new Recover().run(model)
  await new Wait(100_000).run(model)
  for (let n = 0; n < workerCount; n++) {
    while (model.heldBy(must(model.workers[n])).length > 0) await new Settle(n, 0, 'all', 0).run(model)
  }
  for (let left = 1_000; [...model.lanes.values()].some((lane) => lane.ops.length > 0); left--) {
    if (left === 0) throw new Error('the queue does not drain')
    await new Claim(0, laneNames.length, 3).run(model)
    while (model.heldBy(must(model.workers[0])).length > 0) await new Settle(0, 0, 'all', 0).run(model)
  }
}

const laneName = fc.constantFrom(...laneNames)
const aWorker = fc.nat(workerCount - 1)
const maxAttempts = fc.integer({ min: 1, max: 3 })
const asked = fc.record({
  lane: laneName,
  delayMs: fc.oneof({ weight: 4, arbitrary: fc.constant(0) }, { weight: 1, arbitrary: fc.constantFrom(1, 500, 5_000) }),
  maxAttempts,
  key: fc.oneof({ weight: 4, arbitrary: fc.constant(null) }, { weight: 1, arbitrary: fc.nat(5) }),
})

export const commands = (size: number): fc.Arbitrary<Iterable<fc.AsyncCommand<QueueModel, Real>>> =>
  fc.commands(
    [
      fc.array(asked, { minLength: 1, maxLength: 6 }).map((list) => new Enqueue(list)),
      fc.tuple(aWorker, laneName, maxAttempts).map(([w, l, m]) => new ExecuteNow(w, l, m)),
      fc
        .tuple(aWorker, fc.integer({ min: 1, max: 4 }), fc.integer({ min: 1, max: 4 }))
        .map(([w, l, e]) => new Claim(w, l, e)),
      fc
        .tuple(
          aWorker,
          fc.nat(3),
          fc.constantFrom<Ending>('all', 'some', 'retry', 'fail', 'nothing', 'keep'),
          fc.constantFrom(0, 700),
        )
        .map(([w, p, e, d]) => new Settle(w, p, e, d)),
      aWorker.map((w) => new Mark(w)),
      aWorker.map((w) => new Crash(w)),
      aWorker.map((w) => new Retire(w)),
      fc.constant(new Recover()),
      fc.nat(9).map((n) => new ZombieSettles(n)),
      fc.tuple(laneName, fc.nat(5)).map(([l, n]) => new Cancel(l, n)),
      fc.constant(new CancelFinished()),
      fc.option(laneName).map((l) => new Pause(l)),
      fc.option(laneName).map((l) => new Resume(l)),
      fc.integer({ min: 1, max: 4 }).map((n) => new Redrive(n)),
      fc.constantFrom(1, 600, 6_000).map((ms) => new Wait(ms)),
    ],
    { maxCommands: size, size: 'max' },
  )
