/** Chance that can be repeated: every choice is drawn from a stream that the seed and a name determine. */

/** 32 bits of a text; FNV-1a, finished so that similar texts are far apart. */
export function hash(text: string): number {
  let h = 0x811c9dc5
  for (let i = 0; i < text.length; i++) h = Math.imul(h ^ text.charCodeAt(i), 0x01000193)
  h = Math.imul(h ^ (h >>> 16), 0x85ebca6b)
  h = Math.imul(h ^ (h >>> 13), 0xc2b2ae35)
  return (h ^ (h >>> 16)) >>> 0
}

export interface Chance {
  /** From 0 up to, not including, 1. */
  next(): number
  /** A whole number from `low` to `high`, both included. */
  between(low: number, high: number): number
  /** True with this probability. */
  happens(probability: number): boolean
  pick<T>(list: readonly T[]): T
}

/** Streams of different names are independent: drawing more from one changes nothing in another. */
export function chance(seed: number, name: string): Chance {
  let state = hash(`${seed}/${name}`)
  const next = (): number => {
    state = (state + 0x6d2b79f5) >>> 0
    let t = Math.imul(state ^ (state >>> 15), state | 1)
    t ^= t + Math.imul(t ^ (t >>> 7), t | 61)
    return ((t ^ (t >>> 14)) >>> 0) / 4_294_967_296
  }
  const between = (low: number, high: number): number => low + Math.floor(next() * (high - low + 1))
  return {
    next,
    between,
    happens: (probability) => next() < probability,
    pick: (list) => {
      const found = list[between(0, list.length - 1)]
      if (found === undefined) throw new RangeError('nothing to pick from')
      return found
    },
  }
}
