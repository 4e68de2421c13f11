/** Plays the planned faults, at their times, and writes down what they hit. */
import { setMaxListeners } from 'node:events'
import { setTimeout as delay } from 'node:timers/promises'
import { acceptingMaxMs } from './checker/recovery.js'
import { pause } from './clock.js'
import type { Cluster } from './cluster.js'
import type { PlannedFault } from './plan.js'
import type { Fault } from './records.js'
import type { Slot } from './slot.js'

export interface FaultsOptions {
  plan: readonly PlannedFault[]
  slots: readonly Slot[]
  cluster: Cluster
  drainMs: number
  /** Whether the process with this pid has accepted anything. */
  hasAccepted(pid: number): boolean
  /** What is not played by then is left out. */
  maxMs: number
  note(fault: Fault): void
}

const settleInMaxMs = 10_000
const lookPauseMs = 50
/** How long a kill waits for its victim to hold work. */
const aimMaxMs = 3_000
const aimPauseMs = 5
/** What a dying process had sent may still be committed. */
const lastWordsMs = 20
/** A SIGTERM gets the time to drain, to settle and to sign off, and then this. */
const stopGraceMs = 12_000
const witnessMarginMs = 200
const delayedByMs: readonly [number, number] = [20, 400]

export class Faults {
  readonly played: Fault[] = []
  /** When all were played, or it was stopped. */
  readonly over: Promise<void>
  readonly #o: FaultsOptions
  readonly #ended = new AbortController()
  readonly #began = Date.now()
  readonly #bound: NodeJS.Timeout
  #database: Promise<unknown> = Promise.resolve()

  /** They begin at once. */
  constructor(options: FaultsOptions) {
    this.#o = options
    // Every planned fault waits on it.
    setMaxListeners(0, this.#ended.signal)
    // Late is what a slow machine makes of a dense plan; endless it must not become.
    this.#bound = setTimeout(() => this.#ended.abort(), options.maxMs)
    this.over = Promise.all(options.plan.map((planned) => this.#play(planned))).then(() => clearTimeout(this.#bound))
  }

  /** Plays no more; what is under way is ended properly. */
  stop(): void {
    clearTimeout(this.#bound)
    this.#ended.abort()
  }

  /** SIGTERM for good, held to the same as one that is followed by a start. */
  end(slot: Slot): Promise<void> {
    return slot.exclusively(async () => {
      const { pid } = slot
      const from = Date.now()
      const exit = await slot.stop(this.#o.drainMs + stopGraceMs)
      this.#record({ kind: 'term', slot: slot.name, pid, from, to: Date.now(), held: [], exit })
    })
  }

  async #play(planned: PlannedFault): Promise<void> {
    await this.#wait(Math.max(0, this.#began + planned.atMs - Date.now()))
    const { kind } = planned
    if (kind === 'postgres' || kind === 'backend') {
      const turn = this.#database.then(() => (this.#ended.signal.aborted ? undefined : this.#crash(planned, kind)))
      // The next one must have its turn whatever became of this one; who awaits this one hears of it.
      this.#database = turn.catch(() => undefined)
      return turn
    }
    if (kind === 'kill' || kind === 'vanish') return this.#killOne(planned)
    await this.#on(planned.victim, async (slot) => {
      if (kind === 'pause') return this.#pause(planned, slot)
      if (kind === 'term') return this.#term(planned, slot)
      return this.#network(planned, slot)
    })
  }

  /** Once it is its turn and the process works; undefined: the faults are over. */
  #on<T>(victim: number, play: (slot: Slot) => Promise<T>): Promise<T | undefined> {
    const slot = this.#o.slots[victim % this.#o.slots.length]
    if (slot === undefined) throw new RangeError(`no slot ${victim}`)
    return slot.exclusively(async () => {
      if (this.#ended.signal.aborted) return undefined
      await slot.start()
      await this.#settleIn(slot)
      return play(slot)
    })
  }

  /** A victim that comes to hold nothing is spared for the next one: idle processes are killed by the unaimed kills. */
  async #killOne(planned: PlannedFault): Promise<void> {
    for (let turn = 0; turn < this.#o.slots.length; turn++) {
      const isLast = turn === this.#o.slots.length - 1
      const killed = await this.#on(planned.victim + turn, async (slot) => {
        if (planned.aimed && !(await this.#aim(slot)) && !isLast) return false
        await this.#kill(planned, slot)
        return true
      })
      if (killed !== false) return
    }
  }

  async #kill(planned: PlannedFault, slot: Slot): Promise<void> {
    const { pid } = slot
    const from = Date.now()
    if (planned.kind === 'vanish') slot.proxy.blackHole()
    await slot.kill()
    await delay(lastWordsMs)
    // Asked after its death: nobody settles any more what it held then.
    const held = await this.#o.cluster.heldBy(pid)
    await delay(planned.forMs)
    await slot.start()
    this.#record({ kind: planned.kind, slot: slot.name, pid, from, to: Date.now(), held })
  }

  async #pause(planned: PlannedFault, slot: Slot): Promise<void> {
    await this.#aim(slot)
    const { pid } = slot
    const from = Date.now()
    slot.signal('SIGSTOP')
    await delay(lastWordsMs)
    const held = await this.#o.cluster.heldBy(pid)
    await this.#wait(planned.forMs)
    slot.signal('SIGCONT')
    this.#record({ kind: 'pause', slot: slot.name, pid, from, to: Date.now(), held })
  }

  async #term(planned: PlannedFault, slot: Slot): Promise<void> {
    const { pid } = slot
    const from = Date.now()
    const exit = await slot.stop(this.#o.drainMs + stopGraceMs)
    const held = await this.#o.cluster.heldBy(pid)
    await delay(planned.forMs)
    await slot.start()
    this.#record({ kind: 'term', slot: slot.name, pid, from, to: Date.now(), held, exit })
  }

  async #network({ kind, pick, forMs }: PlannedFault, slot: Slot): Promise<void> {
    const { pid, proxy } = slot
    const from = Date.now()
    if (kind === 'cut') proxy.cut()
    if (kind === 'delay') proxy.delay(Math.round(delayedByMs[0] + pick * (delayedByMs[1] - delayedByMs[0])))
    if (kind === 'half-open') proxy.halfOpen()
    if (kind === 'black-hole') proxy.blackHole()
    const held = kind === 'cut' ? [] : await this.#o.cluster.heldBy(pid)
    await this.#wait(forMs)
    proxy.restore()
    this.#record({ kind, slot: slot.name, pid, from, to: Date.now(), held })
  }

  /** One server or app is left alone from a while before until it has to accept again: the time it takes is measured. */
  #crash(planned: PlannedFault, which: 'postgres' | 'backend'): Promise<void> {
    const gateways = this.#o.slots.filter((slot) => slot.routes.size > 0)
    const witness = gateways[planned.victim % gateways.length]
    if (witness === undefined) throw new Error('nobody takes requests')
    return witness.exclusively(async () => {
      await witness.start()
      await this.#settleIn(witness, () => this.#o.hasAccepted(witness.pid))
      await delay(acceptingMaxMs + witnessMarginMs)
      const { pid, killedAt, backAt } = await this.#o.cluster.crash(which, planned.pick)
      this.#record({ kind: which, slot: 'postgres', pid, from: killedAt, to: backAt, held: null })
      await delay(acceptingMaxMs + witnessMarginMs)
    })
  }

  /** A process that was just started gets to the point where it works: killing it before shows nothing new. */
  async #settleIn(slot: Slot, isIn: () => boolean = () => true): Promise<void> {
    const until = Date.now() + settleInMaxMs
    while (Date.now() < until && !this.#ended.signal.aborted) {
      if (isIn() && (await this.#o.cluster.isEnlisted(slot.pid))) return
      await delay(lookPauseMs)
    }
  }

  /** Stopped while it is looked at: what it holds then it still holds when it is killed. */
  async #aim(slot: Slot): Promise<boolean> {
    const holds = async (): Promise<boolean> => ((await this.#o.cluster.heldBy(slot.pid))?.length ?? 0) > 0
    const until = Date.now() + aimMaxMs
    while (Date.now() < until && !this.#ended.signal.aborted) {
      if (await holds()) {
        slot.signal('SIGSTOP')
        if (await holds()) return true
        slot.signal('SIGCONT')
      }
      await delay(aimPauseMs)
    }
    return false
  }

  /** Shorter when it is stopped. */
  async #wait(ms: number): Promise<void> {
    await pause(ms, this.#ended.signal)
  }

  #record(fault: Fault): void {
    this.played.push(fault)
    this.#o.note(fault)
  }
}
