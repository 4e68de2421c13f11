import type { Clock } from '../src/clock.js'

export interface VirtualClock extends Clock {
  /** Lets time pass, from one sleeper's end to the next, until nobody sleeps or `isOver`. */
  run(isOver: () => boolean): Promise<void>
}

interface Sleeper {
  atMs: number
  wake(): void
}

/** Time that passes as fast as the program can follow; chance by a seed (mulberry32). */
export function virtualClock(seed: number): VirtualClock {
  let nowMs = 0
  let state = seed
  /** A binary heap by time. */
  const heap: Sleeper[] = []
  const at = (i: number): number => heap[i]?.atMs ?? Number.POSITIVE_INFINITY
  const swap = (a: number, b: number): void => {
    const [first, second] = [heap[a], heap[b]]
    if (first === undefined || second === undefined) return
    heap[a] = second
    heap[b] = first
  }
  const push = (sleeper: Sleeper): void => {
    heap.push(sleeper)
    for (let i = heap.length - 1; i > 0; ) {
      const parent = (i - 1) >> 1
      if (at(parent) <= at(i)) return
      swap(i, parent)
      i = parent
    }
  }
  const pop = (): Sleeper | undefined => {
    swap(0, heap.length - 1)
    const first = heap.pop()
    for (let i = 0; ; ) {
      const [left, right] = [2 * i + 1, 2 * i + 2]
      const least = at(right) < at(left) ? right : left
      if (at(i) <= at(least)) return first
      swap(i, least)
      i = least
    }
  }
  return {
    now: () => nowMs,
    wallMs: () => nowMs,
    sleep: (ms) => new Promise((wake) => push({ atMs: nowMs + ms, wake })),
    random: () => {
      state = (state + 0x6d2b79f5) | 0
      let t = Math.imul(state ^ (state >>> 15), 1 | state)
      t = (t + Math.imul(t ^ (t >>> 7), 61 | t)) ^ t
      return ((t ^ (t >>> 14)) >>> 0) / 4_294_967_296
    },
    async run(isOver) {
      while (!isOver()) {
        // Everything that the last one set off is through, reading an answer's body included.
        await new Promise((resolve) => setImmediate(resolve))
        const next = pop()
        if (next === undefined) return
        nowMs = next.atMs
        next.wake()
      }
    },
  }
}
