/**
 * Callers that wait for a petition to change. A commit that changes one sends its id to all instances. Such a hint may be
 * lost, so one query for all of them runs each second. A caller is registered before the row is read, so that no change is
 * missed.
 */
import { type Periodic, periodic } from 'spillway/workload'

export interface WatchOptions {
  /** The ids whose version differs from the one that the caller waits on. */
  changed(waiting: ReadonlyMap<string, number>): Promise<string[]>
  pollMs?: number
}

interface Waiter {
  version: number
  finish(isSign: boolean): void
}

const pollMsDefault = 1_000

export class Watch {
  readonly #changed: WatchOptions['changed']
  readonly #waiting = new Map<string, Set<Waiter>>()
  readonly #poll: Periodic
  #closed = false

  constructor({ changed, pollMs = pollMsDefault }: WatchOptions) {
    this.#changed = changed
    // The store is unavailable: callers keep waiting until their timeout, and the read after it reports the fault.
    this.#poll = periodic(pollMs, () => this.#look(), { onFault: () => undefined })
  }

  get size(): number {
    return this.#waiting.size
  }

  /** True at the first sign that it is no longer at `version`; false if the wait ended without one. */
  wait(id: string, version: number, signal: AbortSignal): Promise<boolean> {
    return new Promise((resolve) => {
      if (signal.aborted || this.#closed) return resolve(false)
      const waiters = this.#waiting.get(id) ?? new Set<Waiter>()
      const leave = (): void => waiter.finish(false)
      const waiter: Waiter = {
        version,
        finish: (isSign) => {
          waiters.delete(waiter)
          if (waiters.size === 0 && this.#waiting.get(id) === waiters) this.#waiting.delete(id)
          signal.removeEventListener('abort', leave)
          resolve(isSign)
        },
      }
      signal.addEventListener('abort', leave)
      this.#waiting.set(id, waiters.add(waiter))
    })
  }

  /** A change of this petition was committed. */
  notice(id: string): void {
    this.#end(id, true)
  }

  close(): void {
    this.#closed = true
    void this.#poll.stop()
    for (const id of [...this.#waiting.keys()]) this.#end(id, false)
  }

  #end(id: string, isSign: boolean): void {
    for (const waiter of [...(this.#waiting.get(id) ?? [])]) waiter.finish(isSign)
  }

  async #look(): Promise<void> {
    if (this.#waiting.size === 0) return
    const versions = new Map<string, number>()
    for (const [id, waiters] of this.#waiting) for (const { version } of waiters) versions.set(id, version)
    for (const id of await this.#changed(versions)) this.notice(id)
  }
}
