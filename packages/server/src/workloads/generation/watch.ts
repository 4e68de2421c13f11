/**
 * Looks after what is under way, in two rounds a second apart, each with one statement for all.
 *
 * Of clients here: where their queued generations stand, and whether an operation has ended without an end in its log (it
 * was cancelled before it ran, or its last process died). When the time is over that was promised, a timer says.
 * Of generations here: whether anybody reads them.
 *
 * A process that was given up by the others and came back goes by another name: what its clients read is told anew, or it
 * would pass for left.
 */
import type { OperationReport } from 'spillway/workload'
import { type Delivery, keptFailure } from './delivery.js'
import type { GenerationDeps } from './deps.js'
import type { Handler } from './handler.js'
import { failures } from './request.js'

const roundMs = 1_000
/**
 * While it waits, its position is told every second, more slowly where so many wait that asking costs; what streams from
 * elsewhere is looked at now and then.
 */
const lookMs = { queued: 1_000, queuedMany: 3_000, streaming: 5_000 }
const manyDeliveries = 1_000
const idsMax = 2_000
/** For cancelling what waited too long, before its client is told so all the same. */
const giveUpMs = 1_000
/** The bell of its last record may be on its way. */
const missingEndsMax = 2
/**
 * Whose client leaves an OpenAI stream cancels it itself; what is found here was left by a process that is gone, or by one
 * that comes back within a few rounds and tells so.
 */
const returnMs = 3_000

export class Watch {
  readonly #deps: GenerationDeps
  readonly #handler: Handler
  readonly #deliveries = new Map<string, Set<Delivery>>()
  #timer: NodeJS.Timeout | undefined
  #looking: Promise<void> | null = null
  #asking: Promise<void> | null = null
  /** By which name it was told at the last two rounds that clients here read what they read. */
  #toldAs: readonly [string, string]

  constructor(deps: GenerationDeps, handler: Handler) {
    this.#deps = deps
    this.#handler = handler
    this.#toldAs = [deps.intake.instance, deps.intake.instance]
  }

  start(): void {
    this.#timer = setInterval(() => this.#round(), roundMs)
    this.#timer.unref()
  }

  async stop(): Promise<void> {
    clearInterval(this.#timer)
    await Promise.all([this.#looking, this.#asking])
  }

  get deliveries(): readonly Delivery[] {
    return [...this.#deliveries.values()].flatMap((all) => [...all])
  }

  add(delivery: Delivery): void {
    delivery.lookAt = delivery.isQueued ? 0 : performance.now() + lookMs.streaming
    delivery.onOverdue(() => void this.#overdue(delivery))
    const all = this.#deliveries.get(delivery.id)
    if (all === undefined) this.#deliveries.set(delivery.id, new Set([delivery]))
    else all.add(delivery)
  }

  /** A client here reads that stream. */
  has(id: string): boolean {
    return this.#deliveries.has(id)
  }

  /** True when no other client here reads the same stream. */
  remove(delivery: Delivery): boolean {
    const all = this.#deliveries.get(delivery.id)
    all?.delete(delivery)
    if (all === undefined || all.size > 0) return false
    this.#deliveries.delete(delivery.id)
    return true
  }

  /** Another process has a reader of it too: which of us is noted as the last one says nothing about the other. */
  shared(id: string): void {
    for (const delivery of this.#deliveries.get(id) ?? []) delivery.isShared = true
  }

  /** The registry knows one reader of each stream, by its process. */
  async #sayWhoReads(): Promise<void> {
    const { intake, registry } = this.#deps
    const { instance } = intake
    const [before, last] = this.#toldAs
    // Given up by the others and enlisted anew: to them the readers of the old name are gone. Said twice, for the name is
    // given before the others know it.
    const isNew = instance !== before || instance !== last
    const ids = [...this.#deliveries].filter(([, all]) => isNew || [...all].some(({ isShared }) => isShared))
    await Promise.all(ids.map(([id]) => registry.watched(id, instance)))
    this.#toldAs = [last, instance]
  }

  #round(): void {
    this.#looking ??= this.#look()
      .catch((fault: unknown) => this.#deps.log.warn({ err: fault }, 'could not ask where generations stand'))
      .finally(() => {
        this.#looking = null
      })
    this.#asking ??= this.#sayWhoReads()
      .then(() => this.#askWhoReads())
      .catch((fault: unknown) => this.#deps.log.warn({ err: fault }, 'could not ask who reads generations'))
      .finally(() => {
        this.#asking = null
      })
  }

  async #look(): Promise<void> {
    const now = performance.now()
    const due: Delivery[] = []
    for (const all of this.#deliveries.values()) {
      for (const delivery of all) {
        if (this.#isDue(delivery, now)) due.push(delivery)
      }
    }
    for (let from = 0; from < due.length; from += idsMax) {
      const some = due.slice(from, from + idsMax)
      const reports = await this.#deps.intake.statusOf(some.map(({ id }) => id))
      for (const [i, delivery] of some.entries()) this.#tell(delivery, reports[i])
    }
  }

  /** One that runs here is heard of; one that ran here and goes on waiting has perhaps lost its log, and its end with it. */
  #isDue(delivery: Delivery, now: number): boolean {
    if (!delivery.isLocal || !delivery.hasStarted) return now >= delivery.lookAt
    return delivery.isWaiting && !this.#handler.has(delivery.id)
  }

  /** Told when it is given up: whoever asks again at once finds its key free. A store that is away is not waited for. */
  async #overdue(delivery: Delivery): Promise<void> {
    if (delivery.hasStarted) return
    const why = failures.queueTimeout(delivery.waitSeconds)
    const late = setTimeout(() => delivery.fail(why), giveUpMs)
    try {
      if (delivery.isWhole) {
        const [report] = await this.#deps.intake.statusOf([delivery.id])
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

  #tell(delivery: Delivery, report: OperationReport | undefined): void {
    const now = performance.now()
    const queuedMs = this.#deliveries.size > manyDeliveries ? lookMs.queuedMany : lookMs.queued
    // A little less than until the round that is meant, which may come early.
    delivery.lookAt = now + (delivery.hasStarted ? lookMs.streaming : queuedMs) - roundMs / 2
    if (report === undefined) return
    switch (report.status) {
      case 'pending':
        delivery.tellPosition(report.place ?? 0, Math.ceil((report.waitMs ?? 0) / 1_000))
        return
      case 'processing':
        return
      default:
        // A slow reader of what is in the log: its end comes when it gets there.
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

  /** Its operation is over, and its log does not say how: what is known of why is told. */
  async #endless(delivery: Delivery, status: OperationReport['status']): Promise<void> {
    if (status === 'cancelled') return delivery.fail(failures.cancelled)
    delivery.fail((await keptFailure(this.#deps, delivery.id)) ?? failures.interrupted)
  }

  async #askWhoReads(): Promise<void> {
    const ids = this.#handler.running.filter((id) => !this.#deliveries.has(id))
    if (ids.length === 0) return
    const { detachGraceMs } = this.#deps.settings
    for (const { id, forMs } of await this.#deps.registry.abandoned(ids)) {
      // Whoever came meanwhile reads it.
      if (this.#deliveries.has(id)) continue
      const graceMs = this.#handler.formatOf(id) === 'openai' ? returnMs : detachGraceMs
      if (forMs >= graceMs) this.#handler.abandon(id)
    }
  }
}
