/** The ids of operations and lanes. */
import { hash, randomFillSync } from 'node:crypto'
import { defaultPartition } from '@spillway/protocol/wire'
import type { Rule } from './options.js'

/** A FIFO: order holds within it, never across. */
export interface Lane {
  queue: string
  partition: string
  /** 128 bits of sha256(queue, NUL, partition) as a UUID: no look-up, no text index. Names cannot contain NUL. */
  id: string
}

/** How definitions name a lane: a queue, or a queue and a partition. */
export type LaneName = string | readonly [queue: string, partition: string]

/** How a definition names a key: with the operation's type as queue, or with a queue of its own. */
export type KeyName = string | readonly [queue: string, key: string]

export const isLaneName: Rule = (lane) => {
  const names = Array.isArray(lane) && lane.length === 2 ? lane : [lane]
  return names.every((name) => typeof name === 'string') ? null : 'a queue name, or [queue, partition]'
}

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

/** Random hex digits for 512 ids at a time: one system call and one conversion for all of them. */
const idsPerPool = 512
const pool = Buffer.alloc(idsPerPool * 8)
let digits = ''
let used = 0
let lastMs = 0
let counter = 0
/** The first 15 characters, which encode the millisecond. */
let prefix = ''
const variants = ['8', '9', 'a', 'b'] as const

/**
 * UUIDv7, growing within this process: 48 bits of milliseconds, a 12-bit counter that starts low each millisecond, 62
 * random bits. It is an id and the order of lists, never the order of a lane.
 */
export function newOperationId(nowMs: number = Date.now()): string {
  if (nowMs > lastMs) {
    startMs(nowMs)
  } else if (++counter > 0xfff) {
    // More than 4,096 in a millisecond, or the clock went back: borrow the next millisecond.
    startMs(lastMs + 1)
  }
  if (used === digits.length) {
    digits = randomFillSync(pool).toString('hex')
    used = 0
  }
  const at = used
  used += 16
  const variant = variants[Number.parseInt(digits.charAt(at), 16) & 3] ?? '8'
  const count = counter < 16 ? `00${counter.toString(16)}` : counter.toString(16).padStart(3, '0')
  return `${prefix}${count}-${variant}${digits.slice(at + 1, at + 4)}-${digits.slice(at + 4, at + 16)}`
}

function startMs(ms: number): void {
  lastMs = ms
  counter = 0
  const time = ms.toString(16).padStart(12, '0')
  prefix = `${time.slice(0, 8)}-${time.slice(8)}-7`
}

const uuidPattern = /^[0-9a-f]{8}-[0-9a-f]{4}-[0-9a-f]{4}-[0-9a-f]{4}-[0-9a-f]{12}$/i

export const isUuid = (text: string): boolean => uuidPattern.test(text)
