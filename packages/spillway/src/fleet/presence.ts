/**
 * This process among the others: enlisted with a lease, a heartbeat each second, and the background tasks that follow it
 * (recovering dead processes, sweeping, announcing work to others).
 *
 *   away ──migrated, enlisted──► ready ──heartbeat says we are not enlisted──► lost ──enlisted again──► ready
 *
 * A failed heartbeat is simply retried: the lease lasts for several of them. When none succeeded for most of the lease,
 * running work is abandoned before others start it.
 */
import { randomUUID } from 'node:crypto'
import type { Pulse, Store } from '../store/port.js'

export interface PresenceOptions {
  store: Store
  leaseMs: number
  retentionMs: number
  name: string
  log: {
    info(fields: object, message: string): void
    warn(fields: object, message: string): void
    error(fields: object, message: string): void
  }
  running(): Record<string, number>
  /** What this process may run, if not every operation of a type: by label, for the others. */
  announced(): Record<string, string>
  onPulse(pulse: Pulse, elapsedMs: number): void
  /** Background tasks that need the store. */
  afterPulse(): Promise<void>
  /** The lease is lost: everything this process held belongs to others. */
  onLost(): void
  onReady(): Promise<void>
  onWake(kind: string): void
  /** Called when notifications from others may have been lost. */
  missed: Iterable<() => void>
}

const beatMs = 1_000
const retryMs = 1_000
/** Others are notified at most this often. */
const announceMs = 20
const giveUpShare = 0.8

export class Presence {
  readonly #o: PresenceOptions
  #worker = randomUUID() as string
  #ready = false
  #enlisted = false
  #stopped = false
  #beatTimer: NodeJS.Timeout | undefined
  #announceTimer: NodeJS.Timeout | undefined
  readonly #toAnnounce = new Set<'ready' | 'cancel'>()
  #lastBeat = 0
  #beating: Promise<void> | null = null
  #duties: Promise<void> | null = null
  #lossLogged = false
  #fault: unknown = null

  constructor(options: PresenceOptions) {
    this.#o = options
  }

  get worker(): string {
    return this.#worker
  }

  get isEnlisted(): boolean {
    return this.#enlisted
  }

  get isReady(): boolean {
    return this.#ready
  }

  /** Why the last call to the database failed; null if it succeeded. */
  get fault(): unknown {
    return this.#fault
  }

  /** Resolves when the database is connected and this process is enlisted. Retries until then. */
  async start(mayRetry: (fault: unknown) => boolean = () => true): Promise<void> {
    for (let isLogged = false; !this.#stopped; isLogged = true) {
      try {
        await this.#o.store.migrate()
        await this.#enlist()
        // Before any settlement, which needs the history partitions.
        await this.#o.store.sweep(this.#o.retentionMs)
        await this.#o.onReady()
        await this.#o.store.listen(
          (kind) => this.#o.onWake(kind),
          () => {
            for (const missed of this.#o.missed) missed()
          },
        )
        this.#ready = true
        if (isLogged) this.#o.log.info({}, 'database connected')
        await this.beat()
        return
      } catch (fault) {
        if (isHopeless(fault) || !mayRetry(fault)) throw fault
        this.#fault = fault
        if (!isLogged) this.#o.log.warn({ err: fault }, 'database not reachable, retrying every second')
        await new Promise((resolve) => setTimeout(resolve, retryMs))
      }
    }
  }

  /** A heartbeat now; concurrent calls share one. */
  beat(): Promise<void> {
    this.#beating ??= this.#beat().finally(() => {
      this.#beating = null
      if (this.#stopped) return
      clearTimeout(this.#beatTimer)
      // Keeps the process alive: a worker without a server has nothing else when its connections are lost.
      this.#beatTimer = setTimeout(() => void this.beat(), beatMs * (0.9 + Math.random() * 0.2))
    })
    return this.#beating
  }

  /** A heartbeat, and the tasks that follow it. */
  async beatAfter(): Promise<void> {
    await this.beat()
    await this.#duties
  }

  /** Notifies the other processes: the first at once, all further ones within 20 ms together at the end of that time. */
  announce(kind: 'ready' | 'cancel'): void {
    if (this.#stopped || !this.#ready) return
    this.#toAnnounce.add(kind)
    if (this.#announceTimer === undefined) this.#announce()
  }

  #announce(): void {
    const kinds = [...this.#toAnnounce]
    this.#toAnnounce.clear()
    this.#announceTimer = kinds.length === 0 ? undefined : setTimeout(() => this.#announce(), announceMs)
    this.#announceTimer?.unref()
    // A lost hint costs one heartbeat interval, not work.
    for (const kind of kinds) this.#o.store.wake(kind).catch(() => undefined)
  }

  async stop(): Promise<void> {
    this.#stopped = true
    clearTimeout(this.#beatTimer)
    clearTimeout(this.#announceTimer)
    await this.#beating
    if (!this.#ready) return
    try {
      await this.#o.store.retire(this.#worker)
    } catch (fault) {
      this.#o.log.warn({ err: fault }, 'could not sign off; others take over when the lease runs out')
    }
    this.#ready = false
    this.#enlisted = false
  }

  async #enlist(): Promise<void> {
    this.#worker = randomUUID()
    await this.#o.store.enlist(this.#worker, this.#o.name, this.#o.leaseMs, this.#o.announced())
    this.#enlisted = true
    this.#lastBeat = performance.now()
    this.#lossLogged = false
  }

  async #beat(): Promise<void> {
    const { store, log } = this.#o
    try {
      const pulse = await store.pulse(this.#worker, this.#o.leaseMs, this.#o.running())
      const elapsedMs = performance.now() - this.#lastBeat
      if (!pulse.alive) {
        log.error({ worker: this.#worker }, 'lease lost: other processes took over the lanes of this process')
        this.#o.onLost()
        await this.#enlist()
      }
      this.#lastBeat = performance.now()
      this.#lossLogged = false
      if (this.#fault !== null) log.info({}, 'database reachable again')
      this.#fault = null
      this.#o.onPulse(pulse, elapsedMs)
      this.#duties ??= this.#runDuties(pulse.lostWorkers > 0)
    } catch (fault) {
      if (this.#fault === null && !this.#stopped) log.warn({ err: fault }, 'database not reachable')
      this.#fault = fault
      if (!this.#lossLogged && performance.now() - this.#lastBeat > this.#o.leaseMs * giveUpShare) {
        this.#lossLogged = true
        log.error({}, 'no heartbeat succeeded for most of the lease; operations that run here are aborted')
        this.#o.onLost()
      }
    }
  }

  /** Concurrent with the heartbeat, never before it: a task may wait for the store longer than the lease lasts. */
  async #runDuties(someAreLost: boolean): Promise<void> {
    try {
      if (someAreLost) await this.#recover()
      await this.#o.afterPulse()
    } catch (fault) {
      if (!this.#stopped) this.#o.log.warn({ err: fault }, 'a heartbeat task failed, retrying with the next heartbeat')
    } finally {
      this.#duties = null
    }
  }

  async #recover(): Promise<void> {
    for (;;) {
      const dead = await this.#o.store.recover()
      if (dead === null) return
      this.#o.log.warn(
        { worker: dead.worker, name: dead.name, lanes: dead.lanes },
        'took over the lanes of a dead process',
      )
      this.#o.onWake('ready')
    }
  }
}

/** Retrying does not help: the database is too old, or newer than this program. */
function isHopeless(fault: unknown): boolean {
  const code = typeof fault === 'object' && fault !== null && 'code' in fault ? fault.code : undefined
  return ['server_version', 'server_encoding', 'legacy', 'newer', 'edited', 'bad_list', 'failed'].includes(String(code))
}
