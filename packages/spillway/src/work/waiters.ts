import type { Ticket } from '../store/port.js'

const pollMinMs = 50
const pollMaxMs = 500

interface Waiter {
  resolve(ticket: Ticket | null): void
  timer: NodeJS.Timeout
}

/**
 * Callers that wait for an operation to finish. A settlement in this process wakes them at once; those of other processes
 * are found by one query for all waiters, at growing intervals while nothing changes.
 */
export class Waiters {
  readonly #finished: (ids: readonly string[]) => Promise<Ticket[]>
  readonly #waiting = new Map<string, Set<Waiter>>()
  #poll: NodeJS.Timeout | undefined
  #pollMs = pollMinMs

  constructor(finished: (ids: readonly string[]) => Promise<Ticket[]>) {
    this.#finished = finished
  }

  get size(): number {
    return this.#waiting.size
  }

  /** Null when it is not finished within `ms`. */
  wait(id: string, ms: number, signal?: AbortSignal): Promise<Ticket | null> {
    return new Promise((resolve) => {
      const finish = (ticket: Ticket | null): void => {
        clearTimeout(waiter.timer)
        signal?.removeEventListener('abort', give)
        const waiters = this.#waiting.get(id)
        waiters?.delete(waiter)
        if (waiters?.size === 0) this.#waiting.delete(id)
        resolve(ticket)
      }
      const give = (): void => finish(null)
      const waiter: Waiter = { resolve: finish, timer: setTimeout(give, ms) }
      const waiters = this.#waiting.get(id) ?? new Set()
      waiters.add(waiter)
      this.#waiting.set(id, waiters)
      if (signal?.aborted === true) return give()
      signal?.addEventListener('abort', give, { once: true })
      this.#pollMs = pollMinMs
      this.#schedule()
    })
  }

  /** One of these may have been settled here: look now. */
  hint(id: string): void {
    if (!this.#waiting.has(id)) return
    this.#pollMs = 0
    clearTimeout(this.#poll)
    this.#poll = undefined
    this.#schedule()
  }

  close(): void {
    clearTimeout(this.#poll)
    for (const waiters of [...this.#waiting.values()]) for (const waiter of [...waiters]) waiter.resolve(null)
  }

  #schedule(): void {
    if (this.#poll !== undefined || this.#waiting.size === 0) return
    this.#poll = setTimeout(() => void this.#look(), this.#pollMs)
    this.#pollMs = Math.min(pollMaxMs, Math.max(pollMinMs, this.#pollMs * 1.5))
  }

  async #look(): Promise<void> {
    try {
      const tickets = await this.#finished([...this.#waiting.keys()])
      for (const ticket of tickets) {
        for (const waiter of [...(this.#waiting.get(ticket.id) ?? [])]) waiter.resolve(ticket)
      }
    } catch {
      // The store is not reachable: the waiters continue until their time is up, and callers get the last known state.
    } finally {
      this.#poll = undefined
      this.#schedule()
    }
  }
}
