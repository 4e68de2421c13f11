/**
 * Watches clients and generations of this process in two rounds a second apart, each with one statement for all.
 *
 * For clients: the positions of their queued generations, and operations that ended without an end in the log
 * (cancelled before they ran, or their last process died). A timer watches the promised time. For generations: whether
 * anybody reads them.
 *
 * A process that lost its lease comes back under another name. It reports its readers again; otherwise they would count
 * as gone.
 */
import { type Periodic, periodic, type StatusReport } from 'spillway/workload'
import { type Delivery, keptFailure } from './delivery.js'
import type { Handler } from './handler.js'
import type { GenerationDeps } from './index.js'
import { failures } from './request.js'

const roundMs = 1_000
/**
 * A queued client gets its position every second, less often if many wait and the query is expensive. A stream from
 * another process is checked occasionally.
 */
const lookMs = { queued: 1_000, queuedMany: 3_000, streaming: 5_000 }
const manyDeliveries = 1_000
const idsMax = 2_000
/** Time for cancelling an overdue generation; after it the client is informed anyway. */
const giveUpMs = 1_000
/** The notification of its last record may still be on its way. */
const missingEndsMax = 2
/**
 * A process whose client leaves an OpenAI stream cancels it itself. Streams found here belong to a dead process, or to
 * one that comes back within a few rounds and reports it.
 */
const returnMs = 3_000

export class Watch {
  readonly #deps: GenerationDeps
  readonly #handler: Handler
  readonly #deliveries = new Map<string, Set<Delivery>>()
  /** The names under which the last two rounds reported the readers here. */
  #instances: readonly [string, string]

  constructor(deps: GenerationDeps, handler: Handler) {
    this.#deps = deps
    this.#handler = handler
    this.#instances = [deps.intake.instance, deps.intake.instance]
  }

  start(): Periodic[] {
    const round = (task: () => Promise<void>, message: string): Periodic =>
      periodic(roundMs, task, { onFault: (fault) => this.#deps.log.warn({ err: fault }, message) })
    return [
      round(() => this.#look(), 'could not read the state of generations'),
      round(() => this.#sayWhoReads().then(() => this.#askWhoReads()), 'could not ask who reads generations'),
    ]
  }

  get deliveries(): readonly Delivery[] {
    return [...this.#deliveries.values()].flatMap((all) => [...all])
  }

  add(delivery: Delivery): void {
    delivery.lookAt = delivery.options.isQueued ? 0 : performance.now() + lookMs.streaming
    delivery.onOverdue(() => void this.#overdue(delivery))
    const all = this.#deliveries.get(delivery.id)
    if (all === undefined) this.#deliveries.set(delivery.id, new Set([delivery]))
    else all.add(delivery)
  }

  /** Whether a client here reads the stream. */
  has(id: string): boolean {
    return this.#deliveries.has(id)
  }

  /** True if no other client here reads the same stream. */
  remove(delivery: Delivery): boolean {
    const all = this.#deliveries.get(delivery.id)
    all?.delete(delivery)
    if (all === undefined || all.size > 0) return false
    this.#deliveries.delete(delivery.id)
    return true
  }

  /** Another process has a reader too: the registry notes only the last of us. */
  shared(id: string): void {
    for (const delivery of this.#deliveries.get(id) ?? []) delivery.isShared = true
  }

  /** The registry knows one reader of each stream, by its process. */
  async #sayWhoReads(): Promise<void> {
    const { instance } = this.#deps.intake
    const [before, last] = this.#instances
    // The lease was lost and this process re-registered: to the others, readers under the old name are gone. Reported
    // twice, because the name is assigned before the others know it.
    const isNew = instance !== before || instance !== last
    const ids = [...this.#deliveries].filter(([, all]) => isNew || [...all].some(({ isShared }) => isShared))
    await Promise.all(ids.map(([id]) => this.#deps.logs.registry.watched(id, instance)))
    this.#instances = [last, instance]
  }

  async #look(): Promise<void> {
    const now = performance.now()
    const due = this.deliveries.filter((delivery) => this.#isDue(delivery, now))
    for (let from = 0; from < due.length; from += idsMax) {
      const some = due.slice(from, from + idsMax)
      const reports = await this.#deps.intake.tickets.statusOf(some.map(({ id }) => id))
      for (const [i, delivery] of some.entries()) this.#update(delivery, reports[i])
    }
  }

  /** The end of a local one is noticed. One that ran here and still waits may have lost its log, including its end. */
  #isDue(delivery: Delivery, now: number): boolean {
    if (!delivery.options.isLocal || !delivery.hasStarted) return now >= delivery.lookAt
    return delivery.isWaiting && !this.#handler.has(delivery.id)
  }

  /** Reported after it is cancelled, so that a retry finds its key free. Does not wait for an unreachable store. */
  async #overdue(delivery: Delivery): Promise<void> {
    if (delivery.hasStarted) return
    const why = failures.queueTimeout(Math.round((delivery.options.waitMs ?? 0) / 1_000))
    const late = setTimeout(() => delivery.fail(why), giveUpMs)
    try {
      if (delivery.options.isWhole) {
        const [report] = await this.#deps.intake.tickets.statusOf([delivery.id])
        if (report?.status === 'processing') return
      }
      await delivery.giveUp(why)
      delivery.fail(why)
    } catch (fault) {
      delivery.fail(why)
      this.#deps.log.warn({ err: fault, stream: delivery.id }, 'a generation that took too long could not be cancelled')
    } finally {
      clearTimeout(late)
    }
  }

  #update(delivery: Delivery, report: StatusReport | undefined): void {
    const now = performance.now()
    const queuedMs = this.#deliveries.size > manyDeliveries ? lookMs.queuedMany : lookMs.queued
    // Slightly less than the time to the intended round, which may run early.
    delivery.lookAt = now + (delivery.hasStarted ? lookMs.streaming : queuedMs) - roundMs / 2
    if (report === undefined) return
    switch (report.status) {
      case 'pending':
        delivery.reportPosition(report.position ?? 0, Math.ceil((report.waitMs ?? 0) / 1_000))
        return
      case 'processing':
        return
      default:
        // A slow reader still reads the log: the end comes later.
        if (!delivery.isWaiting) return
        delivery.missingEnds++
        if (delivery.missingEnds <= missingEndsMax) {
          delivery.lookAt = now
          delivery.kick()
        } else {
          void this.#endless(delivery, report.status)
        }
    }
  }

  /** The operation is over and its log has no end: sends the known reason. */
  async #endless(delivery: Delivery, status: StatusReport['status']): Promise<void> {
    if (status === 'cancelled') return delivery.fail(failures.cancelled)
    delivery.fail((await keptFailure(this.#deps, delivery.id)) ?? failures.interrupted)
  }

  async #askWhoReads(): Promise<void> {
    const ids = this.#handler.running.filter((id) => !this.#deliveries.has(id))
    if (ids.length === 0) return
    const { logs, settings } = this.#deps
    const detachGraceMs = settings.detachGraceSeconds * 1_000
    for (const { id, forMs } of await logs.registry.abandoned(ids)) {
      // A new client reads it.
      if (this.#deliveries.has(id)) continue
      const graceMs = this.#handler.formatOf(id) === 'openai' ? returnMs : detachGraceMs
      if (forMs >= graceMs) this.#handler.abandon(id)
    }
  }
}
