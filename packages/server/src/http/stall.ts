/** Finds readers that take nothing of what is written to them. */
import type { Socket } from 'node:net'
import { waitingHere, waitingInKernel } from './socket-queue.js'

/** A stall limit is looked at so many times before it is up. */
export const stallLooks = 8

/** What waited for one reader at the last look, here and in the kernel, and when either last became less. */
export class Stall {
  #here = Number.POSITIVE_INFINITY
  #inKernel = Number.POSITIVE_INFINITY
  #progressMs: number

  constructor(now: number) {
    this.#progressMs = now
  }

  /** False: some of it was taken since the last look, or this is the first. */
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
 * Those of the sockets, for all of which bytes wait, whose reader has taken nothing for `stallMs`. First what costs nothing to see;
 * for those that seem to stand still, the kernel's view: a slow reader may take for a minute from there before anything
 * moves here.
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
