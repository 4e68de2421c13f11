/** Received petitions: read, move on, withdraw; halts. One row, one writer at a time: see sql/functions/transition.sql. */
import type { HaltState } from '@spillway/protocol/schema'
import { type PetitionState, type PetitionStatus, type PetitionView, petitionMoves } from '@spillway/protocol/wire'
import { type CutRows, cutRows, pageSql, type SweptBatch } from 'spillway/workload'
import type { Static } from 'typebox'
import type { PetitionsContext } from './context.js'

/** A petition as stored, except for its times. */
interface Row extends Omit<PetitionView, 'created_at' | 'updated_at'> {
  [column: string]: unknown
  created_at: Date
  updated_at: Date
}

export interface Move {
  id: string
  to: PetitionState
  /** Stored with the petition. */
  fate: string | null
  /** The end of the event's name in the ledger. */
  event: string
  /** Who moves it, as recorded in the ledger. */
  actor: string
  traceId: string
  reason: string | null
  /** Set: only if it is this submitter's, and still RECEIVED. */
  submitter: string | null
}

export type Moved =
  | { kind: 'done'; petition: PetitionView }
  | { kind: 'unknown' }
  | { kind: 'foreign' }
  | { kind: 'illegal'; state: PetitionState; allowed: readonly PetitionState[] }

interface OverflowEvent {
  seq: number
  type: string
  /** JSON text. */
  payload: string
}

const columns =
  'id AS petition_id, type, state, text, content_hash, realm, submitter AS submitter_id, fate_reason, version, created_at, updated_at'
const haltScope = 'system'
const blocksRows = 1_000
/** The next read returns the rest. */
const overflowRows = 100

export async function findPetition({ intake, schema }: PetitionsContext, id: string): Promise<PetitionView | null> {
  const { rows } = await intake.read<Row>(`SELECT ${columns} FROM ${schema}.petitions WHERE id = $1`, [id])
  return rows[0] === undefined ? null : toView(rows[0])
}

/** Oldest first, after `after`, until they have more than `bytesMax` bytes of text; at least one. */
export async function listPetitions(
  { intake, schema }: PetitionsContext,
  state: PetitionState,
  limit: number,
  after: string | null,
  bytesMax: number,
): Promise<CutRows<PetitionView> & { total: number }> {
  const oldest = `SELECT *, octet_length(text) AS bytes FROM ${schema}.petitions WHERE state = $1 AND ($2::uuid IS NULL OR id > $2) ORDER BY id LIMIT $3`
  const { rows } = await intake.read<Row & { cut: boolean }>(
    `SELECT ${columns}, cut FROM (${pageSql(oldest, 'r.id', '$4')}) page ORDER BY id`,
    [state, after, limit, bytesMax],
  )
  const counted = await intake.read<{ n: number }>(`SELECT n FROM ${schema}.petition_states WHERE state = $1`, [state])
  return { ...cutRows(rows, ({ cut: _, ...row }) => toView(row)), total: Number(counted.rows[0]?.n ?? 0) }
}

/** The ids whose version differs from the one that the caller waits on. */
export async function changedPetitions(
  { intake, schema }: PetitionsContext,
  waiting: ReadonlyMap<string, number>,
): Promise<string[]> {
  const { rows } = await intake.read<{ id: string }>(
    `SELECT p.id FROM ${schema}.petitions p JOIN unnest($1::uuid[], $2::int[]) u(id, version) ON u.id = p.id
     WHERE p.version <> u.version`,
    [[...waiting.keys()], [...waiting.values()]],
  )
  return rows.map(({ id }) => id)
}

export async function movePetition({ intake, schema, metrics }: PetitionsContext, move: Move): Promise<Moved> {
  const { id, to, fate, reason, event, actor, traceId, submitter } = move
  const { rows } = await intake.transaction((tx) =>
    tx.query<Row & { outcome: Moved['kind'] }>(
      `SELECT t.outcome, ${columns} FROM ${schema}.petition_transition($1, $2, $3, $4, $5, $6, $7, $8) t CROSS JOIN LATERAL (SELECT (t.petition).*) p`,
      [id, to, fate, reason, `petition.submission.${event}`, actor, traceId, submitter],
    ),
  )
  if (rows[0] === undefined) return { kind: 'unknown' }
  const { outcome, ...row } = rows[0]
  switch (outcome) {
    case 'done':
      if (petitionMoves[to].length === 0) metrics.fates.labels(to).inc()
      return { kind: 'done', petition: toView(row) }
    case 'illegal':
      return { kind: 'illegal', state: row.state, allowed: petitionMoves[row.state] }
    default:
      return { kind: outcome }
  }
}

export async function haltIntake(context: PetitionsContext, reason: string, actor: string, traceId: string) {
  const { intake, log } = context
  await intake.transaction(async (tx) => {
    if (!(await intake.halt(reason, haltScope, tx))) return
    await intake.ledger.append(tx, [{ type: 'system.halted', actor, traceId, payload: { reason } }])
  })
  log.warn({ actor, reason }, 'intake of petitions is halted')
  await intake.refresh()
  return haltState(context)
}

export async function resumeIntake(context: PetitionsContext, actor: string, traceId: string) {
  const { intake, log } = context
  await intake.transaction(async (tx) => {
    if (!(await intake.resume(haltScope, tx))) return
    await intake.ledger.append(tx, [{ type: 'system.resumed', actor, traceId, payload: {} }])
  })
  log.warn({ actor }, 'intake of petitions is resumed')
  await intake.refresh()
  return haltState(context)
}

export async function haltState({ intake, schema }: PetitionsContext): Promise<Static<typeof HaltState>> {
  const { rows } = await intake.read<{ reason: string; since: Date }>(
    `SELECT reason, since FROM ${schema}.halts WHERE scope = $1`,
    [haltScope],
  )
  const [row] = rows
  return row === undefined
    ? { halted: false, reason: null, since: null }
    : { halted: true, reason: row.reason, since: row.since.toISOString() }
}

/** The count of each state, and the overflows after `after` (null: since this process was enlisted). */
export async function readOverview({ intake, schema }: PetitionsContext, after: number | null) {
  const { rows } = await intake.read<{
    counts: Partial<Record<PetitionState, number>> | null
    after: number
    overflows: OverflowEvent[] | null
  }>(
    `SELECT (SELECT json_object_agg(s.state, s.n) FROM ${schema}.petition_states s) AS counts, o.after, o.overflows
     FROM ${schema}.petition_overflows($1, $2, $3) o`,
    [intake.instance, after, overflowRows],
  )
  const [row] = rows
  return { counts: row?.counts ?? {}, after: Number(row?.after ?? after), overflows: row?.overflows ?? [] }
}

/** Reports blocks of a past minute that no later block has reported. */
export async function reportBlocks({ intake, schema }: PetitionsContext): Promise<void> {
  await intake.read(`SELECT ${schema}.petitions_record_blocks($1)`, [blocksRows])
}

/** Removes a batch of submitters whose last block was long ago. */
export async function forgetBlocks({ intake, schema }: PetitionsContext): Promise<SweptBatch> {
  const { rows } = await intake.transaction((tx) =>
    tx.query<{ n: number }>(`SELECT ${schema}.petitions_forget_blocks($1) AS n`, [blocksRows]),
  )
  const n = rows[0]?.n ?? 0
  return { removed: { petition_blocks: n }, isFull: n >= blocksRows }
}

const toView = ({ created_at, updated_at, ...petition }: Row): PetitionView => ({
  ...petition,
  created_at: created_at.toISOString(),
  updated_at: updated_at.toISOString(),
})

export function toStatus({ petition_id, state, fate_reason, version, updated_at }: PetitionView): PetitionStatus {
  return { petition_id, state, fate_reason, version, updated_at }
}
