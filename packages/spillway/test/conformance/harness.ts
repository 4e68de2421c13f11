/**
 * What the conformance suite and the model test need of a store: the port itself, and the database behind it, to look
 * at what the port does not show and to replace the clock.
 */
import { randomUUID } from 'node:crypto'
import pg from 'pg'
import { digestUuid, laneOf, newOperationId } from '../../src/core/ids.js'
import type {
  AcceptContext,
  Accepted,
  AcceptItem,
  Claimed,
  ClaimRequest,
  Leaving,
  OpenTx,
  Settlement,
  Store,
  StoredAnswer,
} from '../../src/store/port.js'
import { postgresStore } from '../../src/store/postgres/store.js'

/** One store of its own on the engine under test; everything in it goes with `close`. */
export interface OpenedStore {
  store: Store
  /** Another process on the same data: connections of its own. */
  another(): Store
  /** Straight to the tables, with search_path on the store's schema. */
  sql<Row extends Record<string, unknown>>(text: string, values?: readonly unknown[]): Promise<Row[]>
  /** A session of its own, likewise. */
  session(): Promise<pg.Client>
  /** Moves the store's clock. Time goes on from there. */
  advance(ms: number): Promise<void>
  /** Stops the store's clock, at an RFC 3339 instant; null lets it go again. */
  freeze(at: string | null): Promise<void>
  close(): Promise<void>
}

export type OpenStore = () => Promise<OpenedStore>

const schema = 'conformance'
/** Longer than any call here may wait for a lock, shorter than a test may last. */
const callTimeoutMs = 20_000

/**
 * Stores on one database that is nobody else's. The schema is made once and emptied for each: creating it again takes
 * longer than most tests.
 */
export function storesOn(databaseUrl: string): OpenStore {
  let made = false
  return async () => {
    const stores: Store[] = []
    const clients: pg.Client[] = []
    const transactions: OpenTx[] = []
    const open = (): Store => {
      const store = postgresStore({ url: databaseUrl, schema, timeoutMs: callTimeoutMs })
      stores.push(store)
      const begin = async (): Promise<OpenTx> => {
        const tx = await store.begin(30_000)
        transactions.push(tx)
        return tx
      }
      return { ...store, begin }
    }
    const session = async (): Promise<pg.Client> => {
      const client = new pg.Client({ connectionString: databaseUrl, options: `-c search_path=${schema}` })
      await client.connect()
      clients.push(client)
      return client
    }
    const admin = await session()
    const sql: OpenedStore['sql'] = async (text, values) => (await admin.query(text, values && [...values])).rows
    if (!made) {
      // Nothing here asks what survives a power cut.
      const [row] = await sql<{ name: string }>('SELECT current_database() AS name')
      await sql(`ALTER DATABASE ${row?.name} SET synchronous_commit = off`)
    }
    const store = open()
    if (made) await empty(sql)
    else await store.migrate()
    made = true
    let clockReplaced = false
    const setClock = async (assignment: string, value: unknown): Promise<void> => {
      if (!clockReplaced) {
        await sql('CREATE TABLE test_clock (shift interval NOT NULL, stopped_at timestamptz)')
        await sql("INSERT INTO test_clock VALUES ('0')")
        await sql(`CREATE OR REPLACE FUNCTION clock() RETURNS timestamptz LANGUAGE sql VOLATILE AS
          $$ SELECT coalesce(c.stopped_at, clock_timestamp()) + c.shift FROM ${schema}.test_clock c $$`)
        clockReplaced = true
      }
      await sql(`UPDATE test_clock SET ${assignment}`, [value])
    }
    return {
      store,
      another: open,
      sql,
      session,
      advance: (ms) => setClock("shift = shift + $1::float8 * interval '1 ms'", ms),
      freeze: (at) => setClock('stopped_at = $1::timestamptz', at),
      close: async () => {
        // A test that failed half-way may have left transactions open; the next one must not wait for them.
        await Promise.all(clients.map((client) => client.end()))
        await Promise.all(transactions.map((tx) => tx.rollback()))
        await Promise.all(stores.map((s) => s.close()))
      },
    }
  }
}

const ours = new Set<string>()

async function empty(sql: OpenedStore['sql']): Promise<void> {
  await sql(
    'CREATE OR REPLACE FUNCTION clock() RETURNS timestamptz LANGUAGE sql VOLATILE AS $$ SELECT clock_timestamp() $$',
  )
  await sql('DROP TABLE IF EXISTS test_clock, effects')
  await sql('DROP FUNCTION IF EXISTS hold CASCADE')
  for (const { name } of await sql<{ name: string }>('SELECT name FROM history_spans')) await sql(`DROP TABLE ${name}`)
  if (ours.size === 0) {
    // Not the ledger, which refuses it, nor the rows that the migrations made.
    const tables = await sql<{ name: string }>(
      "SELECT relname AS name FROM pg_class WHERE relnamespace = current_schema()::regnamespace AND relkind IN ('r', 'p') AND NOT relispartition AND relname NOT LIKE '%migrations%' AND relname NOT IN ('ledger', 'ledger_head', 'petition_states')",
    )
    for (const { name } of tables) ours.add(name)
  }
  for (const name of ours) await sql(`DELETE FROM ${name}`)
  await sql("SELECT setval('stamps', 0)")
}

/** The worker of callers that are no process: they may queue, never execute. */
export const nobody = '00000000-0000-4000-8000-00000000000a'

export const contextOf = (worker: string): AcceptContext => ({ worker, backlogMs: 0, keyTtlMs: 3_600_000 })

export interface Brought extends Partial<Omit<AcceptItem, 'idempotency'>> {
  /** Idempotency key, and the body that it came with. */
  key?: string
  body?: string
}

let stamps = 0

/** An item for lane `q/partition`; each has a stamp of its own, as in the pipeline. */
export function item(partition: string, brought: Brought = {}): AcceptItem {
  const { key, body = 'body', ...given } = brought
  const queue = given.queue ?? 'q'
  return {
    id: newOperationId(),
    lane: laneOf([queue, partition]).id,
    queue,
    partition,
    type: 'work',
    priority: 5,
    identity: 'someone',
    payload: '{}',
    delayMs: 0,
    maxAttempts: 3,
    timeoutMs: 30_000,
    traceparent: '',
    execute: false,
    reason: '',
    paceMs: 0,
    stamp: ++stamps,
    lead: 0,
    gate: null,
    halt: null,
    batch: 0,
    rates: [],
    ...given,
    idempotency: key === undefined ? null : { key: digestUuid(`key ${key}`), request: digestUuid(body) },
  }
}

export const items = (partition: string, count: number, brought: Brought = {}): AcceptItem[] =>
  Array.from({ length: count }, () => item(partition, brought))

/** Accepts and answers the ids, all of which have to be queued. */
export async function queue(store: Store, list: readonly AcceptItem[], worker = nobody): Promise<string[]> {
  const accepted = await store.accept(list, contextOf(worker))
  for (const [index, a] of accepted.entries()) {
    if (a.verdict !== 'queue') throw new Error(`item ${index} was to be queued, not ${a.verdict}`)
  }
  return list.map((i) => i.id)
}

export const verdicts = (accepted: readonly Accepted[]): string[] =>
  accepted.map((a) => (a.verdict === 'refuse' ? `refuse:${a.by}` : a.verdict))

export const claimAll: ClaimRequest = { lanes: 10_000, budget: 100_000, each: 1_000, turn: 1 }
const oneByOne: ClaimRequest = { lanes: 1, budget: 1, each: 1, turn: 1 }

export type Fate =
  | 'completed'
  | { status: 'failed' | 'cancelled'; error: string }
  | { result: unknown }
  | { status: 'completed'; answer: StoredAnswer }

/** A process that runs operations, driven by hand. */
export class TestWorker {
  readonly id = randomUUID()
  readonly store: Store

  private constructor(store: Store) {
    this.store = store
  }

  static async enlist(store: Store, leaseMs = 15_000): Promise<TestWorker> {
    const worker = new TestWorker(store)
    await store.enlist(worker.id, 'a test', leaseMs)
    return worker
  }

  accept(list: readonly AcceptItem[]): Promise<Accepted[]> {
    return this.store.accept(list, contextOf(this.id))
  }

  async claim(request: Partial<ClaimRequest> = {}): Promise<Claimed[]> {
    return (await this.store.step(this.id, 0, [], { ...claimAll, ...request })).claimed
  }

  async claimOne(): Promise<Claimed | undefined> {
    return (await this.store.step(this.id, 0, [], oneByOne)).claimed[0]
  }

  /** Settles; answers the leases that are lost. */
  async settle(settlements: readonly Settlement[]): Promise<number[]> {
    return (await this.store.step(this.id, 0, settlements, null)).lost
  }

  /** Completes all of `claimed` and gives the lanes up. */
  complete(claimed: readonly Claimed[], fate: Fate = 'completed'): Promise<number[]> {
    return this.settle(settlementsOf(claimed, () => fate))
  }

  /** Claims and completes until nothing is left; answers the ids in the order in which they came. */
  async drain(request: Partial<ClaimRequest> = {}): Promise<string[]> {
    const seen: string[] = []
    let settlements: Settlement[] = []
    for (;;) {
      const { lost, claimed } = await this.store.step(this.id, 0, settlements, { ...claimAll, ...request })
      if (lost.length > 0) throw new Error(`leases ${lost.join(', ')} are lost`)
      if (claimed.length === 0) return seen
      const due = claimed.filter((op) => op.due)
      if (due.length < claimed.length) throw new Error(`operation ${claimed.find((op) => !op.due)?.id} is not due`)
      seen.push(...due.map((op) => op.id))
      settlements = settlementsOf(claimed, () => 'completed')
    }
  }
}

export function leaving(op: Claimed, fate: Fate = 'completed'): Leaving {
  const base: Leaving = {
    seq: op.seq,
    type: op.type,
    status: 'completed',
    result: null,
    error: null,
    startedMsAgo: 0,
    counted: true,
    gate: op.gate,
    idempotencyKey: op.idempotencyKey,
    answer: op.idempotencyKey === null ? null : { v: 'done', result: null },
  }
  if (fate === 'completed') return base
  if ('result' in fate) {
    const answer: StoredAnswer | null = op.idempotencyKey === null ? null : { v: 'done', result: fate.result }
    return { ...base, result: JSON.stringify(fate.result), answer }
  }
  if (fate.status === 'completed') return { ...base, answer: fate.answer }
  const answer: StoredAnswer | null =
    op.idempotencyKey === null
      ? null
      : fate.status === 'failed'
        ? { v: 'failed', error: fate.error }
        : { v: 'cancelled' }
  return { ...base, status: fate.status, error: fate.error, answer }
}

/** Settlements that let everything in `claimed` leave and give up every lane. */
export function settlementsOf(claimed: readonly Claimed[], fateOf: (op: Claimed) => Fate): Settlement[] {
  const lanes = new Map<string, Settlement>()
  for (const op of claimed) {
    let settlement = lanes.get(op.lane)
    if (settlement === undefined) {
      settlement = {
        fence: op.fence,
        lane: op.lane,
        from: op.seq - 1,
        leaving: [],
        retry: null,
        release: true,
      }
      lanes.set(op.lane, settlement)
    }
    settlement.leaving.push(leaving(op, fateOf(op)))
  }
  return [...lanes.values()]
}

/** One lane of a lease: what leaves, and what becomes of the rest. */
export function settlement(first: Claimed, rest: Partial<Settlement>): Settlement {
  return { fence: first.fence, lane: first.lane, from: first.seq - 1, leaving: [], retry: null, release: true, ...rest }
}

/** As `accept` gave it to this process to run now. */
export function executing(i: AcceptItem, a: Accepted | undefined): Claimed {
  if (a?.verdict !== 'execute') throw new Error(`not executed but ${a?.verdict}`)
  return {
    fence: a.fence,
    lane: i.lane,
    seq: a.seq,
    id: i.id,
    type: i.type,
    queue: i.queue,
    partition: i.partition,
    priority: i.priority,
    identity: i.identity,
    payload: JSON.parse(i.payload),
    waitedMs: 0,
    careful: false,
    due: true,
    attempts: 0,
    maxAttempts: i.maxAttempts,
    timeoutMs: i.timeoutMs,
    traceparent: i.traceparent,
    idempotencyKey: i.idempotency?.key ?? null,
    gate: i.gate,
  }
}

export function must<T>(value: T | undefined | null): T {
  if (value === undefined || value === null) throw new Error('a value is missing')
  return value
}

const pollMs = 5
const waitMaxMs = 20_000

/** Waits for a condition that the database shows, e.g. that a session waits for a lock. */
export async function until(what: string, condition: () => Promise<boolean>): Promise<void> {
  const deadline = Date.now() + waitMaxMs
  while (!(await condition())) {
    if (Date.now() > deadline) throw new Error(`timed out waiting until ${what}`)
    await new Promise((resolve) => setTimeout(resolve, pollMs))
  }
}

/** Until so many sessions of this database wait for a lock. */
export const untilBlocked = (opened: OpenedStore, count = 1): Promise<void> =>
  until(`${count} sessions wait for a lock`, async () => {
    const [row] = await opened.sql<{ n: number }>(
      "SELECT count(*)::int AS n FROM pg_stat_activity WHERE datname = current_database() AND wait_event_type = 'Lock'",
    )
    return (row?.n ?? 0) >= count
  })
