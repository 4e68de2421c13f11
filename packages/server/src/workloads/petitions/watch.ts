/**
 * Callers that wait for a petition to change. A commit that changes one sends its id to all instances. Such a hint may be
 * lost, so one query for all of them runs each second. A caller is registered before the row is read, so that no change is
 * missed.
 */
export interface WatchOptions {
  /** The ids whose version differs from the one that the caller waits on. */
  changed(waiting: ReadonlyMap<string, number>): Promise<string[]>
  pollMs?: number
}

interface Waiter {
  version: number
  resolve(isSign: boolean): void
}

const pollMsDefault = 1_000

export class Watch {
  readonly #options: WatchOptions
  readonly #waiting = new Map<string, Set<Waiter>>()
  #timer: NodeJS.Timeout | undefined
  #closed = false

  constructor(options: WatchOptions) {
    this.#options = options
  }

  get size(): number {
    return this.#waiting.size
  }

  /** True at the first sign that it is no longer at `version`; false if the wait ended without one. */
  wait(id: string, version: number, signal: AbortSignal): Promise<boolean> {
    return new Promise((resolve) => {
      const waiters = this.#waiting.get(id) ?? new Set<Waiter>()
      const finish = (isSign: boolean): void => {
        waiters.delete(waiter)
        if (waiters.size === 0 && this.#waiting.get(id) === waiters) this.#waiting.delete(id)
        signal.removeEventListener('abort', giveUp)
        resolve(isSign)
      }
      const giveUp = (): void => finish(false)
      const waiter: Waiter = { version, resolve: finish }
      if (signal.aborted || this.#closed) return resolve(false)
      signal.addEventListener('abort', giveUp)
      waiters.add(waiter)
      this.#waiting.set(id, waiters)
      this.#schedule()
    })
  }

  /** A change of this petition was committed. */
  notice(id: string): void {
    this.#end(id, true)
  }

  close(): void {
    this.#closed = true
    clearTimeout(this.#timer)
    for (const id of [...this.#waiting.keys()]) this.#end(id, false)
  }

  #end(id: string, isSign: boolean): void {
    for (const waiter of [...(this.#waiting.get(id) ?? [])]) waiter.resolve(isSign)
  }

  #schedule(): void {
    if (this.#timer !== undefined || this.#waiting.size === 0) return
    this.#timer = setTimeout(() => void this.#look(), this.#options.pollMs ?? pollMsDefault)
    this.#timer.unref()
  }

  async #look(): Promise<void> {
    const versions = new Map<string, number>()
    for (const [id, waiters] of this.#waiting) for (const { version } of waiters) versions.set(id, version)
    try {
      for (const id of versions.size === 0 ? [] : await this.#options.changed(versions)) this.notice(id)
    } catch {
      // The store is unavailable: callers keep waiting until their timeout, and the read after it reports the fault.
    } finally {
      this.#timer = undefined
      this.#schedule()
    }
  }
}
