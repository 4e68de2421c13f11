/**
 * In front of a slot group: requests that find no free slot wait here for a moment, because most runs are short, and an
 * answer in 100 ms is better than a ticket.
 *
 *   waiting ──a slot is free──► slot
 *      ├──its time is over──► late
 *      ├──another one comes while the room is full──► full: the oldest leaves
 *      ├──its caller leaves──► gone
 *      └──the process drains──► closed
 *
 * First come, first served within an identity; identities take turns.
 */
export type RoomEnd = 'slot' | 'late' | 'full' | 'gone' | 'closed'

interface Entry {
  identity: string
  leave(end: RoomEnd): void
}

export interface RoomRequest {
  identity: string
  /** The longest wait. */
  waitMs: number
  /** How many may wait. */
  most: number
  signal?: AbortSignal | undefined
}

export class WaitingRoom {
  /** In the order of arrival. */
  readonly #entries = new Set<Entry>()
  /** By identity, in the order of their turns. */
  readonly #flows = new Map<string, Set<Entry>>()
  #closed = false
  /** How many wait. A field: each settled operation looks at it. */
  size = 0

  /** A full room has room for an identity that has nobody in it. */
  hasRoomFor(identity: string, most: number): boolean {
    return !this.#closed && (this.size < most || !this.#flows.has(identity))
  }

  wait({ identity, waitMs, most, signal }: RoomRequest): Promise<RoomEnd> {
    if (this.#closed) return Promise.resolve('closed')
    if (signal?.aborted === true) return Promise.resolve('gone')
    if (this.size >= most) this.#oldest()?.leave('full')
    return new Promise((resolve) => {
      const gone = (): void => entry.leave('gone')
      const entry: Entry = {
        identity,
        leave: (end) => {
          clearTimeout(timer)
          signal?.removeEventListener('abort', gone)
          this.#remove(entry)
          resolve(end)
        },
      }
      const timer = setTimeout(() => entry.leave('late'), waitMs)
      signal?.addEventListener('abort', gone, { once: true })
      this.#entries.add(entry)
      this.size++
      const flow = this.#flows.get(identity)
      if (flow === undefined) this.#flows.set(identity, new Set([entry]))
      else flow.add(entry)
    })
  }

  /** Gives slots to those who wait, for as long as `take` gets one. */
  admit(take: () => boolean): void {
    while (this.size > 0 && take()) this.#next()?.leave('slot')
  }

  /** Sends everybody away, now and later. */
  close(): void {
    this.#closed = true
    for (const entry of [...this.#entries]) entry.leave('closed')
  }

  #oldest(): Entry | undefined {
    return this.#entries.values().next().value
  }

  /** The oldest of the identity whose turn it is; the identity then goes to the end. */
  #next(): Entry | undefined {
    const turn = this.#flows.entries().next().value
    if (turn === undefined) return undefined
    const [identity, flow] = turn
    this.#flows.delete(identity)
    this.#flows.set(identity, flow)
    return flow.values().next().value
  }

  #remove(entry: Entry): void {
    if (this.#entries.delete(entry)) this.size--
    const flow = this.#flows.get(entry.identity)
    flow?.delete(entry)
    if (flow?.size === 0) this.#flows.delete(entry.identity)
  }
}
