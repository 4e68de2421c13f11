/**
 * The slots of this process: the general ones, and those that some definitions have for themselves. Each group has its own
 * loop that claims and settles, and claims only its own types: a full group never holds up another.
 *
 * A lease belongs to one group as a whole, because each has its own flush. Leases that no group knows are given back here,
 * by one call for all: a lease unknown to one group may be another's.
 */

import type { AcceptFlush, Accepting } from '../accept/accepting.js'
import { OptionError } from '../core/options.js'
import { freeSlots } from '../fleet/fleet-numbers.js'
import { Load } from '../fleet/load.js'
import type { Pulse, Store } from '../store/port.js'
import { ClaimLoop, loops } from './claim-loop.js'
import type { Handler, LaneRunOptions } from './lane-runner.js'
import { Elsewhere } from './left-to-others.js'

export interface Slots {
  readonly name: string
  readonly concurrency: number
  readonly work: ClaimLoop
  readonly load: Load
  /** For operations that run in these slots. */
  readonly flush: AcceptFlush
}

export interface SlotsOptions {
  /** Definitions with the same name share them. */
  name: string
  /** Operations that run at once, in this process. */
  concurrency: number
}

export interface WorksOptions extends Omit<LaneRunOptions, 'handlers' | 'onAttempt' | 'onSettled' | 'elsewhere'> {
  store: Store
  /** For the general slots. */
  concurrency: number
  accepting: Accepting
  onAttempt: LaneRunOptions['onAttempt']
  onSettled: LaneRunOptions['onSettled']
  /** Lanes were left to other processes. */
  onLeft(): void
}

/** How long after a fault stray leases are looked for, and how often. */
const suspectMs = 60_000
const strayLookMs = 4_000

export class SlotGroups {
  readonly general: Slots
  readonly #o: WorksOptions
  readonly #all: Slots[] = []
  readonly #handlers = new Map<Slots, Map<string, Handler>>()
  readonly #slotsOf = new Map<string, Slots>()
  readonly #now: () => number
  readonly #elsewhere: Elsewhere
  #suspectUntil = 0
  #strayLook = 0

  constructor(options: WorksOptions) {
    this.#o = options
    this.#now = options.now ?? (() => performance.now())
    this.#elsewhere = new Elsewhere(options)
    this.general = this.#add('', options.concurrency)
  }

  /** The slots for operations of a type, from its definition. */
  slots(own: SlotsOptions | undefined): Slots {
    if (own === undefined) return this.general
    const { name, concurrency } = own
    const known = this.#all.find((slots) => slots.name === name)
    if (known === undefined) return this.#add(name, concurrency)
    if (known.concurrency === concurrency) return known
    throw new OptionError(
      `the slots ${name} have a concurrency of ${known.concurrency} in another definition, and ${concurrency} in this one; give both the same`,
    )
  }

  handle(type: string, slots: Slots, handler: Handler): void {
    this.#handlers.get(slots)?.set(type, handler)
    if (handler.announces !== undefined) this.#elsewhere.define(type, handler.announces)
    this.#slotsOf.set(type, slots)
  }

  /** Operations in the queue, over all groups. */
  get depth(): number {
    return this.#all.reduce((sum, { load }) => sum + load.depth, 0)
  }

  /** Which operations of its types this process may run, if not all: for the others, when it enlists. */
  announced(): Record<string, string> {
    return this.#elsewhere.announced()
  }

  /** Runs with each heartbeat, concurrently. */
  async lookAfter(): Promise<void> {
    await this.#giveBackStray()
    await this.#elsewhere.observe()
  }

  /** Slots that are free for a type here; null: it is not claimed here. */
  freeSlots(type: string): number | null {
    const slots = this.#slotsOf.get(type)
    const handler = slots && this.#handlers.get(slots)?.get(type)
    if (slots === undefined || !slots.work.isClaiming || handler?.ready?.() === false) return null
    return Math.max(0, slots.work.freeSlots)
  }

  /** This process's figures for the heartbeat: the pace, and the free slots for each type. */
  figures(): Record<string, number> {
    const free = [...this.#slotsOf.keys()].map((type) => [`!${freeSlots(type)}`, this.freeSlots(type)] as const)
    return Object.assign(
      Object.fromEntries(free.filter(([, slots]) => slots !== null)),
      ...this.#all.map(({ load }) => load.figures()),
    )
  }

  observe(pulse: Pulse, elapsedMs: number): void {
    for (const { load } of this.#all) load.observe(pulse, elapsedMs)
    for (const id of pulse.cancels) this.cancel(id)
    if (pulse.waiting) this.wake()
    if (pulse.nextDueMs !== null) this.wakeIn(pulse.nextDueMs)
  }

  /** No request waits for a slot any more. */
  closeRooms(): void {
    for (const { work } of this.#all) work.room.close()
  }

  runningByType(): Record<string, number> {
    return Object.assign({}, ...this.#all.map(({ work }) => work.runningByType()))
  }

  /** Start to claim operations from the queue that have definitions. */
  start(): void {
    for (const slots of this.#all) if ((this.#handlers.get(slots)?.size ?? 0) > 0) slots.work.start()
  }

  wake(): void {
    for (const { work } of this.#all) work.wake()
  }

  wakeIn(ms: number): void {
    for (const { work } of this.#all) work.wakeIn(ms)
  }

  /** Asks a running operation to stop. False: it does not run here. */
  cancel(id: string): boolean {
    return this.#all.some(({ work }) => work.cancel(id))
  }

  /** The lease is lost: everything this process held belongs to others. */
  loseAll(): void {
    for (const { work } of this.#all) work.loseAll()
    // If no process took over in the meantime, the store still records the leases as ours.
    this.suspect()
  }

  /** The call timed out. It may have granted leases that we never heard about. */
  suspect(): void {
    this.#suspectUntil = this.#now() + suspectMs
  }

  /**
   * Gives back leases that this process does not know about, once they are older than any call under way can be. Checks
   * every few seconds after a fault, else now and then.
   */
  async #giveBackStray(): Promise<void> {
    const now = this.#now()
    if (now - this.#strayLook < (now < this.#suspectUntil ? strayLookMs : strayLookMs * 10)) return
    this.#strayLook = now
    const known = this.#all.flatMap(({ work }) => work.knownFences())
    const lanes = await this.#o.store.disown(this.#o.worker(), known)
    if (lanes === 0) return
    this.#o.log.warn({ lanes }, 'returned the lanes of a claim whose answer was lost')
    this.wake()
  }

  async stop(deadlineMs: number): Promise<void> {
    await Promise.all(this.#all.map(({ work }) => work.stop(deadlineMs)))
  }

  #add(name: string, concurrency: number): Slots {
    const { accepting, onAttempt, onSettled, ...shared } = this.#o
    const handlers = new Map<string, Handler>()
    const load: Load = new Load(name, (type) => (this.#slotsOf.get(type) ?? this.general) === slots)
    const work = new ClaimLoop({
      ...shared,
      handlers,
      concurrency,
      part: this.#all.length * loops,
      long: name !== '',
      onAttempt: (type, outcome, runMs) => {
        if (outcome !== 'lease_lost') load.ran(type, runMs)
        onAttempt(type, outcome, runMs)
      },
      onSettled: (op, outcome) => {
        if (outcome.kind !== 'retry' && outcome.kind !== 'released') load.settled()
        onSettled(op, outcome)
      },
      onSilence: () => this.suspect(),
      elsewhere: (op, left) => this.#elsewhere.place(op, left),
      labelOf: (type) => this.#elsewhere.labelOf(type),
    })
    const slots: Slots = { name, concurrency, work, load, flush: accepting.operations({ load, concurrency }) }
    this.#all.push(slots)
    this.#handlers.set(slots, handlers)
    return slots
  }
}
