/**
 * Stored decisions: by request id for later reads, and by idempotency key for repeated requests.
 *
 *   decided ──recorded, many in one commit──► kept ──its time is over──► swept
 *      └── its key has a decision already ──► that one, or a violation if the task differs
 *
 * The key is written together with the decision, never earlier: a process that dies in between leaves nothing behind.
 * Concurrent requests with one key store exactly one decision, and all get it.
 */
import type { RouteDecision } from '@spillway/protocol/wire'
import { codeOf, digestUuid, Flush, type Intake, retryConflicts, type SweptBatch } from 'spillway/workload'

export interface DecisionStoreOptions {
  intake: Intake
  /** Of the store's tables, quoted for SQL. */
  schema: string
  /** How long a key returns its decision. */
  keyTtlMs: number
  /** How long a decision can be read. Default one hour. */
  decisionTtlMs?: number
  /** Default 30,000. */
  sweepEveryMs?: number
}

export interface NewDecision {
  tenant: string
  /** A UUID. */
  requestId: string
  decision: RouteDecision
  traceId: string
  keyed?: Keyed | undefined
}

export interface Keyed {
  key: string
  /** The key's owner: a tenant, or empty if the key itself contains its owner. */
  scope: string
  /** The task's digest (taskDigest). */
  digest: string
}

/** What the key was used for before. */
export type KeyUse = { kind: 'replay'; decision: RouteDecision } | { kind: 'violation' }
export type Recorded = { kind: 'stored' } | KeyUse

type StoredDecision = Omit<NewDecision, 'keyed'> & { decidedAt: Date }

interface Lookup {
  key: string
  digest: string
}

const decisionTtlMsDefault = 3_600_000
const sweepEveryMsDefault = 30_000
/** Per transaction and table. */
const sweepRows = 2_000
const attemptsMax = 5

/** Size and delay of a flush: the same as for accepted operations, whose callers wait in the same way. */
const flushBounds = {
  itemsMax: 500,
  bytesMax: 4_194_304,
  waitingMax: 10_000,
  timeoutMs: 1_800,
  isPoison: (fault: unknown) => codeOf(fault) === 'data' || codeOf(fault) === undefined,
  timeoutFault: () => waitedTooLong(),
}

export class DecisionStore {
  readonly #options: Required<DecisionStoreOptions>
  readonly #records: Flush<NewDecision, Recorded>
  readonly #lookups: Flush<Lookup, KeyUse | null>
  #stopSweep: () => Promise<void> = async () => undefined
  #closed = false

  constructor(options: DecisionStoreOptions) {
    this.#options = { decisionTtlMs: decisionTtlMsDefault, sweepEveryMs: sweepEveryMsDefault, ...options }
    this.#records = new Flush({
      ...flushBounds,
      write: (entries) => retryConflicts(attemptsMax, () => this.#record(entries)),
      sizeOf: ({ tenant, decision }) => 400 + tenant.length + decision.provider_id.length,
    })
    this.#lookups = new Flush({
      ...flushBounds,
      write: (lookups) => this.#lookUp(lookups),
      sizeOf: () => 100,
    })
  }

  /** Starts sweeping expired rows. */
  start(): void {
    if (this.#closed) return
    const { intake, sweepEveryMs: everyMs } = this.#options
    this.#stopSweep = intake.sweeps.add({ name: 'routing', everyMs, batch: () => this.sweep() })
  }

  /** Resolves when everything handed over is written. Call it while the store is still open. */
  async close(): Promise<void> {
    this.#closed = true
    await Promise.all([this.#records.drained(), this.#lookups.drained(), this.#stopSweep()])
  }

  /** Resolves when it is committed. Throws if the store failed: the outcome is then unknown. */
  record(decided: NewDecision): Promise<Recorded> {
    return this.#records.isFull ? Promise.reject(waitedTooLong()) : this.#records.submit(decided)
  }

  /** A look before the work, to save it; `record` decides. Null: the key is unused. */
  replay({ key, scope, digest }: Keyed): Promise<KeyUse | null> {
    if (this.#lookups.isFull) return Promise.reject(waitedTooLong())
    return this.#lookups.submit({ key: keyOf(scope, key), digest })
  }

  /** Without a tenant: the last decision under this id. */
  async find(tenant: string | null | undefined, requestId: string): Promise<StoredDecision | null> {
    const { intake, schema } = this.#options
    const { rows } = await intake.read<StoredDecision>(
      `SELECT tenant, request AS "requestId", decision, trace_id AS "traceId", decided_at AS "decidedAt" FROM ${schema}.rt_decisions
       WHERE request = $1 AND ($2::text IS NULL OR tenant = $2) AND expires_at > ${schema}.clock() ORDER BY decided_at DESC LIMIT 1`,
      [requestId, tenant ?? null],
    )
    return rows[0] ?? null
  }

  /** Removes a batch of expired rows. */
  async sweep(): Promise<SweptBatch> {
    const { intake, schema } = this.#options
    const { rows } = await intake.transaction((tx) =>
      tx.query<Record<'decisions' | 'keys' | 'burials', number | null>>(
        `SELECT decisions, keys, burials FROM ${schema}.rt_sweep(${sweepRows})`,
      ),
    )
    // Null: another process is sweeping.
    const [row] = rows
    const removed = { rt_decisions: row?.decisions ?? 0, rt_keys: row?.keys ?? 0, rt_burials: row?.burials ?? 0 }
    return { removed, isFull: Math.max(...Object.values(removed)) >= sweepRows }
  }

  async #record(entries: readonly NewDecision[]): Promise<Recorded[]> {
    const { intake, schema, keyTtlMs, decisionTtlMs } = this.#options
    const { rows } = await intake.statements.release<{ verdict: Recorded['kind']; decision: RouteDecision | null }>(
      `SELECT verdict, decision FROM ${schema}.rt_store_decisions($1, $2, $3, $4, $5, $6, $7, $8)`,
      [
        entries.map((e) => e.requestId),
        entries.map((e) => e.tenant),
        entries.map((e) => e.traceId),
        entries.map((e) => (e.keyed === undefined ? null : keyOf(e.keyed.scope, e.keyed.key))),
        entries.map((e) => e.keyed?.digest ?? null),
        entries.map((e) => JSON.stringify(e.decision)),
        decisionTtlMs,
        keyTtlMs,
      ],
    )
    return rows.map(({ verdict, decision }) =>
      verdict === 'replay' ? { kind: verdict, decision: decision as RouteDecision } : { kind: verdict },
    )
  }

  async #lookUp(lookups: readonly Lookup[]): Promise<(KeyUse | null)[]> {
    const { intake, schema } = this.#options
    const { rows } = await intake.statements.take<{ key: string; task: string; decision: RouteDecision }>(
      `SELECT key, task, decision FROM ${schema}.rt_keys WHERE key = ANY ($1) AND expires_at > ${schema}.clock()`,
      [lookups.map(({ key }) => key)],
    )
    const byKey = new Map(rows.map((row) => [row.key, row]))
    return lookups.map(({ key, digest }) => {
      const row = byKey.get(key)
      if (row === undefined) return null
      return row.task === digest ? { kind: 'replay', decision: row.decision } : { kind: 'violation' }
    })
  }
}

/** Neither can contain NUL. */
function keyOf(scope: string, key: string): string {
  return digestUuid(`${scope}\0${key}`)
}

function waitedTooLong(): Error {
  return Object.assign(new Error('too many decisions wait to be written'), { code: 'timeout' })
}
