import { hash } from 'node:crypto'
import { defaultPartition } from '@spillway/protocol/wire'

/** A FIFO: order holds within it, never across. */
export interface Lane {
  queue: string
  partition: string
  /** 128 bits of sha256(queue, NUL, partition) as a UUID: no look-up, no text index. Names cannot contain NUL. */
  id: string
}

/** How definitions name a lane: a queue, or a queue and a partition. */
export type LaneName = string | readonly [queue: string, partition: string]

const cacheMax = 10_000
const cache = new Map<string, Lane>()

export function laneOf(name: LaneName): Lane {
  const [queue, partition] = typeof name === 'string' ? [name, defaultPartition] : name
  const key = `${queue}\0${partition}`
  const known = cache.get(key)
  if (known !== undefined) return known
  const lane = { queue, partition, id: digestUuid(key) }
  // Hashing costs 2 µs, and a busy server sees the same lanes again and again.
  if (cache.size >= cacheMax) cache.clear()
  cache.set(key, lane)
  return lane
}

/** The first 128 bits of a text's SHA-256, in UUID form. */
export function digestUuid(text: string): string {
  return uuidOfDigest(hash('sha256', text, 'hex'))
}

/** The same for a text that came in parts: `hex` is its SHA-256. */
export function uuidOfDigest(hex: string): string {
  return `${hex.slice(0, 8)}-${hex.slice(8, 12)}-${hex.slice(12, 16)}-${hex.slice(16, 20)}-${hex.slice(20, 32)}`
}
