import type { Pulse } from '../store/port.js'

/**
 * How many operations are held and how fast they leave, as far as this process knows: from the pulse once a second, and in
 * between from its own accepts and settlements. Used for estimates, and for the limit on held operations. A slot group has
 * its own load: its operations neither wait for the others nor run at their pace.
 */
export class Load {
  readonly #key: string
  readonly #counts: (type: string) => boolean
  readonly #paceMs = new Map<string, number>()
  #held = 0
  #acceptedSince = 0
  /** Those of them that the current heartbeat will include. */
  #acceptedBefore = 0
  #settledSince = 0
  /** The same two for operations that left: for the count, not for the pace. */
  #leftSince = 0
  #leftBefore = 0
  /** Operations per millisecond that leave the queue: here, and in all processes. */
  #ownPerMs = 0
  #drainPerMs = 0

  constructor(name = '', counts: (type: string) => boolean = () => true) {
    this.#key = name === '' ? drainKey : `${drainKey}:${name}`
    this.#counts = counts
  }

  /** Operations in the queue. */
  get depth(): number {
    // Operations accepted elsewhere since the last count may have left here.
    return Math.max(0, this.#held + this.#acceptedSince - this.#leftSince)
  }

  /** Milliseconds per operation of the type; 0 when none has run here. */
  paceMs(type: string): number {
    return this.#paceMs.get(type) ?? 0
  }

  /** The store holds one more operation, waiting or running. */
  accepted(): void {
    this.#acceptedSince++
  }

  /** One operation has left for good. */
  settled(): void {
    this.#settledSince++
    this.#leftSince++
  }

  ran(type: string, ms: number): void {
    const pace = this.#paceMs.get(type)
    this.#paceMs.set(type, pace === undefined ? ms : pace * 0.9 + ms * 0.1)
  }

  /** How long it takes until `count` operations have left, at the recent rate; null if unknown. */
  drainMs(count: number): number | null {
    return this.#drainPerMs > 0 ? Math.max(0, count) / this.#drainPerMs : null
  }

  /** This process's figures for the heartbeat, in operations per 1,000 s. */
  figures(): Record<string, number> {
    this.#acceptedBefore = this.#acceptedSince
    this.#leftBefore = this.#leftSince
    return { [this.#key]: Math.round(this.#ownPerMs * 1_000_000) }
  }

  observe(pulse: Pulse, elapsedMs: number): void {
    this.#held = Object.entries(pulse.held).reduce((sum, [type, n]) => (this.#counts(type) ? sum + n : sum), 0)
    // Changes while the heartbeat was under way are not in its count, or count twice for a second.
    this.#acceptedSince -= this.#acceptedBefore
    this.#acceptedBefore = 0
    this.#leftSince -= this.#leftBefore
    this.#leftBefore = 0
    const rate = elapsedMs > 0 ? this.#settledSince / elapsedMs : 0
    this.#settledSince = 0
    // While nothing is held nothing drains, which says nothing about the possible rate.
    if (this.#held > 0 || rate > 0) this.#ownPerMs = this.#ownPerMs === 0 ? rate : this.#ownPerMs * 0.7 + rate * 0.3
    // The sum of all processes' last heartbeats; at the very first, our own figure is all there is.
    this.#drainPerMs = Math.max(this.#ownPerMs, (pulse.running[this.#key] ?? 0) / 1_000_000)
  }
}

/** Stored beside the types of running operations, whose names cannot start like this. */
const drainKey = '!drain'
