/**
 * Start-time fair queueing. Each operation gets a stamp, its virtual start time: the later of the level's virtual time
 * (which the store knows: the smallest stamp that waits) and the finish of its identity's previous one. An identity
 * that brings a million operations has its stamps stretch far into the future; one that brings ten starts at the front.
 *
 * Finish times live in this process alone: an identity that uses several instances is counted per instance, and a
 * restart forgets. Both cost a little fairness and no correctness.
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

  /** What the store made of a stamp: virtual time may have been ahead of us. */
  learn(item: { identity: string; priority: number }, stamp: number): void {
    const key = flowOf(item)
    const finish = stamp + costPerOperation
    if (finish <= (this.#finish.get(key) ?? 0)) return
    // Delete before set keeps the map in order of use, so that the first is the one not seen for longest.
    this.#finish.delete(key)
    this.#finish.set(key, finish)
    if (this.#finish.size > identitiesMax) {
      const oldest = this.#finish.keys().next()
      if (oldest.done !== true) this.#finish.delete(oldest.value)
    }
  }
}

/** Levels are served apart, so an identity's low-priority backlog does not push back its urgent work. */
const flowOf = (item: { identity: string; priority: number }): string => `${item.priority}\0${item.identity}`
