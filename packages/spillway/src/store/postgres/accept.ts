import { withDeadline } from '../../time/with-deadline.js'
import type {
  AcceptContext,
  Accepted,
  AcceptItem,
  AdmitItem,
  Admitted,
  Decided,
  RateCheck,
  RateState,
  StoredAnswer,
  StoreEffect,
  Tx,
} from '../port.js'
import { arrayOf, jsonSeparator, plainArray, textArray } from './arrays.js'
import type { Database } from './database.js'
import { StoreFault } from './faults.js'

type Verdict =
  | 'queue'
  | 'execute'
  | 'apply'
  | 'replay'
  | 'mismatch'
  | 'in_progress'
  | 'capacity_full'
  | 'rate_limited'
  | 'halted'
  | 'depth_full'

/** What a statement reports of rates: one element per item, in their order. */
interface RateRow extends Record<string, unknown> {
  tiers: (number | null)[] | null
  rates_left: number[] | null
  rates_reset_ms: number[] | null
  /** The store's clock; null without rates. */
  at_ms: number | null
}

/** The row of `accept`: one element per item, in their order. */
interface AcceptRow extends RateRow {
  verdicts: Verdict[]
  fence: number | null
  seqs: number[]
  places: number[]
  waits_ms: number[]
  reasons: ('maintaining_order' | 'system_busy' | 'requested' | 'still_running')[]
  stamps: number[]
  answers: (StoredAnswer | null)[] | null
  ops: (string | null)[] | null
  /** The effect's results, if there was one. */
  results?: unknown[]
}

/**
 * The payloads are sent as one text with separators: quoting each for an array literal, and parsing that literal again,
 * costs more than all other parameters together.
 */
const acceptSql = (schema: string): string => `SELECT * FROM ${acceptCall(schema)}`

const acceptCall = (schema: string): string => {
  const call = parameters.map((name) => {
    const value = `$${numberOf(name)}`
    return `p_${name} => ${name === 'payload' ? `string_to_array(${value}, E'\\x1e')` : value}`
  })
  return `${schema}.accept_flush(${call.join(', ')})`
}

const numberOf = (name: string): number => parameters.indexOf(name) + 1

/**
 * Accepting, the effect and the answers for its keys in one statement. Functions in FROM are called once each, in the order
 * of their dependencies.
 */
const effectSql = (schema: string, name: string, values: number): string => {
  const own = Array.from({ length: values }, (_, i) => `, $${parameters.length + i + 1}`).join('')
  return `SELECT a.*, array_to_json(e.results) AS results FROM ${acceptCall(schema)} a, ${name}(a.verdicts, a.seqs${own}) e(results),
    ${schema}.keys_applied($${numberOf('keys')}, $${numberOf('id')}, a.verdicts, e.results) k`
}

/** Rows of a process in `tallies`: one per connection that counts, so that they never wait for each other. */
export const parts = { accept: 0, apply: 1, step: 2, within: -1 } as const

interface Mode {
  part: number
  apply: boolean
}

/**
 * One call for all items. The function needs them grouped by lane, lanes in id order (the lock order); the answers come back
 * in the order of `items`.
 */
async function accept(
  query: Tx['query'],
  sql: string,
  items: readonly AcceptItem[],
  context: AcceptContext,
  mode: Mode,
): Promise<Accepted[]> {
  const order = inLockOrder(items)
  const sorted = order.map((index) => at(items, index))
  const { rows } = await query<AcceptRow>(sql, Object.values(acceptValues(sorted, context, mode)))
  return toAll(rows[0] ?? unexpected('a row'), order, sorted)
}

async function acceptWithEffect(
  query: Tx['query'],
  sqlOf: (values: number) => string,
  items: readonly AcceptItem[],
  context: AcceptContext,
  effect: StoreEffect,
): Promise<{ accepted: Accepted[]; results: unknown[] }> {
  const order = inLockOrder(items)
  const sorted = order.map((index) => at(items, index))
  const own = effect.values(order).map(arrayOf)
  const values = Object.values(acceptValues(sorted, context, { part: parts.apply, apply: true }))
  const { rows } = await query<AcceptRow>(sqlOf(own.length), [...values, ...own])
  const row = rows[0] ?? unexpected('a row')
  const results = new Array<unknown>(items.length)
  for (const [i, index] of order.entries()) results[index] = row.results?.[i]
  return { accepted: toAll(row, order, sorted), results }
}

const admitSql = (schema: string): string =>
  `SELECT * FROM ${schema}.admit(${['items', 'halts', ...rateParameters].map((name, i) => `p_${name} => $${i + 1}`).join(', ')})`

/** See sql/functions/admit.sql. */
async function admit(query: Tx['query'], sql: string, items: readonly AdmitItem[]): Promise<Admitted[]> {
  const rates = rateValues(items)
  const haltable = items.some(({ halt }) => halt !== null)
  const { rows } = await query<RateRow & { verdicts: ('halted' | 'rate_limited' | null)[] | null }>(sql, [
    items.length,
    haltable ? textArray(items.map(({ halt }) => halt)) : '{}',
    ...Object.values(rates),
  ])
  const row = rows[0] ?? unexpected('a row')
  let tiersBefore = 0
  return items.map((item, i): Admitted => {
    const rate = rateOf(row, i, tiersBefore)
    tiersBefore += item.rates.length
    const verdict = row.verdicts?.[i] ?? null
    if (verdict === null) return { verdict: 'admit', rate }
    if (verdict === 'halted') return { verdict: 'refuse', by: 'halt', rate: null }
    return { verdict: 'refuse', by: 'rate', rate: rate ?? unexpected('rate') }
  })
}

async function applyWithin(tx: Tx, seqs: readonly number[], effect: StoreEffect): Promise<unknown[]> {
  const own = effect.values(seqs.map((_, index) => index)).map(arrayOf)
  const values = [plainArray(seqs.map(() => 'apply')), plainArray(seqs), ...own]
  const numbered = values.map((_, i) => `$${i + 1}`).join(', ')
  const { rows } = await tx.query<{ results: unknown[] }>(`SELECT ${effect.function}(${numbered}) AS results`, values)
  return rows[0]?.results ?? []
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
    tiersBefore += at(sorted, i).rates.length
  }
  return out
}

/** By the names of the parameters, without their prefix; see sql/functions/accept.sql. Per-item parameters are arrays. */
function acceptValues(sorted: readonly AcceptItem[], context: AcceptContext, mode: Mode): Record<string, unknown> {
  const lanes: string[] = []
  const queues: string[] = []
  const partitions: string[] = []
  const counts: number[] = []
  const mayRun: boolean[] = []
  const laneNumbers: number[] = []
  const inLane: number[] = []
  const alone: boolean[] = []
  const turns: AcceptItem['turns'][] = []
  let keyed = false
  let taking = false
  let expiring = false
  let gated = false
  let haltable = false
  for (const item of sorted) {
    if (lanes[lanes.length - 1] !== item.lane) {
      lanes.push(item.lane)
      queues.push(item.queue)
      partitions.push(item.partition)
      counts.push(0)
      mayRun.push(item.execute)
      alone.push(isAlone(item))
      turns.push(item.turns)
    }
    const n = (counts[counts.length - 1] ?? 0) + 1
    counts[counts.length - 1] = n
    laneNumbers.push(lanes.length)
    inLane.push(n)
    keyed ||= item.idempotency !== null
    expiring ||= typeof item.expiresMs === 'number'
    taking ||= item.turns !== undefined && item.turns !== null
    gated ||= item.gate !== null
    haltable ||= item.halt !== null
  }
  const plain = (of: (item: AcceptItem) => number | boolean | string | null): string => plainArray(sorted.map(of))
  const text = (of: (item: AcceptItem) => string | null): string => textArray(sorted.map(of))
  return {
    worker: context.worker,
    part: mode.part,
    apply: mode.apply,
    lanes: plainArray(lanes),
    queues: textArray(queues),
    partitions: textArray(partitions),
    counts: plainArray(counts),
    may_run: plainArray(mayRun),
    lane: plainArray(laneNumbers),
    rn: plainArray(inLane),
    id: plain((i) => i.id),
    type: text((i) => i.type),
    priority: plain((i) => i.priority),
    stamp: plain((i) => i.stamp),
    lead: plain((i) => i.lead),
    identity: text((i) => i.identity),
    payload: sorted.map((i) => i.payload).join(jsonSeparator),
    delay_ms: plain((i) => i.delayMs),
    max_attempts: plain((i) => i.maxAttempts),
    timeout_ms: plain((i) => i.timeoutMs),
    trace: text((i) => i.traceparent),
    reason: text(reasonOf),
    pace_ms: plain((i) => i.paceMs),
    backlog_ms: Math.round(context.backlogMs),
    keys: keyed ? plain((i) => i.idempotency?.key ?? null) : '{}',
    requests: keyed ? plain((i) => i.idempotency?.request ?? null) : '{}',
    key_ttl_ms: context.keyTtlMs,
    gates: gated ? text((i) => i.gate) : '{}',
    halts: haltable ? text((i) => i.halt) : '{}',
    ...rateValues(sorted),
    full: mode.apply && context.isFull === true,
    batch: mode.apply && (context.isFull === true || keyed) ? plain((i) => i.batch) : '{}',
    alone: alone.includes(true) ? plainArray(alone) : '{}',
    ahead: context.ahead ?? 0,
    expires_ms: expiring ? plain((i) => i.expiresMs ?? null) : '{}',
    turn_keys: taking ? plainArray(turns.map((turn) => turn?.key ?? null)) : '{}',
    turn_most: taking ? plainArray(turns.map((turn) => turn?.most ?? null)) : '{}',
  }
}

/** Each key once, in order (the lock order), and the key of each tier of each item. */
function rateValues(sorted: readonly Pick<AcceptItem, 'rates'>[]): Record<string, string> {
  const keys = new Map<
    string,
    { key: string; asked: number; limit: number; window: number; keep: number; ix: number }
  >()
  const tiers: { key: string; item: number }[] = []
  for (const [index, item] of sorted.entries()) {
    for (const rate of item.rates) {
      tiers.push({ key: rate.key, item: index + 1 })
      const known = keys.get(rate.key)
      if (known === undefined) {
        const { key, limit } = rate
        keys.set(key, { key, asked: 1, limit, window: windowOf(rate), keep: keepOf(rate), ix: 0 })
        continue
      }
      known.asked++
      known.limit = Math.min(known.limit, rate.limit)
      known.window = Math.max(known.window, windowOf(rate))
      known.keep = Math.max(known.keep, keepOf(rate))
    }
  }
  const inOrder = [...keys.values()].sort((a, b) => (a.key < b.key ? -1 : 1))
  for (const [i, key] of inOrder.entries()) key.ix = i + 1
  const single = tiers.length === sorted.length && tiers.every(({ item }, i) => item === i + 1)
  return {
    rate_key: plainArray(inOrder.map((k) => k.key)),
    rate_asked: plainArray(inOrder.map((k) => k.asked)),
    rate_limit: plainArray(inOrder.map((k) => k.limit)),
    rate_minutes: plainArray(inOrder.map((k) => k.window)),
    rate_keep: plainArray(inOrder.map((k) => k.keep)),
    rate_ix: plainArray(tiers.map(({ key }) => keys.get(key)?.ix ?? 0)),
    rate_item: single ? '{}' : plainArray(tiers.map(({ item }) => item)),
  }
}

/** A parallel operation: its lane is its own, and has its id. */
const isAlone = ({ id, lane }: AcceptItem): boolean => id === lane

/** In the order of the statement's values. */
const parameters = Object.keys(
  acceptValues([], { worker: '', backlogMs: 0, keyTtlMs: 0 }, { part: parts.accept, apply: false }),
)
const rateParameters = Object.keys(rateValues([]))

/** See sql/functions/rates.sql: minutes of the clock, or seconds as a negative number. Checks of one key are of one kind. */
const windowOf = ({ windowSeconds, clockMinutes }: RateCheck): number => clockMinutes ?? -windowSeconds

const keepOf = ({ keepMinutes, windowSeconds }: RateCheck): number => keepMinutes ?? Math.ceil(windowSeconds / 60) + 60

/** Empty, or with a plus: it may run now. */
function reasonOf({ execute, reason }: AcceptItem): string {
  if (!execute) return reason === '' || reason === 'still_running' ? 'system_busy' : reason
  return reason === 'requested' || reason === 'still_running' ? `+${reason}` : ''
}

/** Tiers are numbered over the whole flush. */
function rateOf(row: RateRow, i: number, tiersBefore: number): RateState | null {
  const tier = row.tiers?.[i] ?? null
  if (tier === null) return null
  const resetMs = Number(row.rates_reset_ms?.[i] ?? 0)
  return {
    tier: tier - 1 - tiersBefore,
    left: Number(row.rates_left?.[i] ?? 0),
    resetMs,
    resetAtMs: Number(row.at_ms) + resetMs,
  }
}

function toAccepted(row: AcceptRow, i: number, tiersBefore: number): Accepted {
  const rate = rateOf(row, i, tiersBefore)
  // A caller's own client, as in `acceptWithin`, returns bigints as texts.
  const seq = Number(row.seqs[i] ?? 0)
  const stamp = Number(row.stamps[i] ?? 0)
  const verdict = row.verdicts[i]
  switch (verdict) {
    case 'queue':
      return {
        verdict: 'queue',
        seq,
        stamp,
        rate,
        place: Number(row.places[i] ?? 0),
        waitMs: Number(row.waits_ms[i] ?? 0),
        reason: row.reasons[i] ?? 'maintaining_order',
      }
    case 'execute':
      return {
        verdict: 'execute',
        seq,
        stamp,
        rate,
        fence: row.fence ?? unexpected('fence'),
      }
    case 'apply':
      return { verdict: 'apply', seq, stamp, rate }
    case 'capacity_full':
      return { verdict: 'refuse', by: 'capacity', rate: null }
    case 'rate_limited':
      return { verdict: 'refuse', by: 'rate', rate: rate ?? unexpected('rate') }
    case 'halted':
      return { verdict: 'refuse', by: 'halt', rate: null }
    case 'replay':
      return {
        verdict: 'replay',
        operationId: row.ops?.[i] ?? unexpected('op'),
        answer: row.answers?.[i] ?? unexpected('answer'),
        rate,
      }
    case 'mismatch':
      return { verdict: 'mismatch' }
    case 'in_progress':
      return { verdict: 'in_progress' }
    case 'depth_full':
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

async function answerKeys(
  s: string,
  query: Tx['query'],
  keyed: { key: string; op: string; answer: StoredAnswer }[],
): Promise<void> {
  keyed.sort((a, b) => (a.key < b.key ? -1 : 1))
  await query(
    `UPDATE ${s}.idempotency d SET answer = u.answer::json FROM unnest($1::uuid[], $2::uuid[], $3::text[]) u(key, op, answer)
     WHERE d.key = u.key AND d.op = u.op AND d.answer IS NULL`,
    [keyed.map((k) => k.key), keyed.map((k) => k.op), keyed.map((k) => JSON.stringify(k.answer))],
  )
}

function decidedOf(accepted: readonly Accepted[]): Decided {
  const applied: number[] = []
  const seqs: number[] = []
  for (const [index, a] of accepted.entries()) {
    if (a.verdict !== 'apply') continue
    applied.push(index)
    seqs.push(a.seq)
  }
  return { applied, seqs }
}

/** A user's `apply` holds up all items of the same commit. */
const late = (): never => {
  throw new StoreFault('timeout')
}

type Effect = (tx: Tx, decided: Decided) => Promise<readonly StoredAnswer[]>

/** Accepting, and the idempotency keys. */
export function acceptStatements({ s, channel, timeoutMs, pools, probe, on, prepare, slowly }: Database) {
  const sql = prepare(acceptSql(s))
  const sqlOfAdmit = prepare(admitSql(s))

  const apply = async (tx: Tx, items: readonly AcceptItem[], context: AcceptContext, effect: Effect) => {
    const accepted = await accept(tx.query, sql, items, context, { part: parts.apply, apply: true })
    const decided = decidedOf(accepted)
    const answers = decided.applied.length > 0 ? await withDeadline(effect(tx, decided), timeoutMs, late) : []
    const keyed = decided.applied.flatMap((index, i) => {
      const { id: op, idempotency } = at(items, index)
      const answer = answers[i]
      return idempotency === null || answer === undefined ? [] : [{ key: idempotency.key, op, answer }]
    })
    if (keyed.length > 0) await answerKeys(s, tx.query, keyed)
    return accepted
  }

  return {
    accept: (items: readonly AcceptItem[], context: AcceptContext): Promise<Accepted[]> =>
      slowly(() => accept(on.accept, sql, items, context, { part: parts.accept, apply: false })),
    /** Halts and rates alone, for requests without an operation. */
    admit: (items: readonly AdmitItem[]): Promise<Admitted[]> => slowly(() => admit(on.accept, sqlOfAdmit, items)),
    /**
     * The same for items whose effect is rows in this store: `effect` writes the items with the verdict `apply` in the same
     * transaction, and its answers are stored for their idempotency keys.
     */
    acceptAndApply: (items: readonly AcceptItem[], context: AcceptContext, effect: Effect): Promise<Accepted[]> =>
      slowly(async () => {
        const tx = await pools.begin('accept', timeoutMs)
        try {
          const accepted = await apply(tx, items, context, effect)
          await tx.commit()
          probe.proven()
          return accepted
        } catch (error) {
          await tx.rollback()
          throw error
        }
      }),
    /**
     * The same for an effect that is a function in the store: one round trip for any number of items. Its results are stored
     * for the idempotency keys of the applied items.
     */
    acceptWithEffect: (items: readonly AcceptItem[], context: AcceptContext, effect: StoreEffect, tx?: Tx) => {
      const sqlOf = (values: number): string => prepare(effectSql(s, effect.function, values))
      return slowly(() => acceptWithEffect(tx?.query.bind(tx) ?? on.accept, sqlOf, items, context, effect))
    },
    /** The effect of queued operations: all of them are applied. */
    applyWithin,
    /** Inside the caller's own transaction; nothing is executed at once. */
    acceptWithin: async (tx: Tx, items: readonly AcceptItem[], context: AcceptContext): Promise<Accepted[]> => {
      const queued = items.map((item) => ({ ...item, execute: false, reason: 'requested' as const }))
      const accepted = await accept(tx.query.bind(tx), sql, queued, context, { part: parts.within, apply: false })
      await tx.query('SELECT pg_notify($1, $2)', [channel, 'ready'])
      return accepted
    },
    /** Stores the answer for the key of an operation whose caller got a ticket. */
    answerKey: (key: string, operationId: string, answer: StoredAnswer): Promise<void> =>
      answerKeys(s, on.accept, [{ key, op: operationId, answer }]),
    /** Resets the key as if it had not been used, if it belongs to that operation. */
    forgetKey: async (key: string, operationId: string): Promise<void> => {
      await on.accept(`DELETE FROM ${s}.idempotency d WHERE d.key = $1 AND d.op = $2`, [key, operationId])
    },
  }
}
