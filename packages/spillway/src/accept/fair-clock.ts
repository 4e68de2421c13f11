/**
 * Start-time fair queueing. Each operation gets a stamp, its virtual start time: the later of the level's virtual time (from
 * the store: the smallest stamp that waits) and the finish of its identity's previous one. The stamps of an identity that
 * brings a million operations reach far into the future; an identity that brings ten starts at the front.
 *
 * Finish times are kept in this process only: an identity that uses several instances is counted per instance, and a restart
 * forgets. Both cost a little fairness and no correctness.
 */
const costPerOperation = 1_000
const identitiesMax = 20_000

export class FairClock {
  readonly #finish = new Map<string, number>()

  /** Stamps for the items of one flush, in order. `lead` is the distance from the identity's first in this flush. */
  stamp(items: readonly { identity: string; priority: number; stamp: number; lead: number }[]): void {
    const leads = new Map<string, number>()
    for (const item of items) {
      const key = flowOf(item)
      const lead = leads.get(key) ?? 0
      leads.set(key, lead + costPerOperation)
      item.lead = lead
      item.stamp = (this.#finish.get(key) ?? 0) + lead
    }
  }

  /** The stamp that the store assigned: virtual time may have been ahead of ours. */
  learn(item: { identity: string; priority: number }, stamp: number): void {
    const key = flowOf(item)
    const finish = stamp + costPerOperation
    if (finish <= (this.#finish.get(key) ?? 0)) return
    // Delete before set keeps the map in order of use, so that the first is the least recently used.
    this.#finish.delete(key)
    this.#finish.set(key, finish)
    if (this.#finish.size > identitiesMax) {
      const oldest = this.#finish.keys().next()
      if (oldest.done !== true) this.#finish.delete(oldest.value)
    }
  }
}

/** Priority levels are served separately, so an identity's low-priority backlog does not delay its urgent work. */
const flowOf = (item: { identity: string; priority: number }): string => `${item.priority}\0${item.identity}`
