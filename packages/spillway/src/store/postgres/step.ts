import type { Claimed, ClaimRequest, Leaving, Settlement, StepResult, StoredAnswer, Tx } from '../port.js'

interface StepRow extends Record<string, unknown> {
  lost: number[]
  fence: number | null
  lane: string
  seq: number
  id: string
  type: string
  queue: string
  partition: string
  priority: number
  identity: string
  payload: unknown
  accepted_at: Date
  waited_ms: number
  due: boolean
  attempts: number
  max_attempts: number
  timeout_ms: number
  trace: string
  idem: string | null
  gate: string | null
}

const settleParameters = 25

const numbered = (from: number, count: number): string =>
  Array.from({ length: count }, (_, i) => `$${from + i}`).join(',')

export const settleSql = (schema: string): string => `SELECT ${schema}.settle(${numbered(1, settleParameters)}) AS lost`

/** Settle, then claim, in one statement: claiming waits for the settlement, and does not happen when that was refused. */
export const stepSql = (schema: string): string =>
  `SELECT s.lost, c.* FROM ${schema}.settle(${numbered(1, settleParameters)}) s(lost)
   LEFT JOIN LATERAL ${schema}.claim($1, ${numbered(settleParameters + 1, 4)}) c ON cardinality(s.lost) = 0`

export const claimSql = (schema: string): string =>
  `SELECT '{}'::bigint[] AS lost, c.* FROM ${schema}.claim(${numbered(1, 5)}) c`

export interface StepStatements {
  step: string
  settle: string
  claim: string
}

export async function step(
  query: Tx['query'],
  sql: StepStatements,
  worker: string,
  part: number,
  settlements: readonly Settlement[],
  claim: ClaimRequest | null,
): Promise<StepResult> {
  const claimValues = claim === null ? [] : [claim.lanes, claim.budget, claim.each, claim.turn]
  let rows: StepRow[]
  if (settlements.length === 0) {
    if (claim === null) return { lost: [], claimed: [] }
    rows = (await query<StepRow>(sql.claim, [worker, ...claimValues])).rows
  } else {
    const values = settleValues(worker, part, settlements)
    rows = (await query<StepRow>(claim === null ? sql.settle : sql.step, [...values, ...claimValues])).rows
  }
  return {
    lost: rows[0]?.lost ?? [],
    claimed: rows.filter((row) => row.fence !== null && row.fence !== undefined).map(toClaimed),
  }
}

function toClaimed(row: StepRow): Claimed {
  return {
    fence: row.fence ?? 0,
    lane: row.lane,
    seq: row.seq,
    id: row.id,
    type: row.type,
    queue: row.queue,
    partition: row.partition,
    priority: row.priority,
    identity: row.identity,
    payload: row.payload,
    acceptedAt: row.accepted_at,
    waitedMs: row.waited_ms,
    due: row.due,
    attempts: row.attempts,
    maxAttempts: row.max_attempts,
    timeoutMs: row.timeout_ms,
    traceparent: row.trace,
    idempotencyKey: row.idem,
    gate: row.gate,
  }
}

/** Completed, with nothing to tell: such operations are deleted by range instead of one by one. */
const isPlain = (op: Leaving): boolean =>
  op.status === 'completed' && op.result === null && op.idempotencyKey === null && op.counted

export function settleValues(worker: string, part: number, unsorted: readonly Settlement[]): unknown[] {
  const settlements = [...unsorted].sort((a, b) => (a.lane < b.lane ? -1 : 1))
  const types = new Map<string, number>()
  const gates = new Map<string, number>()
  const keys: string[] = []
  const answers: string[] = []
  const results: { lane: string; op: Leaving }[] = []
  let plain = true
  let dead = 0
  for (const settlement of settlements) {
    for (const op of settlement.leaving) {
      plain &&= isPlain(op)
      results.push({ lane: settlement.lane, op })
      types.set(op.type, (types.get(op.type) ?? 0) + 1)
      if (op.gate !== null) gates.set(op.gate, (gates.get(op.gate) ?? 0) + 1)
      if (op.status === 'failed') dead++
      if (op.idempotencyKey !== null && op.answer !== null) {
        keys.push(op.idempotencyKey)
        answers.push(JSON.stringify(op.answer satisfies StoredAnswer))
      }
    }
  }
  // Counts are subtracted; dead letters are counted beside the types.
  if (dead > 0) types.set('!dead', -dead)
  const told = plain ? [] : results
  const of = <T>(get: (settlement: Settlement) => T): T[] => settlements.map(get)
  return [
    worker,
    part,
    endedFences(settlements),
    of((s) => s.fence),
    of((s) => s.lane),
    of((s) => s.from),
    of((s) => s.leaving[s.leaving.length - 1]?.seq ?? s.from),
    of((s) => s.leaving.length),
    of((s) => s.release),
    of((s) => s.retry?.delayMs ?? null),
    of((s) => s.retry?.error ?? null),
    of((s) => s.leaving[0]?.startedMsAgo ?? 0),
    [...types.keys()],
    [...types.values()],
    [...gates.keys()],
    [...gates.values()],
    told.map((r) => r.lane),
    told.map((r) => r.op.seq),
    told.map((r) => r.op.status),
    told.map((r) => r.op.result),
    told.map((r) => r.op.error),
    told.map((r) => r.op.startedMsAgo),
    told.map((r) => r.op.counted),
    keys,
    answers,
  ]
}

/** Leases of which this call gives up the last lane; the caller says so on the settlement. */
function endedFences(settlements: readonly Settlement[]): number[] {
  return [...new Set(settlements.filter((s) => s.endsLease === true).map((s) => s.fence))]
}
