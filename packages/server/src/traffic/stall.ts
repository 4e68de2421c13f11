/** Finds clients that do not read their answers. */
import type { Socket } from 'node:net'
import { waitingHere, waitingInKernel } from './socket-queue.js'

/** How many times a stall limit is checked before it expires. */
const stallLooks = 8

/** The bytes waiting for one reader at the last check, here and in the kernel, and when either number last fell. */
interface Waiting {
  here: number
  inKernel: number
  progressMs: number
}

export interface StallWatchOptions<T> {
  stallMs: number
  /** Null or undefined: it is closed. */
  socketOf(item: T): Socket | null | undefined
  /** Called once; then the item is no longer watched. */
  onStalled(item: T): void
}

/**
 * Items with bytes waiting for their reader. Each is watched until it is deleted, or until its reader has taken nothing for
 * `stallMs`.
 */
export class StallWatch<T> {
  readonly #o: StallWatchOptions<T>
  readonly #watched = new Map<T, Waiting>()

  constructor(options: StallWatchOptions<T>) {
    this.#o = options
  }

  /** How often to call `look`. */
  get everyMs(): number {
    return Math.max(1, this.#o.stallMs / stallLooks)
  }

  get size(): number {
    return this.#watched.size
  }

  add(item: T): void {
    if (this.#watched.has(item)) return
    const [here, inKernel] = [Number.POSITIVE_INFINITY, Number.POSITIVE_INFINITY]
    this.#watched.set(item, { here, inKernel, progressMs: performance.now() })
  }

  delete(item: T): void {
    this.#watched.delete(item)
  }

  /**
   * The cheap check comes first. Sockets that seem stalled are then checked in the kernel: a slow reader may drain the
   * kernel's buffer for a minute before anything moves here.
   */
  async look(): Promise<void> {
    const suspects: { item: T; socket: Socket; waiting: Waiting }[] = []
    for (const [item, waiting] of this.#watched) {
      const socket = this.#o.socketOf(item)
      if (socket && hasTakenNothing(waiting, waitingHere(socket))) suspects.push({ item, socket, waiting })
    }
    if (suspects.length === 0) return
    const inKernel = await waitingInKernel(suspects.map(({ socket }) => socket))
    for (const { item, socket, waiting } of suspects) {
      noteKernel(waiting, inKernel.get(socket))
      // It may have drained or closed meanwhile.
      if (performance.now() - waiting.progressMs < this.#o.stallMs || this.#watched.get(item) !== waiting) continue
      this.#watched.delete(item)
      this.#o.onStalled(item)
    }
  }
}

/** False: the reader took something since the last check, or this is the first check. */
function hasTakenNothing(waiting: Waiting, here: number): boolean {
  const isFirst = waiting.here === Number.POSITIVE_INFINITY
  const isLess = here < waiting.here
  waiting.here = here
  if (!isLess) return true
  if (!isFirst) waiting.progressMs = performance.now()
  waiting.inKernel = Number.POSITIVE_INFINITY
  return false
}

function noteKernel(waiting: Waiting, inKernel: number | undefined): void {
  if (inKernel === undefined) return
  const isFirst = waiting.inKernel === Number.POSITIVE_INFINITY
  if (inKernel < waiting.inKernel && !isFirst) waiting.progressMs = performance.now()
  waiting.inKernel = inKernel
}
