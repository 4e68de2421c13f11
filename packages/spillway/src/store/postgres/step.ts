import type { Claimed, ClaimRequest, Leaving, Settlement, StepResult, StoredAnswer, Tx } from '../port.js'
import { plainArray, textArray } from './arrays.js'

/** A row of `claim` behind the lost leases; what belongs to the lane stands in the first row of each lane only. */
type StepRow = [
  lost: number[] | null,
  fence: number | null,
  lane: string | null,
  queue: string | null,
  partition: string | null,
  careful: boolean,
  seq: number | null,
  id: string,
  type: string,
  priority: number,
  identity: string,
  payload: unknown,
  waitedMs: number,
  due: boolean,
  attempts: number,
  maxAttempts: number,
  timeoutMs: number,
  trace: string,
  idem: string | null,
  gate: string | null,
]

/** Runs a statement and gives its rows as arrays: objects with twenty members cost more than what is in them. */
export type QueryRows = (text: string, values: readonly unknown[]) => Promise<unknown[][]>

const settleParameters = 25

const numbered = (from: number, count: number): string =>
  Array.from({ length: count }, (_, i) => `$${from + i}`).join(',')

export const settleSql = (schema: string): string => `SELECT ${schema}.settle(${numbered(1, settleParameters)}) AS lost`

/** Settle, then claim, in one statement: claiming waits for the settlement, and finds no worker when that was refused. */
export const stepSql = (schema: string): string =>
  `SELECT nullif(s.lost, '{}'), c.* FROM ${schema}.settle(${numbered(1, settleParameters)}) s(lost)
   LEFT JOIN LATERAL ${schema}.claim(CASE WHEN cardinality(s.lost) = 0 THEN $1::uuid END, ${numbered(settleParameters + 1, 4)}) c ON true`

export const claimSql = (schema: string): string =>
  `SELECT NULL::bigint[], c.* FROM ${schema}.claim(${numbered(1, 5)}) c`

export interface StepStatements {
  step: string
  settle: string
  claim: string
}

export async function step(
  query: QueryRows,
  sql: StepStatements,
  worker: string,
  part: number,
  settlements: readonly Settlement[],
  claim: ClaimRequest | null,
): Promise<StepResult> {
  const claimValues = claim === null ? [] : [claim.lanes, claim.budget, claim.each, claim.turn]
  let rows: unknown[][]
  if (settlements.length === 0) {
    if (claim === null) return { lost: [], claimed: [] }
    rows = await query(sql.claim, [worker, ...claimValues])
  } else {
    const values = settleValues(worker, part, settlements)
    rows = await query(claim === null ? sql.settle : sql.step, [...values, ...claimValues])
  }
  const [first] = rows as StepRow[]
  return { lost: first?.[0] ?? [], claimed: claim === null ? [] : toClaimed(rows as StepRow[]) }
}

function toClaimed(rows: readonly StepRow[]): Claimed[] {
  const claimed: Claimed[] = []
  let fence = 0
  let lane = ''
  let queue = ''
  let partition = ''
  for (const row of rows) {
    const seq = row[6]
    // Nothing to claim: the settlement's row stands alone.
    if (seq === null || seq === undefined) continue
    if (row[2] !== null) {
      fence = row[1] ?? 0
      lane = row[2]
      queue = row[3] ?? ''
      partition = row[4] ?? ''
    } else if (seq <= (claimed[claimed.length - 1]?.seq ?? 0)) {
      throw new Error(`lane ${lane} was handed out of order at ${seq}`)
    }
    claimed.push({
      fence,
      lane,
      queue,
      partition,
      careful: row[5],
      seq,
      id: row[7],
      type: row[8],
      priority: row[9],
      identity: row[10],
      payload: row[11],
      waitedMs: row[12],
      due: row[13],
      attempts: row[14],
      maxAttempts: row[15],
      timeoutMs: row[16],
      traceparent: row[17],
      idempotencyKey: row[18],
      gate: row[19],
    })
  }
  return claimed
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
  const of = (get: (settlement: Settlement) => number | boolean | string | null): string =>
    plainArray(settlements.map(get))
  return [
    worker,
    part,
    plainArray(endedFences(settlements)),
    of((s) => s.fence),
    of((s) => s.lane),
    of((s) => s.from),
    of((s) => s.leaving[s.leaving.length - 1]?.seq ?? s.from),
    of((s) => s.leaving.length),
    of((s) => s.release),
    of((s) => s.retry?.delayMs ?? null),
    textArray(settlements.map((s) => s.retry?.error ?? null)),
    of((s) => s.leaving[0]?.startedMsAgo ?? 0),
    textArray([...types.keys()]),
    plainArray([...types.values()]),
    textArray([...gates.keys()]),
    plainArray([...gates.values()]),
    plainArray(told.map((r) => r.lane)),
    plainArray(told.map((r) => r.op.seq)),
    plainArray(told.map((r) => r.op.status)),
    textArray(told.map((r) => r.op.result)),
    textArray(told.map((r) => r.op.error)),
    plainArray(told.map((r) => r.op.startedMsAgo)),
    plainArray(told.map((r) => r.op.counted)),
    plainArray(keys),
    textArray(answers),
  ]
}

/** Leases of which this call gives up the last lane; the caller says so on the settlement. */
function endedFences(settlements: readonly Settlement[]): number[] {
  return [...new Set(settlements.filter((s) => s.endsLease === true).map((s) => s.fence))]
}
