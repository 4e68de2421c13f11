/**
 * The permits of one pool that this process holds. They limit how many are open at once, per identity and in total, over all
 * instances.
 *
 *   sure ──a change was not confirmed──► unsure ──the next lists all that is held──► sure
 *     └───── enlisted again under a new id: all permits of the old id are now void ─────┘
 *
 * Who may write: one numbered change is under way at a time. A change with an unknown outcome is followed by one that states
 * all that is held; the store then ignores the former if it arrives later. Crash points: permits belong to the process's
 * enlistment and end with it.
 */

import { Flush } from '../accept/flush.js'
import type { IntakeLog } from '../core/settings.js'
import type { Permit } from '../gates/gate.js'
import type { ConnectionChange, Store } from '../store/port.js'

export interface PoolLimits {
  perIdentity: number
  total: number
}

export interface PoolPermitsOptions {
  store: Pick<Store, 'changeConnections'>
  pool: string
  log: Pick<IntakeLog, 'warn'>
  /** This process's current id. */
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
  readonly #o: PoolPermitsOptions
  /** Null: a release, or a statement of all that is held. */
  readonly #flush: Flush<Take | null, Taken | 'written'>
  readonly #held = new Map<string, number>()
  #gives: string[] = []
  #worker = ''
  #seq = 0
  #unsure = false
  #reporting = false
  #again: NodeJS.Timeout | undefined

  constructor(options: PoolPermitsOptions) {
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

  /** Permits that this process holds. */
  get held(): number {
    if (this.#worker !== this.#o.worker()) return 0
    let held = 0
    for (const count of this.#held.values()) held += count
    return held
  }

  /** Throws when the store does not answer. */
  async take(identity: string, limits: PoolLimits): Promise<Taken> {
    if (identity.includes('\0')) throw new RangeError('An identity has no NUL.')
    if (this.#flush.isFull) throw Object.assign(new Error('too many requests wait for a permit'), { code: 'timeout' })
    // As the database stores it: invalid Unicode would come back as another text.
    const who = Buffer.from(identity).toString()
    const taken = await this.#flush.submit({ identity: who, ...limits })
    if (taken === 'written') throw new Error('a permit was asked for and not answered')
    return taken
  }

  async #write(items: readonly (Take | null)[]): Promise<(Taken | 'written')[]> {
    const worker = this.#o.worker()
    if (worker !== this.#worker) this.#enlistedAs(worker)
    const takes = items.filter((item) => item !== null)
    const isStatement = this.#unsure
    const gives = this.#gives.splice(0)
    if (takes.length === 0 && gives.length === 0 && !isStatement) return items.map(() => 'written')
    // A released permit is not held any more, so a statement of all that is held covers it.
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
      return items.map((item) => (item === null ? 'written' : (taken[next++] ?? missing())))
    } catch (fault) {
      this.#reportLater(fault)
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
        // The lease was lost since: the permit ended with the old id, and those of the new id are different permits.
        if (worker !== this.#worker || worker !== this.#o.worker()) return
        const left = (this.#held.get(identity) ?? 0) - 1
        if (left > 0) this.#held.set(identity, left)
        else this.#held.delete(identity)
        this.#gives.push(identity)
        this.#report()
      },
    }
  }

  #report(): void {
    if (this.#reporting) return
    this.#reporting = true
    this.#flush
      .submit(null)
      // It expired behind others, or failed with them: the write itself schedules the next try.
      .catch((fault: unknown) => this.#reportLater(fault))
      .finally(() => {
        this.#reporting = false
        if (this.#gives.length > 0 && this.#again === undefined) this.#report()
      })
  }

  #reportLater(fault: unknown): void {
    // A process that signed off has released everything.
    if (this.#again !== undefined || !this.#o.isEnlisted()) return
    this.#o.log.warn({ err: fault, pool: this.#o.pool }, 'could not report the permits held in a pool, retrying')
    this.#again = setTimeout(() => {
      this.#again = undefined
      this.#report()
    }, againMs)
    this.#again.unref()
  }
}

function lost(): Error {
  return Object.assign(new Error('the process was enlisted again meanwhile'), { code: 'unavailable' })
}

function missing(): never {
  throw new Error('the store did not answer for each permit')
}
