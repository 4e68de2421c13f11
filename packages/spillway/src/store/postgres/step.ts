import type { Claimed, ClaimRequest, Failure, Leaving, OpenTx, Settlement, StepResult, Tx } from '../port.js'
import { parts } from './accept.js'
import { jsonSeparator, plainArray, textArray } from './arrays.js'
import type { Database } from './database.js'

/** The row of `claim` after the lost leases: lists of lanes, then of operations. All null when nothing was claimed. */
type StepRow = [
  lost: number[] | null,
  fence: number | null,
  depth: number,
  lanes: string,
  queues: string[],
  partitions: string[],
  careful: string,
  ixs: string,
  seqs: string,
  ids: string,
  types: string,
  priorities: string,
  identities: string[],
  payloads: string,
  waitedMs: string,
  due: string,
  attempts: string,
  maxAttempts: string,
  timeoutsMs: string,
  traces: string[],
  idems: string,
  gates: string[] | null,
  /** `id milliseconds` of those that may expire. */
  expireMs: string | null,
]

const settleParameters = 25

const numbered = (from: number, count: number): string =>
  Array.from({ length: count }, (_, i) => `$${from + i}`).join(',')

export const settleSql = (schema: string): string => `SELECT ${schema}.settle(${numbered(1, settleParameters)}) AS lost`

/** The same, and the failures in it. */
const settleAndKeepSql = (schema: string): string =>
  `SELECT s.lost FROM ${schema}.settle(${numbered(1, settleParameters)}) s(lost), ${keepSql(schema)}`

const failureParameters = 6
const keepSql = (schema: string): string =>
  `${schema}.failures_keep(s.lost, ${numbered(settleParameters + 1, failureParameters)}) f`

/** Settle, then claim, in one statement: claiming waits for the settlement, and finds no worker when that was refused. */
export const stepSql = (schema: string): string =>
  `SELECT nullif(s.lost, '{}'), c.* FROM ${schema}.settle(${numbered(1, settleParameters)}) s(lost)
   LEFT JOIN LATERAL ${schema}.claim_ready(CASE WHEN cardinality(s.lost) = 0 THEN $1::uuid END, ${numbered(settleParameters + 1, 7)}) c ON true`

const stepAndKeepSql = (schema: string): string =>
  `SELECT nullif(s.lost, '{}'), c.* FROM ${schema}.settle(${numbered(1, settleParameters)}) s(lost), ${keepSql(schema)}
   LEFT JOIN LATERAL ${schema}.claim_ready(CASE WHEN cardinality(s.lost) = 0 THEN $1::uuid END,
     ${numbered(settleParameters + failureParameters + 1, 7)}) c ON true`

export const claimSql = (schema: string): string =>
  `SELECT NULL::bigint[], c.* FROM ${schema}.claim_ready(${numbered(1, 8)}) c`

export async function step(
  query: Database['rows'],
  sql: Readonly<Record<'step' | 'settle' | 'stepAndKeep' | 'settleAndKeep' | 'claim', string>>,
  worker: string,
  part: number,
  settlements: readonly Settlement[],
  claim: ClaimRequest | null,
): Promise<StepResult> {
  const claimValues =
    claim === null
      ? []
      : [
          claim.lanes,
          claim.budget,
          claim.each,
          claim.turn,
          claim.types === undefined ? null : textArray(claim.types),
          textArray(claim.together ?? []),
          textArray(claim.trusted ?? []),
        ]
  let rows: unknown[][]
  if (settlements.length === 0) {
    if (claim === null) return { lost: [], claimed: [], depth: 0 }
    rows = await query(sql.claim, [worker, ...claimValues])
  } else {
    const failures = settlements.flatMap((settlement) => settlement.failures ?? [])
    const values = [...settleValues(worker, part, settlements), ...failureValues(failures)]
    const [settle, both] = failures.length === 0 ? [sql.settle, sql.step] : [sql.settleAndKeep, sql.stepAndKeep]
    rows = await query(claim === null ? settle : both, [...values, ...claimValues])
  }
  const [row] = rows as [StepRow | undefined]
  if (claim === null || row === undefined) return { lost: row?.[0] ?? [], claimed: [], depth: 0 }
  return { lost: row[0] ?? [], claimed: toClaimed(row), depth: Number(row[2] ?? 0) }
}

function toClaimed(row: StepRow): Claimed[] {
  const fence = row[1]
  if (fence === null) return []
  const list = (column: number, by = ','): string[] => (row[column] as string).split(by)
  const lanes = list(3)
  const queues = row[4]
  const partitions = row[5]
  const careful = list(6)
  const ixs = list(7)
  const seqs = list(8)
  const ids = list(9)
  const types = list(10)
  const priorities = list(11)
  const identities = row[12]
  const payloads = list(13, jsonSeparator)
  const waited = list(14)
  const due = list(15)
  const attempts = list(16)
  const max = list(17)
  const timeouts = list(18)
  const traces = row[19]
  const idems = list(20)
  const gates = row[21]
  const expireMs = new Map(row[22]?.split(',').map((one) => one.split(' ') as [string, string]))
  const claimed = new Array<Claimed>(ids.length)
  let previous: Claimed | undefined
  for (let i = 0; i < ids.length; i++) {
    const ix = Number(ixs[i]) - 1
    const op: Claimed = {
      fence,
      lane: lanes[ix] ?? '',
      queue: queues[ix] ?? '',
      partition: partitions[ix] ?? '',
      careful: careful[ix] === '1',
      seq: Number(seqs[i]),
      id: ids[i] ?? '',
      type: types[i] ?? '',
      priority: Number(priorities[i]),
      identity: identities[i] ?? '',
      payload: payloads[i] ?? '',
      waitedMs: Number(waited[i]),
      due: due[i] === '1',
      attempts: Number(attempts[i]),
      maxAttempts: Number(max[i]),
      timeoutMs: Number(timeouts[i]),
      traceparent: traces[i] ?? '',
      idempotencyKey: idems[i] === '' ? null : (idems[i] ?? null),
      gate: gates?.[i] ?? null,
      expiresInMs: expireMs.size === 0 ? null : expiryOf(expireMs.get(ids[i] ?? '')),
    }
    if (op.lane === '' || (previous?.lane === op.lane && previous.seq >= op.seq)) {
      throw new Error(`the store handed out operations in disorder at ${op.seq}`)
    }
    claimed[i] = op
    previous = op
  }
  return claimed
}

const expiryOf = (ms: string | undefined): number | null => (ms === undefined ? null : Number(ms))

/** Completed without a result to store: such operations are deleted by range instead of one by one. */
const isPlain = (op: Leaving): boolean =>
  op.status === 'completed' && op.result === null && op.idempotencyKey === null && op.counted

function settleValues(worker: string, part: number, unsorted: readonly Settlement[]): unknown[] {
  const settlements = [...unsorted].sort((a, b) => (a.lane < b.lane ? -1 : 1))
  const types = new Map<string, number>()
  const gates = new Map<string, number>()
  let keyed = false
  const results: { lane: string; op: Leaving }[] = []
  let plain = true
  let dead = 0
  let leaves = false
  for (const settlement of settlements) {
    leaves ||= typeof settlement.leaveTo === 'string'
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
  const detailed = plain ? [] : results
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
    plainArray(detailed.map((r) => r.lane)),
    plainArray(detailed.map((r) => r.op.seq)),
    plainArray(detailed.map((r) => r.op.status)),
    textArray(detailed.map((r) => r.op.result)),
    textArray(detailed.map((r) => r.op.error)),
    plainArray(detailed.map((r) => r.op.startedMsAgo)),
    plainArray(detailed.map((r) => r.op.counted)),
    keyed ? plainArray(detailed.map((r) => r.op.idempotencyKey)) : '{}',
    keyed ? textArray(detailed.map((r) => (r.op.answer === null ? null : JSON.stringify(r.op.answer)))) : '{}',
    leaves ? textArray(settlements.map((s) => s.leaveTo ?? null)) : null,
  ]
}

/** None, if nothing failed: then the statement does not have them. */
function failureValues(failures: readonly Failure[]): unknown[] {
  if (failures.length === 0) return []
  return [
    plainArray(failures.map(({ id }) => id)),
    plainArray(failures.map(({ attempt }) => attempt)),
    textArray(failures.map(({ said }) => said?.code ?? null)),
    plainArray(failures.map(({ said }) => said?.status ?? null)),
    plainArray(failures.map(({ keepLetter }) => keepLetter)),
    textArray(failures.map(({ stack }) => stack)),
  ]
}

/** Claiming, running and settling. */
export function workStatements({ s, pools, on, rows, prepare, slowly, value }: Database) {
  const sql = {
    step: prepare(stepSql(s)),
    settle: prepare(settleSql(s)),
    stepAndKeep: prepare(stepAndKeepSql(s)),
    settleAndKeep: prepare(settleAndKeepSql(s)),
    claim: prepare(claimSql(s)),
  }
  return {
    step: (
      worker: string,
      part: number,
      settlements: readonly Settlement[],
      claim: ClaimRequest | null,
    ): Promise<StepResult> => {
      const run = () => step(rows, sql, worker, parts.step + part, settlements, claim)
      return settlements.length === 0 ? run() : slowly(run)
    },
    /**
     * Takes the locks for the settlements that follow in this transaction. So effects can be written first, even if they lock
     * rows that others lock after a lane. Per lane: false when the lease is lost.
     */
    holdWithin: async (
      tx: Tx,
      worker: string,
      held: readonly { fence: number; lane: string; keys: readonly string[] }[],
    ): Promise<readonly boolean[]> =>
      (await value<boolean[]>(tx.query, `${s}.settle_hold($1, $2, $3, $4)`, [
        worker,
        held.map(({ fence }) => fence),
        held.map(({ lane }) => lane),
        held.flatMap(({ keys }) => keys),
      ])) ?? [],
    /** Settles inside a transaction of `begin`; returns whether the leases were still held. */
    settleWithin: async (tx: Tx, worker: string, ...settlements: readonly Settlement[]): Promise<boolean> => {
      const failures = settlements.flatMap((settlement) => settlement.failures ?? [])
      const { rows } = await tx.query<{ lost: number[] }>(failures.length === 0 ? sql.settle : sql.settleAndKeep, [
        ...settleValues(worker, parts.within, settlements),
        ...failureValues(failures),
      ])
      return rows[0]?.lost.length === 0
    },
    /** After a commit that was not confirmed: whether the operation left its lane. Waits for that transaction to end. */
    confirm: async (worker: string, fence: number, lane: string, seq: number): Promise<'left' | 'pending' | 'lost'> =>
      (await value(on.settle, `${s}.confirm($1, $2, $3, $4)`, [worker, fence, lane, seq])) ?? 'lost',
    mark: async (
      worker: string,
      started: readonly { fence: number; lane: string; seq: number; startedMsAgo: number }[],
    ): Promise<void> => {
      await on.settle(`SELECT ${s}.mark($1, $2, $3, $4, $5)`, [
        worker,
        started.map((m) => m.fence),
        started.map((m) => m.lane),
        started.map((m) => m.seq),
        started.map((m) => Math.round(m.startedMsAgo)),
      ])
    },
    /**
     * No statement, and no pause between two, may last longer than `timeoutMs`. Operators' transactions have their own
     * connections: they are short, and must not wait behind handlers.
     */
    begin: (timeoutMs: number, of: 'handlers' | 'operators' = 'handlers'): Promise<OpenTx> =>
      pools.begin(of, timeoutMs),
  }
}
