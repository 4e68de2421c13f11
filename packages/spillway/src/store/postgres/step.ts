import type { Claimed, ClaimRequest, Leaving, Settlement, StepResult } from '../port.js'
import { plainArray, textArray } from './arrays.js'

/** A row of `claim` behind the lost leases: one for each lane, then one for each operation. */
type LaneRow = [
  lost: null,
  ix: number,
  fence: number,
  lane: string,
  queue: string,
  partition: string,
  careful: boolean,
  seq: null,
]
type OperationRow = [
  lost: null,
  ix: number,
  fence: null,
  lane: null,
  queue: null,
  partition: null,
  careful: null,
  seq: number,
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
type NothingRow = [lost: number[] | null, ix: null]
type StepRow = LaneRow | OperationRow | NothingRow

/** Runs a statement and gives its rows as arrays: objects with twenty members cost more than what is in them. */
export type QueryRows = (text: string, values: readonly unknown[]) => Promise<unknown[][]>

const settleParameters = 24

const numbered = (from: number, count: number): string =>
  Array.from({ length: count }, (_, i) => `$${from + i}`).join(',')

export const settleSql = (schema: string): string => `SELECT ${schema}.settle(${numbered(1, settleParameters)}) AS lost`

/** Settle, then claim, in one statement: claiming waits for the settlement, and finds no worker when that was refused. */
export const stepSql = (schema: string): string =>
  `SELECT nullif(s.lost, '{}'), c.* FROM ${schema}.settle(${numbered(1, settleParameters)}) s(lost)
   LEFT JOIN LATERAL ${schema}.claim(CASE WHEN cardinality(s.lost) = 0 THEN $1::uuid END, ${numbered(settleParameters + 1, 5)}) c ON true`

export const claimSql = (schema: string): string =>
  `SELECT NULL::bigint[], c.* FROM ${schema}.claim(${numbered(1, 6)}) c`

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
  const claimValues =
    claim === null
      ? []
      : [claim.lanes, claim.budget, claim.each, claim.turn, claim.types === undefined ? null : textArray(claim.types)]
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
  const lanes: LaneRow[] = []
  const claimed: Claimed[] = []
  for (const row of rows) {
    if (row[1] === null) continue
    if (row[7] === null) {
      lanes[row[1]] = row
      continue
    }
    const lane = lanes[row[1]]
    const previous = claimed[claimed.length - 1]
    if (lane === undefined || (previous?.lane === lane[3] && previous.seq >= row[7])) {
      throw new Error(`the store handed out operations in disorder at ${row[7]}`)
    }
    claimed.push({
      fence: lane[2],
      lane: lane[3],
      queue: lane[4],
      partition: lane[5],
      careful: lane[6],
      seq: row[7],
      id: row[8],
      type: row[9],
      priority: row[10],
      identity: row[11],
      payload: row[12],
      waitedMs: row[13],
      due: row[14],
      attempts: row[15],
      maxAttempts: row[16],
      timeoutMs: row[17],
      traceparent: row[18],
      idempotencyKey: row[19],
      gate: row[20],
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
  let keyed = false
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
      keyed ||= op.idempotencyKey !== null && op.answer !== null
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
    keyed ? plainArray(told.map((r) => r.op.idempotencyKey)) : '{}',
    keyed ? textArray(told.map((r) => (r.op.answer === null ? null : JSON.stringify(r.op.answer)))) : '{}',
  ]
}
