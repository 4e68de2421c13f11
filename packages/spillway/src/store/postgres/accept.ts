import type { AcceptContext, Accepted, AcceptItem, RateState, StoredAnswer, Tx } from '../port.js'

/** Rows of `accept` and its kin as the driver gives them. */
interface AcceptRow extends Record<string, unknown> {
  item: number
  verdict: number
  fence: number | null
  seq: number
  place: number
  wait_ms: number
  reason: 'maintaining_order' | 'system_busy' | 'requested'
  stamp: number
  answer: StoredAnswer | null
  op: string | null
  tier: number | null
  rate_left: number
  rate_reset_ms: number
}

export const acceptSql = (schema: string): string =>
  `SELECT * FROM ${schema}.accept(${Array.from({ length: 33 }, (_, i) => `$${i + 1}`).join(',')})`

/** Rows a process writes to `tallies`: one per connection that counts, so that they never wait for each other. */
export const parts = { accept: 0, apply: 1, step: 2, within: -1 } as const

/**
 * One call for all items. The function wants them grouped by lane, lanes in id order (the lock order); the answers come
 * back in the order of `items`.
 */
export async function accept(
  query: Tx['query'],
  sql: string,
  items: readonly AcceptItem[],
  context: AcceptContext,
  mode: { part: number; apply: boolean },
): Promise<Accepted[]> {
  const order = items.map((_, index) => index)
  order.sort((a, b) => {
    const left = at(items, a).lane
    const right = at(items, b).lane
    return left < right ? -1 : left > right ? 1 : a - b
  })
  const sorted = order.map((index) => at(items, index))
  const { rows } = await query<AcceptRow>(sql, acceptValues(sorted, context, mode))
  const out = new Array<Accepted>(items.length)
  for (const row of rows) {
    const index = at(order, row.item - 1)
    out[index] = toAccepted(row, firstTier(sorted, row.item - 1))
  }
  return out
}

function acceptValues(
  sorted: readonly AcceptItem[],
  context: AcceptContext,
  mode: { part: number; apply: boolean },
): unknown[] {
  const lanes: string[] = []
  const queues: string[] = []
  const partitions: string[] = []
  const perLane: number[] = []
  const laneOf: number[] = []
  const inLane: number[] = []
  const rateItem: number[] = []
  const rateKey: string[] = []
  const rateLimit: number[] = []
  const rateMinutes: number[] = []
  let keyed = false
  let gated = false
  let haltable = false
  for (const [index, item] of sorted.entries()) {
    if (lanes[lanes.length - 1] !== item.lane) {
      lanes.push(item.lane)
      queues.push(item.queue)
      partitions.push(item.partition)
      perLane.push(0)
    }
    const n = (perLane[perLane.length - 1] ?? 0) + 1
    perLane[perLane.length - 1] = n
    laneOf.push(lanes.length)
    inLane.push(n)
    keyed ||= item.idempotency !== null
    gated ||= item.gate !== null
    haltable ||= item.halt !== null
    for (const rate of item.rates) {
      rateItem.push(index + 1)
      rateKey.push(rate.key)
      rateLimit.push(rate.limit)
      rateMinutes.push(rate.windowMinutes)
    }
  }
  const column = <T>(of: (item: AcceptItem) => T): T[] => sorted.map(of)
  return [
    context.worker,
    mode.part,
    mode.apply,
    lanes,
    queues,
    partitions,
    perLane,
    laneOf,
    inLane,
    column((i) => i.id),
    column((i) => i.type),
    column((i) => i.priority),
    column((i) => i.stamp),
    column((i) => i.lead),
    column((i) => i.identity),
    column((i) => i.payload),
    column((i) => i.delayMs),
    column((i) => i.maxAttempts),
    column((i) => i.timeoutMs),
    column((i) => i.traceparent),
    column((i) => i.execute),
    column((i) => i.reason),
    column((i) => i.paceMs),
    Math.round(context.backlogMs),
    keyed ? column((i) => i.idempotency?.key ?? null) : [],
    keyed ? column((i) => i.idempotency?.request ?? null) : [],
    context.keyTtlMs,
    gated ? column((i) => i.gate) : [],
    haltable ? column((i) => i.halt) : [],
    rateItem,
    rateKey,
    rateLimit,
    rateMinutes,
  ]
}

/** Tiers are numbered over the whole flush; this is the number of the item's first. */
function firstTier(sorted: readonly AcceptItem[], index: number): number {
  let before = 0
  for (let i = 0; i < index; i++) before += at(sorted, i).rates.length
  return before
}

function toAccepted(row: AcceptRow, tiersBefore: number): Accepted {
  const rate: RateState | null =
    row.tier === null ? null : { tier: row.tier - 1 - tiersBefore, left: row.rate_left, resetMs: row.rate_reset_ms }
  const { seq, stamp } = row
  switch (row.verdict) {
    case 0:
      return { verdict: 'queue', seq, stamp, rate, place: row.place, waitMs: row.wait_ms, reason: row.reason }
    case 1:
      return { verdict: 'execute', seq, stamp, rate, fence: row.fence ?? unexpected('fence') }
    case 2:
      return { verdict: 'apply', seq, stamp, rate }
    case 3:
      return { verdict: 'refuse', by: 'capacity', rate: null }
    case 4:
      return { verdict: 'refuse', by: 'rate', rate: rate ?? unexpected('rate') }
    case 5:
      return { verdict: 'refuse', by: 'halt', rate: null }
    case 6:
      return {
        verdict: 'replay',
        operationId: row.op ?? unexpected('op'),
        answer: row.answer ?? unexpected('answer'),
      }
    case 7:
      return { verdict: 'mismatch' }
    case 8:
      return { verdict: 'in_progress' }
    default:
      throw new Error(`accept answered with the unknown verdict ${row.verdict}`)
  }
}

function unexpected(what: string): never {
  throw new Error(`accept answered without ${what}`)
}

function at<T>(list: readonly T[], index: number): T {
  const value = list[index]
  if (value === undefined) throw new RangeError(`no item ${index} of ${list.length}`)
  return value
}
