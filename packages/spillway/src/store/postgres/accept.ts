import type {
  AcceptContext,
  Accepted,
  AcceptItem,
  RateCheck,
  RateState,
  StoredAnswer,
  StoreEffect,
  Tx,
} from '../port.js'
import { arrayOf, jsonSeparator, plainArray, textArray } from './arrays.js'

/** The row of `accept`: an element per item, in the order in which they were given. */
interface AcceptRow extends Record<string, unknown> {
  verdicts: number[]
  fence: number | null
  seqs: number[]
  places: number[]
  waits_ms: number[]
  reasons: ('maintaining_order' | 'system_busy' | 'requested' | 'still_running')[]
  stamps: number[]
  answers: (StoredAnswer | null)[] | null
  ops: (string | null)[] | null
  tiers: (number | null)[] | null
  rates_left: number[] | null
  rates_reset_ms: number[] | null
  /** What time it is there; null without rates. */
  at_ms: number | null
  /** What the effect told, if there was one. */
  told?: unknown[]
}

const parameters = 41
/** Where these stand among the parameters. */
const ids = 11
const payloads = 17
const keys = 28
const toApply = 2

/**
 * The payloads go as one text with separators: quoting each for an array literal, and reading that literal again, costs
 * more than all other parameters together.
 */
export const acceptSql = (schema: string): string => `SELECT * FROM ${acceptCall(schema)}`

const acceptCall = (schema: string): string => {
  const call = Array.from({ length: parameters }, (_, i) =>
    i + 1 === payloads ? `string_to_array($${payloads}, E'\\x1e')` : `$${i + 1}`,
  )
  return `${schema}.accept(${call.join(',')})`
}

/**
 * Accepting, the effect and the answers for its keys in one statement. Functions in FROM are called once each, in the order
 * in which they need each other.
 */
export const effectSql = (schema: string, name: string, values: number): string => {
  const own = Array.from({ length: values }, (_, i) => `, $${parameters + i + 1}`).join('')
  return `SELECT a.*, array_to_json(e.told) AS told FROM ${acceptCall(schema)} a, ${name}(a.verdicts, a.seqs${own}) e(told),
    ${schema}.keys_applied($${keys}, $${ids}, a.verdicts, e.told) k`
}

const appliedSql = (name: string, values: number): string =>
  `SELECT ${name}($1, $2${Array.from({ length: values }, (_, i) => `, $${i + 3}`).join('')}) AS told`

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
  const order = inLockOrder(items)
  const sorted = order.map((index) => at(items, index))
  const { rows } = await query<AcceptRow>(sql, acceptValues(sorted, context, mode))
  return toAll(rows[0] ?? unexpected('a row'), order, sorted)
}

export async function acceptWithEffect(
  query: Tx['query'],
  sqlOf: (name: string, values: number) => string,
  items: readonly AcceptItem[],
  context: AcceptContext,
  effect: StoreEffect,
): Promise<{ accepted: Accepted[]; told: unknown[] }> {
  const order = inLockOrder(items)
  const sorted = order.map((index) => at(items, index))
  const own = effect.values(order).map(arrayOf)
  const values = acceptValues(sorted, context, { part: parts.apply, apply: true })
  const { rows } = await query<AcceptRow>(sqlOf(effect.function, own.length), [...values, ...own])
  const row = rows[0] ?? unexpected('a row')
  const told = new Array<unknown>(items.length)
  for (const [i, index] of order.entries()) told[index] = row.told?.[i]
  return { accepted: toAll(row, order, sorted), told }
}

/** The effect of what was queued: all of it is to be applied. */
export async function applyWithin(tx: Tx, seqs: readonly number[], effect: StoreEffect): Promise<unknown[]> {
  const own = effect.values(seqs.map((_, index) => index)).map(arrayOf)
  const { rows } = await tx.query<{ told: unknown[] }>(appliedSql(effect.function, own.length), [
    plainArray(seqs.map(() => toApply)),
    plainArray(seqs),
    ...own,
  ])
  return rows[0]?.told ?? []
}

function inLockOrder(items: readonly AcceptItem[]): number[] {
  const order = items.map((_, index) => index)
  return order.sort((a, b) => {
    const left = at(items, a).lane
    const right = at(items, b).lane
    return left < right ? -1 : left > right ? 1 : a - b
  })
}

function toAll(row: AcceptRow, order: readonly number[], sorted: readonly AcceptItem[]): Accepted[] {
  const out = new Array<Accepted>(order.length)
  let tiersBefore = 0
  for (const [i, index] of order.entries()) {
    out[index] = toAccepted(row, i, tiersBefore)
    // Tiers are numbered over the whole flush.
    tiersBefore += at(sorted, i).rates.length
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
  const executes: boolean[] = []
  const laneOf: number[] = []
  const inLane: number[] = []
  const levels = new Set<number>()
  const types = new Map<string, number>()
  let keyed = false
  let gated = false
  let haltable = false
  for (const item of sorted) {
    if (lanes[lanes.length - 1] !== item.lane) {
      lanes.push(item.lane)
      queues.push(item.queue)
      partitions.push(item.partition)
      perLane.push(0)
      executes.push(item.execute)
    }
    const n = (perLane[perLane.length - 1] ?? 0) + 1
    perLane[perLane.length - 1] = n
    laneOf.push(lanes.length)
    inLane.push(n)
    levels.add(item.priority)
    types.set(item.type, (types.get(item.type) ?? 0) + 1)
    keyed ||= item.idempotency !== null
    gated ||= item.gate !== null
    haltable ||= item.halt !== null
  }
  const plain = (of: (item: AcceptItem) => number | boolean | string | null): string => plainArray(sorted.map(of))
  const text = (of: (item: AcceptItem) => string | null): string => textArray(sorted.map(of))
  return [
    context.worker,
    mode.part,
    mode.apply,
    plainArray(lanes),
    textArray(queues),
    textArray(partitions),
    plainArray(perLane),
    plainArray(executes),
    plainArray(laneOf),
    plainArray(inLane),
    plain((i) => i.id),
    text((i) => i.type),
    plain((i) => i.priority),
    plain((i) => i.stamp),
    plain((i) => i.lead),
    text((i) => i.identity),
    sorted.map((i) => i.payload).join(jsonSeparator),
    plain((i) => i.delayMs),
    plain((i) => i.maxAttempts),
    plain((i) => i.timeoutMs),
    text((i) => i.traceparent),
    text(reasonOf),
    plain((i) => i.paceMs),
    Math.round(context.backlogMs),
    plainArray([...levels]),
    textArray([...types.keys()]),
    plainArray([...types.values()]),
    keyed ? plain((i) => i.idempotency?.key ?? null) : '{}',
    keyed ? plain((i) => i.idempotency?.request ?? null) : '{}',
    context.keyTtlMs,
    gated ? text((i) => i.gate) : '{}',
    haltable ? text((i) => i.halt) : '{}',
    ...rateValues(sorted),
    mode.apply && context.isFull === true,
    mode.apply && (context.isFull === true || keyed) ? plain((i) => i.batch) : '{}',
  ]
}

/** Each key once, in order (the lock order), and which key each tier of each item asks. */
function rateValues(sorted: readonly AcceptItem[]): string[] {
  const keys = new Map<string, { key: string; n: number; limit: number; minutes: number; keep: number; ix: number }>()
  const tiers: { key: string; item: number }[] = []
  for (const [index, item] of sorted.entries()) {
    for (const rate of item.rates) {
      tiers.push({ key: rate.key, item: index + 1 })
      const known = keys.get(rate.key)
      if (known === undefined) {
        const { key, limit, windowMinutes: minutes } = rate
        const keep = keepOf(rate)
        keys.set(key, { key, n: 1, limit, minutes, keep, ix: 0 })
        continue
      }
      known.n++
      known.limit = Math.min(known.limit, rate.limit)
      known.minutes = Math.max(known.minutes, rate.windowMinutes)
      known.keep = Math.max(known.keep, keepOf(rate))
    }
  }
  const inOrder = [...keys.values()].sort((a, b) => (a.key < b.key ? -1 : 1))
  for (const [i, key] of inOrder.entries()) key.ix = i + 1
  const single = tiers.length === sorted.length && tiers.every(({ item }, i) => item === i + 1)
  return [
    plainArray(inOrder.map((k) => k.key)),
    plainArray(inOrder.map((k) => k.n)),
    plainArray(inOrder.map((k) => k.limit)),
    plainArray(inOrder.map((k) => k.minutes)),
    plainArray(inOrder.map((k) => k.keep)),
    plainArray(tiers.map(({ key }) => keys.get(key)?.ix ?? 0)),
    single ? '{}' : plainArray(tiers.map(({ item }) => item)),
  ]
}

const keepOf = ({ keepMinutes, windowMinutes }: RateCheck): number => keepMinutes ?? windowMinutes + 60

/** Empty, or with a plus: it may run now. */
function reasonOf({ execute, reason }: AcceptItem): string {
  if (!execute) return reason === '' || reason === 'still_running' ? 'system_busy' : reason
  return reason === 'requested' || reason === 'still_running' ? `+${reason}` : ''
}

function toAccepted(row: AcceptRow, i: number, tiersBefore: number): Accepted {
  const tier = row.tiers?.[i] ?? null
  const resetMs = Number(row.rates_reset_ms?.[i] ?? 0)
  const rate: RateState | null =
    tier === null
      ? null
      : {
          tier: tier - 1 - tiersBefore,
          left: Number(row.rates_left?.[i] ?? 0),
          resetMs,
          resetAtMs: Number(row.at_ms) + resetMs,
        }
  // A caller's own client, as `acceptWithin` gets it, gives bigints as texts.
  const seq = Number(row.seqs[i] ?? 0)
  const stamp = Number(row.stamps[i] ?? 0)
  const verdict = row.verdicts[i]
  switch (verdict) {
    case 0:
      return {
        verdict: 'queue',
        seq,
        stamp,
        rate,
        place: Number(row.places[i] ?? 0),
        waitMs: Number(row.waits_ms[i] ?? 0),
        reason: row.reasons[i] ?? 'maintaining_order',
      }
    case 1:
      return {
        verdict: 'execute',
        seq,
        stamp,
        rate,
        fence: row.fence ?? unexpected('fence'),
      }
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
        operationId: row.ops?.[i] ?? unexpected('op'),
        answer: row.answers?.[i] ?? unexpected('answer'),
        rate,
      }
    case 7:
      return { verdict: 'mismatch' }
    case 8:
      return { verdict: 'in_progress' }
    case 9:
      return { verdict: 'refuse', by: 'depth', rate: null }
    default:
      throw new Error(`accept answered with the unknown verdict ${verdict}`)
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
