/** Received petitions: read, move on, withdraw; halts. One row, one writer at a time: see sql/functions/transition.sql. */
import {
  type PetitionState,
  type PetitionStatus,
  type PetitionType,
  type PetitionView,
  petitionMoves,
} from '@spillway/protocol/wire'
import { type CutRows, cutRows, type Intake, pageSql, type SweptBatch } from 'spillway/workload'
import type { PetitionsOptions } from './options.js'

interface Row extends Record<string, unknown> {
  id: string
  type: PetitionType
  state: PetitionState
  text: string
  content_hash: string
  realm: string | null
  submitter: string
  fate_reason: string | null
  version: number
  created_at: Date
  updated_at: Date
}

export interface Move {
  id: string
  /** Who moves it, as recorded in the ledger. */
  actor: string
  traceId: string
  reason: string | null
}

export type Moved =
  | { kind: 'done'; petition: PetitionView }
  | { kind: 'unknown' }
  | { kind: 'foreign' }
  | { kind: 'illegal'; state: PetitionState; allowed: readonly PetitionState[] }

export interface Halt {
  halted: boolean
  reason: string | null
  since: string | null
}

export interface OverflowEvent {
  seq: number
  type: string
  /** JSON text. */
  payload: string
}

export interface PetitionsOverview {
  counts: Partial<Record<PetitionState, number>>
  /** Where the next read continues. */
  after: number
  overflows: readonly OverflowEvent[]
}

const columns = 'id, type, state, text, content_hash, realm, submitter, fate_reason, version, created_at, updated_at'
const haltScope = 'system'

export class Petitions {
  readonly #intake: Intake
  readonly #options: PetitionsOptions

  constructor(intake: Intake, options: PetitionsOptions) {
    this.#intake = intake
    this.#options = options
  }

  async get(id: string): Promise<PetitionView | null> {
    const { rows } = await this.#intake.read<Row>(
      `SELECT ${columns} FROM ${this.#options.schema}.petitions WHERE id = $1`,
      [id],
    )
    return rows[0] === undefined ? null : toView(rows[0])
  }

  /** Oldest first, after `after`, until they have more than `bytesMax` bytes of text; at least one. */
  async list(
    state: PetitionState,
    limit: number,
    after: string | null,
    bytesMax: number,
  ): Promise<CutRows<PetitionView> & { total: number }> {
    const { schema } = this.#options
    const { rows } = await this.#intake.read<Row & { cut: boolean }>(
      pageSql(
        `SELECT ${columns}, octet_length(text) AS bytes FROM ${schema}.petitions WHERE state = $1 AND ($2::uuid IS NULL OR id > $2) ORDER BY id LIMIT $3`,
        'r.id',
        '$4',
      ),
      [state, after, limit, bytesMax],
    )
    const counted = await this.#intake.read<{ n: number }>(`SELECT n FROM ${schema}.petition_states WHERE state = $1`, [
      state,
    ])
    return { ...cutRows(rows, toView), total: Number(counted.rows[0]?.n ?? 0) }
  }

  /** The ids whose version differs from the one that the caller waits on. */
  async changed(waiting: ReadonlyMap<string, number>): Promise<string[]> {
    const { rows } = await this.#intake.read<{ id: string }>(
      `SELECT p.id FROM ${this.#options.schema}.petitions p JOIN unnest($1::uuid[], $2::int[]) u(id, version) ON u.id = p.id
       WHERE p.version <> u.version`,
      [[...waiting.keys()], [...waiting.values()]],
    )
    return rows.map(({ id }) => id)
  }

  transition(move: Move, to: PetitionState): Promise<Moved> {
    return this.#move(move, { to, fate: move.reason, event: to.toLowerCase(), submitter: null })
  }

  /** By its submitter, while it is still RECEIVED. */
  withdraw(move: Move, submitter: string): Promise<Moved> {
    return this.#move(move, { to: 'ACKNOWLEDGED', fate: 'WITHDRAWN', event: 'withdrawn', submitter })
  }

  async #move(
    { id, actor, traceId, reason }: Move,
    how: { to: PetitionState; fate: string | null; event: string; submitter: string | null },
  ): Promise<Moved> {
    const { schema, metrics } = this.#options
    const [row] = await this.#intake.transaction(async (tx) => {
      const { rows } = await tx.query<Row & { outcome: 'done' | 'unknown' | 'foreign' | 'illegal' }>(
        `SELECT t.outcome, (t.petition).* FROM ${schema}.petition_transition($1, $2, $3, $4, $5, $6, $7, $8) t`,
        [id, how.to, how.fate, reason, `petition.submission.${how.event}`, actor, traceId, how.submitter],
      )
      return rows
    })
    switch (row?.outcome) {
      case 'done':
        if (petitionMoves[how.to].length === 0) metrics.fates.labels(how.to).inc()
        return { kind: 'done', petition: toView(row) }
      case 'foreign':
        return { kind: 'foreign' }
      case 'illegal':
        return { kind: 'illegal', state: row.state, allowed: petitionMoves[row.state] }
      default:
        return { kind: 'unknown' }
    }
  }

  async halt(reason: string, actor: string, traceId: string): Promise<Halt> {
    await this.#intake.transaction(async (tx) => {
      if (!(await this.#intake.halt(reason, haltScope, tx))) return
      await this.#intake.ledger.append(tx, [{ type: 'system.halted', actor, traceId, payload: { reason } }])
    })
    this.#options.log.warn({ actor, reason }, 'intake of petitions is halted')
    await this.#intake.refresh()
    return this.halted()
  }

  async resume(actor: string, traceId: string): Promise<Halt> {
    await this.#intake.transaction(async (tx) => {
      if (!(await this.#intake.resume(haltScope, tx))) return
      await this.#intake.ledger.append(tx, [{ type: 'system.resumed', actor, traceId, payload: {} }])
    })
    this.#options.log.warn({ actor }, 'intake of petitions is resumed')
    await this.#intake.refresh()
    return this.halted()
  }

  async halted(): Promise<Halt> {
    const { rows } = await this.#intake.read<{ reason: string; since: Date }>(
      `SELECT reason, since FROM ${this.#options.schema}.halts WHERE scope = $1`,
      [haltScope],
    )
    const [row] = rows
    return row === undefined
      ? { halted: false, reason: null, since: null }
      : { halted: true, reason: row.reason, since: row.since.toISOString() }
  }

  /** The count of each state, and the overflows after `after` (null: since this process was enlisted). */
  async overview(after: number | null): Promise<PetitionsOverview> {
    const { schema } = this.#options
    const { rows } = await this.#intake.read<{
      counts: PetitionsOverview['counts']
      after: number
      overflows: OverflowEvent[] | null
    }>(
      `SELECT (SELECT json_object_agg(s.state, s.n) FROM ${schema}.petition_states s) AS counts, o.after, o.overflows
       FROM ${schema}.petition_overflows($1, $2, $3) o`,
      [this.#intake.instance, after, overflowRows],
    )
    const [row] = rows
    return { counts: row?.counts ?? {}, after: Number(row?.after ?? after), overflows: row?.overflows ?? [] }
  }

  /** Reports blocks of a past minute that no later block has reported. */
  async tellBlocks(): Promise<void> {
    await this.#intake.read(`SELECT ${this.#options.schema}.petitions_tell_blocks($1)`, [tellBlocksRows])
  }

  /** Removes a batch of submitters whose last block was long ago. */
  async forgetBlocks(): Promise<SweptBatch> {
    const { rows } = await this.#intake.transaction((tx) =>
      tx.query<{ n: number }>(`SELECT ${this.#options.schema}.petitions_forget_blocks($1) AS n`, [tellBlocksRows]),
    )
    const n = rows[0]?.n ?? 0
    return { removed: { petition_blocks: n }, isFull: n >= tellBlocksRows }
  }
}

const tellBlocksRows = 1_000
/** The next read returns the rest. */
const overflowRows = 100

function toView(row: Row): PetitionView {
  return {
    type: row.type,
    text: row.text,
    content_hash: row.content_hash,
    realm: row.realm,
    submitter_id: row.submitter,
    created_at: row.created_at.toISOString(),
    ...statusOf(row),
  }
}

const statusOf = (row: Row): PetitionStatus => ({
  petition_id: row.id,
  state: row.state,
  fate_reason: row.fate_reason,
  version: row.version,
  updated_at: row.updated_at.toISOString(),
})

export function toStatus({ petition_id, state, fate_reason, version, updated_at }: PetitionView): PetitionStatus {
  return { petition_id, state, fate_reason, version, updated_at }
}
