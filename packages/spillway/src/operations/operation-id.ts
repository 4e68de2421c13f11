import { randomFillSync } from 'node:crypto'

const poolBytes = 10 * 256
const pool = Buffer.alloc(poolBytes)
let used = poolBytes
let lastMs = 0
let counter = 0

/**
 * UUIDv7, growing within this process: 48 bits of milliseconds, a 12-bit counter that starts low each millisecond, 62
 * random bits. It is an id and the order of lists, never the order of a lane.
 */
export function newOperationId(nowMs: number = Date.now()): string {
  if (nowMs > lastMs) {
    lastMs = nowMs
    counter = 0
  } else if (++counter > 0xfff) {
    // More than 4,096 in a millisecond, or the clock went back: borrow the next one.
    lastMs++
    counter = 0
  }
  if (used + 10 > poolBytes) {
    randomFillSync(pool)
    used = 0
  }
  const time = lastMs.toString(16).padStart(12, '0')
  const random = pool.toString('hex', used, used + 8)
  used += 8
  const variant = ((Number.parseInt(random[0] ?? '0', 16) & 0x3) | 0x8).toString(16)
  return `${time.slice(0, 8)}-${time.slice(8)}-7${counter.toString(16).padStart(3, '0')}-${variant}${random.slice(1, 4)}-${random.slice(4)}`
}

const uuidPattern = /^[0-9a-f]{8}-[0-9a-f]{4}-[0-9a-f]{4}-[0-9a-f]{4}-[0-9a-f]{12}$/i

export const isUuid = (text: string): boolean => uuidPattern.test(text)
