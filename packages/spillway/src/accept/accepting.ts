/** The flushes of an intake: one per slot group for `run` definitions, one for each `apply` definition, one for all admissions. */

import type { IntakeLog, IntakeSettings } from '../core/settings.js'
import type { Load } from '../fleet/load.js'
import type { ApplyItem, EffectItem, SqlEffect } from '../intake/define.js'
import type { PendingItem } from '../intake/submission.js'
import type { Metrics } from '../metrics/metrics.js'
import type { AcceptContext, Accepted, AcceptItem, AdmitItem, Admitted, Decided, Store, Tx } from '../store/port.js'
import { resultText } from '../work/attempt.js'
import { codeOf, isNobodysFault, retryConflicts } from './conflict-retry.js'
import { FairClock } from './fair-clock.js'
import { Flush, type FlushOptions } from './flush.js'

export type Apply = (tx: Tx, items: readonly ApplyItem<unknown>[]) => Promise<readonly unknown[]>
export type Effect = SqlEffect<unknown, unknown>
/** Items submitted together are written together: the items of a request, mostly one. */
export type AcceptFlush = Flush<readonly PendingItem[], readonly Accepted[]>
export type AdmitFlush = Flush<AdmitItem, Admitted>

/** The operations that a new one waits behind, for estimating its wait. */
export interface Backlog {
  load: Load
  concurrency: number
}

export interface AcceptingOptions {
  store: Store
  settings: IntakeSettings
  metrics: Metrics
  log: IntakeLog
  worker(): string
  /** Operations in the queue, of all processes. */
  depth(): number
  /** The backlog of definitions without their own slots. */
  general(): Backlog
}

const flushItemsMax = 500
const flushBytesMax = 4 * 1_048_576
const waitingItemsMax = 10_000
/** An admission has no body. */
const admitBytes = 200
const backlogMsMax = 86_400_000
const attemptsMax = 3

export class Accepting {
  readonly #o: AcceptingOptions
  readonly #fair = new FairClock()
  readonly #flushes: { readonly oldestMs: number; drained(): Promise<void> }[] = []

  constructor(options: AcceptingOptions) {
    this.#o = options
  }

  /** For operations that run in the same slots. */
  operations(backlog: Backlog): AcceptFlush {
    return this.#makeFlush((pending) => this.#accept(pending, this.#context(backlog)))
  }

  /** For one definition whose effect is rows in the store. */
  applying(apply: Apply | Effect, pendingMax?: number): AcceptFlush {
    return this.#makeFlush((pending) => {
      const context = this.#context(this.#o.general(), pendingMax)
      return typeof apply === 'function'
        ? this.#acceptAndApply(apply, pending, context)
        : this.#acceptWithEffect(apply, pending, context)
    })
  }

  /** For requests that pass gates without an operation. */
  admissions(): AdmitFlush {
    return this.#add(
      new Flush({
        ...this.#bounds(),
        write: (items: readonly AdmitItem[]) => retryConflicts(attemptsMax, () => this.#o.store.admit(items)),
        sizeOf: () => admitBytes,
      }),
    )
  }

  /** Age of the oldest write that waits or is under way, over all flushes. */
  get oldestMs(): number {
    let oldest = 0
    for (const flush of this.#flushes) oldest = Math.max(oldest, flush.oldestMs)
    return oldest
  }

  async drained(): Promise<void> {
    for (const flush of this.#flushes) await flush.drained()
  }

  /** Inside the caller's own transaction: no flush, no waiting. */
  within(tx: Tx, items: readonly AcceptItem[], backlog: Backlog): Promise<Accepted[]> {
    this.#fair.stamp(items)
    return this.#o.store.acceptWithin(tx, items, this.#context(backlog))
  }

  /** Effects that are functions in the store, decided and written in the caller's own transaction. */
  applyWithin(tx: Tx, effect: Effect, pending: readonly PendingItem[], pendingMax?: number): Promise<Accepted[]> {
    return this.#acceptWithEffect(effect, together(pending, 1), this.#context(this.#o.general(), pendingMax), tx)
  }

  #makeFlush(write: (pending: readonly PendingItem[]) => Promise<Accepted[]>): AcceptFlush {
    return this.#add<AcceptFlush>(
      new Flush({
        ...this.#bounds(),
        write: (units) => inUnits(units, (pending) => retryConflicts(attemptsMax, () => write(pending))),
        // The keys of one request derive from one key, so the first represents all.
        exclusiveKey: ([first]) => first?.item.idempotency?.key ?? null,
        sizeOf: (unit) => unit.reduce((sum, { item }) => sum + item.payload.length + 200, 0),
        countOf: (unit) => unit.length,
      }),
    )
  }

  #add<F extends AcceptFlush | AdmitFlush>(flush: F): F {
    this.#flushes.push(flush)
    return flush
  }

  #bounds(): Omit<FlushOptions<never, never>, 'write' | 'sizeOf' | 'exclusiveKey' | 'countOf'> {
    return {
      isPoison: (fault) => !isNobodysFault(fault) && codeOf(fault) !== 'other',
      itemsMax: flushItemsMax,
      bytesMax: flushBytesMax,
      waitingMax: waitingItemsMax,
      timeoutMs: this.#o.settings.storeTimeoutMs * 0.9,
      timeoutFault: () => Object.assign(new Error('the write waited too long'), { code: 'timeout' }),
      onFlush: (items, durationMs) => {
        this.#o.metrics.flushBatchSize.observe(items)
        this.#o.metrics.flushDuration.observe(durationMs / 1_000)
      },
    }
  }

  async #accept(pending: readonly PendingItem[], context: AcceptContext): Promise<Accepted[]> {
    const items = pending.map((p) => p.item)
    this.#fair.stamp(items)
    const accepted = await this.#o.store.accept(items, context)
    this.#learn(items, accepted)
    return accepted
  }

  /** With `tx`: in the caller's transaction, and rolled back with it. */
  async #acceptWithEffect(
    effect: Effect,
    pending: readonly PendingItem[],
    context: AcceptContext,
    tx?: Tx,
  ): Promise<Accepted[]> {
    const items = pending.map((p) => p.item)
    this.#fair.stamp(items)
    const storeEffect = {
      function: effect.function,
      values: (order: readonly number[]) =>
        effect.values(
          order.flatMap((index) => toEffectItem(pending[index])),
          false,
        ),
    }
    const { accepted, results: values } = await this.#o.store.acceptWithEffect(items, context, storeEffect, tx)
    for (const [i, p] of pending.entries()) {
      try {
        passOn(effect, p, accepted[i], values[i])
      } catch (fault) {
        // Already committed: an error thrown here would look like a poisoned flush, and the flush would be written again.
        this.#o.log.error({ err: fault, type: p.item.type }, 'limited failed; the problem document lacks its members')
      }
    }
    this.#learn(items, accepted)
    return accepted
  }

  async #acceptAndApply(apply: Apply, pending: readonly PendingItem[], context: AcceptContext): Promise<Accepted[]> {
    const items = pending.map((p) => p.item)
    this.#fair.stamp(items)
    const accepted = await this.#o.store.acceptAndApply(items, context, async (tx, decided) => {
      const results = await applyTo(apply, tx, pending, decided)
      return results.map((result) => ({ v: 'done', result: result ?? null }))
    })
    this.#learn(items, accepted)
    return accepted
  }

  #learn(items: readonly AcceptItem[], accepted: readonly Accepted[]): void {
    for (const [i, item] of items.entries()) {
      const decision = accepted[i]
      if (decision !== undefined && 'stamp' in decision) this.#fair.learn(item, decision.stamp)
    }
  }

  /** What a flush needs besides its items. */
  #context({ load, concurrency }: Backlog, pendingMax?: number): AcceptContext {
    const { settings } = this.#o
    const ahead = Math.max(0, load.depth - concurrency)
    return {
      worker: this.#o.worker(),
      backlogMs: Math.min(backlogMsMax, load.drainMs(ahead) ?? 0),
      ahead,
      keyTtlMs: settings.idempotencyTtlMs,
      isFull: this.#o.depth() >= Math.min(settings.pendingMax, pendingMax ?? settings.pendingMax),
    }
  }
}

/** Flattens the units into one list for the store, and groups the answers again. */
async function inUnits(
  units: readonly (readonly PendingItem[])[],
  write: (pending: readonly PendingItem[]) => Promise<Accepted[]>,
): Promise<Accepted[][]> {
  const accepted = await write(units.flatMap((unit, index) => together(unit, index + 1)))
  let end = 0
  return units.map((unit) => {
    end += unit.length
    return accepted.slice(end - unit.length, end)
  })
}

function together(unit: readonly PendingItem[], batch: number): readonly PendingItem[] {
  for (const { item } of unit) item.batch = batch
  return unit
}

async function applyTo(
  apply: Apply,
  tx: Tx,
  pending: readonly PendingItem[],
  { applied, seqs }: Decided,
): Promise<readonly unknown[]> {
  if (applied.length === 0) return []
  const chosen = applied.flatMap((index) => pending[index] ?? [])
  const items = chosen.flatMap((p, i) => toEffectItem(p).map((item) => ({ ...item, seq: seqs[i] ?? 0 })))
  const results = await apply(tx, items)
  if (results.length !== chosen.length) {
    throw new Error(`apply answered ${results.length} results for ${chosen.length} items`)
  }
  for (const [i, p] of chosen.entries()) {
    // Before the commit: nobody could be given the result after it.
    resultText(p.item.type, results[i])
    p.result = results[i] ?? null
  }
  return results
}

/** Passes the effect's value for an item on to the caller's answer. */
function passOn(effect: Effect, p: PendingItem, accepted: Accepted | undefined, value: unknown): void {
  if (accepted?.verdict === 'apply') p.result = value ?? null
  if (effect.limited === undefined || accepted?.verdict !== 'refuse' || accepted.by !== 'rate') return
  const { item, body } = p
  const tier = p.tiers[accepted.rate.tier]
  if (tier === undefined) return
  p.limited = effect.limited(value, {
    identity: item.identity,
    body,
    traceparent: item.traceparent,
    name: tier.name,
    limit: tier.limit,
    windowSeconds: tier.windowSeconds,
    resetMs: accepted.rate.resetMs,
    resetAtMs: accepted.rate.resetAtMs,
  })
}

/** The effect, as a worker applies it to queued operations. `restore`: what the schema makes of a stored body, if that differs. */
export const queuedApply =
  (store: Store, apply: Apply | Effect, restore?: (stored: unknown) => Promise<unknown>): Apply =>
  async (tx, stored) => {
    const items =
      restore === undefined
        ? stored
        : await Promise.all(stored.map(async (item) => ({ ...item, body: await restore(item.body) })))
    if (typeof apply === 'function') return apply(tx, items)
    await apply.prepare?.(items)
    const seqs = items.map(({ seq }) => seq)
    return store.applyWithin(tx, seqs, { function: apply.function, values: () => apply.values(items, true) })
  }

function toEffectItem(p: PendingItem | undefined): EffectItem<unknown>[] {
  if (p === undefined) return []
  const { id, identity, payload: text, queue, partition, traceparent } = p.item
  return [{ id, identity, body: p.body, text, queue, partition, traceparent }]
}
