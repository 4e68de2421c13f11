/** Finds clients that do not read their answers. */
import type { Socket } from 'node:net'
import { waitingHere, waitingInKernel } from './socket-queue.js'

/** How many times a stall limit is checked before it expires. */
export const stallLooks = 8

/** The bytes waiting for one reader at the last check, here and in the kernel, and when either number last fell. */
export class Stall {
  #here = Number.POSITIVE_INFINITY
  #inKernel = Number.POSITIVE_INFINITY
  #progressMs: number

  constructor(now: number) {
    this.#progressMs = now
  }

  /** False: the reader took something since the last check, or this is the first check. */
  hasTakenNothing(here: number, now: number): boolean {
    const isFirst = this.#here === Number.POSITIVE_INFINITY
    const isLess = here < this.#here
    this.#here = here
    if (!isLess) return true
    if (!isFirst) this.#progressMs = now
    this.#inKernel = Number.POSITIVE_INFINITY
    return false
  }

  lookedAtKernel(waiting: number | undefined, now: number): void {
    if (waiting === undefined) return
    if (waiting < this.#inKernel && this.#inKernel !== Number.POSITIVE_INFINITY) this.#progressMs = now
    this.#inKernel = waiting
  }

  standsSince(): number {
    return this.#progressMs
  }
}

/**
 * Returns the watched sockets, all with bytes waiting, whose reader has taken nothing for `stallMs`. The cheap check comes
 * first. Sockets that seem stalled are then checked in the kernel: a slow reader may drain the kernel's buffer for a minute
 * before anything moves here.
 */
export async function findStalled(
  watched: ReadonlyMap<Socket, Stall>,
  stallMs: number,
  now: () => number,
): Promise<Socket[]> {
  const suspects: [Socket, Stall][] = []
  for (const [socket, stall] of watched) {
    if (stall.hasTakenNothing(waitingHere(socket), now())) suspects.push([socket, stall])
  }
  if (suspects.length === 0) return []
  const inKernel = await waitingInKernel(suspects.map(([socket]) => socket))
  return suspects.flatMap(([socket, stall]) => {
    const at = now()
    stall.lookedAtKernel(inKernel.get(socket), at)
    return at - stall.standsSince() >= stallMs ? [socket] : []
  })
}
