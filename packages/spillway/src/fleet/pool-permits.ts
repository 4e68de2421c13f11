/**
 * The places of one pool that this process holds: what is open at once is bounded by them, per identity and in all, over all
 * instances.
 *
 *   sure ──a change was not confirmed──► unsure ──the next says all that is held──► sure
 *     └───── enlisted anew: places of the old id are nobody's, their permits void ─────┘
 *
 * Who may write: one change at a time is under way, numbered. One of which nobody knows whether it happened, or will yet, is
 * followed by one that states what is held in truth; the store then ignores the former if it comes later. Crash points: the
 * places belong to the process's enlisting and go with it.
 */

import { Flush } from '../accept/flush.js'
import type { IntakeLog } from '../core/settings.js'
import type { Permit } from '../gates/gate.js'
import type { ConnectionChange, Store } from '../store/port.js'

export interface PoolLimits {
  perIdentity: number
  total: number
}

export interface PlacesOptions {
  store: Pick<Store, 'changeConnections'>
  pool: string
  log: Pick<IntakeLog, 'warn'>
  /** The id under which this process is enlisted now. */
  worker(): string
  isEnlisted(): boolean
  timeoutMs: number
}

type Take = ConnectionChange['takes'][number]
type Taken = Permit | 'identity_full' | 'pool_full'

const againMs = 500
const takesMax = 500
const waitingMax = 10_000

export class PoolPermits {
  readonly #o: PlacesOptions
  /** Null: there is something to give back, or to state. */
  readonly #flush: Flush<Take | null, Taken | 'told'>
  readonly #held = new Map<string, number>()
  #gives: string[] = []
  #worker = ''
  #seq = 0
  #unsure = false
  #telling = false
  #again: NodeJS.Timeout | undefined

  constructor(options: PlacesOptions) {
    this.#o = options
    this.#flush = new Flush({
      write: (items) => this.#write(items),
      isPoison: () => false,
      sizeOf: () => 0,
      itemsMax: takesMax,
      bytesMax: 1,
      waitingMax,
      timeoutMs: options.timeoutMs,
      timeoutFault: () => Object.assign(new Error('the write waited too long'), { code: 'timeout' }),
    })
  }

  /** Places that this process holds. */
  get held(): number {
    if (this.#worker !== this.#o.worker()) return 0
    let held = 0
    for (const count of this.#held.values()) held += count
    return held
  }

  /** Throws when the store cannot say. */
  async take(identity: string, limits: PoolLimits): Promise<Taken> {
    if (identity.includes('\0')) throw new RangeError('An identity has no NUL.')
    if (this.#flush.isFull) throw Object.assign(new Error('too many wait for a place'), { code: 'timeout' })
    // As the database keeps it: what is no Unicode would come back as another text.
    const who = Buffer.from(identity).toString()
    const taken = await this.#flush.submit({ identity: who, ...limits })
    if (taken === 'told') throw new Error('a place was asked for and not answered')
    return taken
  }

  async #write(items: readonly (Take | null)[]): Promise<(Taken | 'told')[]> {
    const worker = this.#o.worker()
    if (worker !== this.#worker) this.#enlistedAs(worker)
    const takes = items.filter((item) => item !== null)
    const isStatement = this.#unsure
    const gives = this.#gives.splice(0)
    if (takes.length === 0 && gives.length === 0 && !isStatement) return items.map(() => 'told')
    // What is given back is not held any more: a statement says so by itself.
    const change = {
      seq: ++this.#seq,
      held: isStatement ? new Map(this.#held) : null,
      gives: isStatement ? [] : gives,
      takes,
    }
    this.#unsure = true
    try {
      const outcomes = await this.#o.store.changeConnections(worker, this.#o.pool, change)
      if (outcomes === null || worker !== this.#o.worker()) throw lost()
      this.#unsure = false
      const taken = takes.map(({ identity }, i) => {
        const outcome = outcomes[i] ?? missing()
        return outcome === 'granted' ? this.#permit(worker, identity) : outcome
      })
      let next = 0
      return items.map((item) => (item === null ? 'told' : (taken[next++] ?? missing())))
    } catch (fault) {
      this.#tellLater(fault)
      throw fault
    }
  }

  #enlistedAs(worker: string): void {
    this.#worker = worker
    this.#held.clear()
    this.#gives = []
    this.#seq = 0
    this.#unsure = false
  }

  #permit(worker: string, identity: string): Permit {
    this.#held.set(identity, (this.#held.get(identity) ?? 0) + 1)
    let open = true
    return {
      release: () => {
        if (!open) return
        open = false
        // Given up by the others since: the place went with the id, and those of the new id are other permits'.
        if (worker !== this.#worker || worker !== this.#o.worker()) return
        const left = (this.#held.get(identity) ?? 0) - 1
        if (left > 0) this.#held.set(identity, left)
        else this.#held.delete(identity)
        this.#gives.push(identity)
        this.#tell()
      },
    }
  }

  #tell(): void {
    if (this.#telling) return
    this.#telling = true
    this.#flush
      .submit(null)
      // One that expired behind others, or failed with them: the write itself has seen to the next try.
      .catch((fault: unknown) => this.#tellLater(fault))
      .finally(() => {
        this.#telling = false
        if (this.#gives.length > 0 && this.#again === undefined) this.#tell()
      })
  }

  #tellLater(fault: unknown): void {
    // One that signed off has given back everything.
    if (this.#again !== undefined || !this.#o.isEnlisted()) return
    this.#o.log.warn({ err: fault, pool: this.#o.pool }, 'the places held in a pool could not be told; tried again')
    this.#again = setTimeout(() => {
      this.#again = undefined
      this.#tell()
    }, againMs)
    this.#again.unref()
  }
}

function lost(): Error {
  return Object.assign(new Error('the process was enlisted anew meanwhile'), { code: 'unavailable' })
}

function missing(): never {
  throw new Error('the store did not answer for each place')
}
