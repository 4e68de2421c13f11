import { setTimeout as delay } from 'node:timers/promises'
import { checkOptions, isText, methods, OptionError, type Rule, timerMsMax, wholeNumber } from '../../core/options.js'
import { stderrLog } from '../../core/stderr-log.js'
import { withDeadline } from '../../time/with-deadline.js'
import type { Accepted, Decided, Store, StoredAnswer, Tx } from '../port.js'
import { accept, acceptSql, acceptWithEffect, admit, admitSql, applyWithin, effectSql, parts } from './accept.js'
import { AcceptProbe } from './accept-probe.js'
import { addressOf, type Log } from './connect.js'
import { changeConnections } from './connections.js'
import { StoreFault } from './faults.js'
import { coreSql } from './generated/sql.js'
import { ledgerStatements } from './ledger.js'
import { type Listener, listenOn, pollInstead } from './listen.js'
import { migrate, type SqlModule } from './migrate.js'
import { laneDepths, statusOf } from './operation-status.js'
import type { QueryConfig, Result } from './pinned-query.js'
import { type Lane, openPools, poolMaxLeast } from './pools.js'
import { type PulseRow, toPulse } from './pulse.js'
import { claimSql, type QueryRows, settleSql, settleValues, step, stepSql } from './step.js'
import { StreamBell } from './stream-bell.js'
import { appendSettings, PostgresStreamLog } from './stream-log.js'
import { postgresStreamRegistry } from './stream-registry.js'
import { sweepStatements } from './sweeping.js'
import { deadLetter, deadLetterIds, finishedTickets, listDeadLetters, listTickets, stats, ticket } from './tickets.js'

export interface PostgresOptions {
  url: string
  /** A direct address of the same database for LISTEN, if `url` leads to a pooler that cannot carry it. */
  listenUrl?: string
  /** Default `spillway`. */
  schema?: string
  /** Tables and functions that workloads add; the core's are always installed. */
  sql?: readonly SqlModule[]
  /** Connections to the database, without one for heartbeats and one for LISTEN. At least 8. Default 10. */
  poolMax?: number
  /** A call that takes longer has failed. Default 2,000. */
  timeoutMs?: number
  /** Slows each write, for drills. Default 0. */
  delayMs?: number
  log?: Log
}

const quote = (name: string): string => `"${name.replaceAll('"', '""')}"`

const rules: Record<keyof PostgresOptions, Rule> = {
  url: isPostgresUrl,
  listenUrl: isPostgresUrl,
  schema: isText,
  sql: (value) => (Array.isArray(value) ? null : 'a list of SQL modules'),
  poolMax: wholeNumber(poolMaxLeast, 10_000),
  timeoutMs: wholeNumber(1, timerMsMax),
  delayMs: wholeNumber(0, timerMsMax),
  log: methods('info', 'warn', 'error'),
}

function isPostgresUrl(value: unknown): string | null {
  return typeof value === 'string' && /^postgres(ql)?:\/\//.test(value)
    ? null
    : 'a text like postgres://user@host:5432/database'
}

function checkPostgresOptions(options: PostgresOptions): void {
  checkOptions('postgres', options, rules)
  if (options.url === undefined) {
    throw new OptionError('postgres: url is missing; is the variable that should have it set? Give postgres({ url })')
  }
}

/** The connections, and how statements run on them. */
function openDatabase(options: PostgresOptions) {
  const schema = options.schema ?? 'spillway'
  const s = quote(schema)
  const timeoutMs = options.timeoutMs ?? 2_000
  const channel = `spillway_${schema}`
  const poolMax = options.poolMax ?? 10
  const log = options.log ?? stderrLog
  const pools = openPools({ url: options.url, poolMax, timeoutMs, streamSettings: appendSettings, log })
  const named = (config: QueryConfig): QueryConfig => {
    const name = prepared.get(config.text)
    return name === undefined ? config : { ...config, name }
  }
  const runner =
    (ask: <Row>(config: QueryConfig) => Promise<Result<Row>>): Tx['query'] =>
    (text, values) =>
      ask(named({ text, ...(values && { values: [...values] }) }))
  const inLane = (lane: Lane): Tx['query'] => runner((config) => pools.query(lane, config))
  const rows: QueryRows = async (text, values) =>
    (await pools.query<unknown[]>('settle', named({ text, values: [...values], rowMode: 'array' }))).rows
  const sql = { accept: acceptSql(s), admit: admitSql(s), step: stepSql(s), settle: settleSql(s), claim: claimSql(s) }
  const prepared = new Map(Object.entries(sql).map(([name, text]) => [text, `spillway_${name}`]))
  const effectOf = (name: string, values: number): string => {
    const text = effectSql(s, name, values)
    if (!prepared.has(text)) prepared.set(text, `spillway_effect_${prepared.size}`)
    return text
  }
  /** For statements that are repeated. */
  const preparing =
    (query: Tx['query']): Tx['query'] =>
    (text, values) => {
      if (!prepared.has(text)) prepared.set(text, `spillway_own_${prepared.size}`)
      return query(text, values)
    }
  const probe = new AcceptProbe()
  const accepting = inLane('accept')
  const on = {
    accept: (async (text, values) => {
      const answer = await accepting(text, values)
      probe.proven()
      return answer
    }) as Tx['query'],
    settle: inLane('settle'),
    reads: inLane('reads'),
    heartbeat: runner(pools.heartbeat),
    sweep: runner(pools.sweep),
  }
  const slowly = async <T>(write: () => Promise<T>): Promise<T> => {
    if (options.delayMs) await delay(options.delayMs)
    return write()
  }
  const value = async <T>(query: Tx['query'], text: string, values: readonly unknown[]): Promise<T | undefined> => {
    const { rows } = await query<{ v: T }>(`SELECT ${text} AS v`, values)
    return rows[0]?.v
  }

  return {
    s,
    schema,
    channel,
    timeoutMs,
    poolMax,
    log,
    pools,
    runner,
    inLane,
    preparing,
    probe,
    on,
    rows,
    sql,
    effectOf,
    slowly,
    value,
  }
}

type Database = ReturnType<typeof openDatabase>

/** Wake-ups between processes, and the streams, which are woken by the same connection. */
class Notices {
  readonly #options: PostgresOptions
  readonly #db: Database
  #listener: Listener | undefined
  #streamLog: PostgresStreamLog | undefined

  constructor(options: PostgresOptions, db: Database) {
    this.#options = options
    this.#db = db
  }

  async wake(kind: string): Promise<void> {
    await this.#db.on.heartbeat('SELECT pg_notify($1, $2)', [this.#db.channel, kind])
  }

  async listen(onWake: (kind: string) => void, onMissed?: () => void): Promise<void> {
    const { url, listenUrl } = this.#options
    const { pools, channel, log } = this.#db
    const streams = 'streams:'
    const missed = (): void => {
      this.#streamLog?.heard(null)
      onMissed?.()
    }
    if (listenUrl === undefined && (await pools.reach()) === 'transaction') {
      log.warn(
        {},
        'the pooler cannot carry LISTEN: polling each second; set SPILLWAY_LISTEN_URL to a direct address of the database for quicker wake-ups',
      )
      this.#listener = pollInstead(missed)
      return
    }
    this.#listener = listenOn({
      url: listenUrl ?? url,
      channel,
      onNotice: (kind) =>
        kind.startsWith(streams) ? this.#streamLog?.heard(kind.slice(streams.length)) : onWake(kind),
      onGap: missed,
      log,
    })
    await this.#listener.started
  }

  streams({ retentionMs, longestMs }: { retentionMs: number; longestMs: number }): ReturnType<Store['streams']> {
    if (this.#streamLog !== undefined) throw new Error('the streams of this store are in use already')
    const { s: schema, channel, timeoutMs, pools, runner, inLane, preparing, on, slowly } = this.#db
    pools.openStreams()
    const query = preparing(runner(pools.streams))
    const bell = new StreamBell({ query: preparing(inLane('take')), channel })
    const append: Tx['query'] = (text, values) => slowly(() => query(text, values))
    this.#streamLog = new PostgresStreamLog({ append, read: query, bell, schema })
    const registry = postgresStreamRegistry({
      ...{ query, sweep: on.sweep, bell, schema },
      ...{ timeoutMs, retentionMs, longestMs },
    })
    return { log: this.#streamLog, registry }
  }

  close(): Promise<void> | undefined {
    return this.#listener?.close()
  }
}

export function postgresStore(options: PostgresOptions): Store {
  checkPostgresOptions(options)
  const database = openDatabase(options)
  const { s, schema, timeoutMs, poolMax, log, pools, inLane, preparing, on, value } = database
  const notices = new Notices(options, database)
  return {
    migrate: () =>
      migrate({
        url: options.url,
        schema,
        sql: [coreSql, ...(options.sql ?? [])],
        log,
      }),
    ...acceptStatements(database),
    ...workStatements(database),
    ...processStatements(database),
    ...sweepStatements(on.sweep, s),
    audit: async () => (await on.sweep<{ fault: string }>(`SELECT fault FROM ${s}.audit()`)).rows.map((r) => r.fault),
    ...ticketStatements(database),
    ...ledgerStatements(on.reads, s),
    read: on.reads,
    statements: { take: preparing(inLane('take')), release: preparing(inLane('settle')) },
    ...gateStatements(database),
    wake: (kind) => notices.wake(kind),
    listen: (onWake, onMissed) => notices.listen(onWake, onMissed),
    streams: (spans) => notices.streams(spans),
    address: addressOf(options.url),
    poolState: () => ({
      max: poolMax,
      busy: pools.used('reads') + pools.used('handlers'),
      idle: pools.idle,
      waiting: pools.waiting('reads') + pools.waiting('handlers'),
    }),
    ping: async () => {
      const before = Date.now()
      const theirs = (await value<number>(on.heartbeat, `extract(epoch FROM ${s}.clock())::float8 * 1000`, [])) ?? 0
      return { skewMs: Math.round(theirs - (before + Date.now()) / 2) }
    },
    close: async (waitMs = timeoutMs) => {
      const ended = Promise.all([notices.close(), pools.end()])
      // A pool waits for its statements, the wake-up connection for its end; a server that never answers must not delay closing.
      await withDeadline(ended, Math.min(waitMs, timeoutMs), () => undefined)
    },
  }
}

/** Accepting, and the idempotency keys. */
function acceptStatements({
  s,
  channel,
  timeoutMs,
  pools,
  probe,
  on,
  sql,
  effectOf,
  slowly,
}: Database): Pick<
  Store,
  | 'accept'
  | 'admit'
  | 'acceptAndApply'
  | 'acceptWithEffect'
  | 'applyWithin'
  | 'acceptWithin'
  | 'answerKey'
  | 'forgetKey'
> {
  return {
    accept: (items, context) =>
      slowly(() => accept(on.accept, sql.accept, items, context, { part: parts.accept, apply: false })),
    admit: (items) => slowly(() => admit(on.accept, sql.admit, items)),
    acceptAndApply: (items, context, effect) =>
      slowly(async () => {
        const tx = await pools.begin('accept', timeoutMs)
        try {
          const accepted = await accept(tx.query, sql.accept, items, context, { part: parts.apply, apply: true })
          const decided = decidedOf(accepted)
          const answers = decided.applied.length > 0 ? await withDeadline(effect(tx, decided), timeoutMs, late) : []
          const keyed = decided.applied.flatMap((index, i) => {
            const item = items[index]
            const answer = answers[i]
            const key = item?.idempotency?.key
            return key === undefined || answer === undefined ? [] : [{ key, op: item?.id ?? '', answer }]
          })
          if (keyed.length > 0) await answerKeys(s, tx.query, keyed)
          await tx.commit()
          probe.proven()
          return accepted
        } catch (error) {
          await tx.rollback()
          throw error
        }
      }),
    acceptWithEffect: (items, context, effect, tx) =>
      slowly(() => acceptWithEffect(tx?.query.bind(tx) ?? on.accept, effectOf, items, context, effect)),
    applyWithin,
    acceptWithin: async (tx, items, context) => {
      const queued = items.map((item) => ({ ...item, execute: false, reason: 'requested' as const }))
      const accepted = await accept(tx.query.bind(tx), sql.accept, queued, context, {
        part: parts.within,
        apply: false,
      })
      await tx.query('SELECT pg_notify($1, $2)', [channel, 'ready'])
      return accepted
    },
    answerKey: (key, operationId, answer) => answerKeys(s, on.accept, [{ key, op: operationId, answer }]),
    forgetKey: async (key, operationId) => {
      await on.accept(`DELETE FROM ${s}.idempotency d WHERE d.key = $1 AND d.op = $2`, [key, operationId])
    },
  }
}

/** Claiming, running and settling. */
function workStatements({
  s,
  pools,
  on,
  rows,
  sql,
  slowly,
  value,
}: Database): Pick<Store, 'step' | 'holdWithin' | 'settleWithin' | 'confirm' | 'mark' | 'begin'> {
  return {
    step: (worker, part, settlements, claim) =>
      settlements.length === 0
        ? step(rows, sql, worker, parts.step + part, settlements, claim)
        : slowly(() => step(rows, sql, worker, parts.step + part, settlements, claim)),
    holdWithin: async (tx, worker, held) =>
      (await value<boolean[]>(tx.query, `${s}.settle_hold($1, $2, $3, $4)`, [
        worker,
        held.map(({ fence }) => fence),
        held.map(({ lane }) => lane),
        held.flatMap(({ keys }) => keys),
      ])) ?? [],
    settleWithin: async (tx, worker, ...settlements) => {
      const { rows } = await tx.query<{ lost: number[] }>(sql.settle, settleValues(worker, parts.within, settlements))
      return rows[0]?.lost.length === 0
    },
    confirm: async (worker, fence, lane, seq) =>
      (await value<'left' | 'pending' | 'lost'>(on.settle, `${s}.confirm($1, $2, $3, $4)`, [
        worker,
        fence,
        lane,
        seq,
      ])) ?? 'lost',
    mark: async (worker, started) => {
      await on.settle(`SELECT ${s}.mark($1, $2, $3, $4, $5)`, [
        worker,
        started.map((m) => m.fence),
        started.map((m) => m.lane),
        started.map((m) => m.seq),
        started.map((m) => Math.round(m.startedMsAgo)),
      ])
    },
    begin: (longestMs, of = 'handlers') => pools.begin(of, longestMs),
  }
}

/** The processes, and their leases. */
function processStatements({
  s,
  probe,
  on,
  value,
}: Database): Pick<Store, 'enlist' | 'announced' | 'pulse' | 'acceptFault' | 'recover' | 'retire' | 'disown'> {
  return {
    enlist: async (worker, name, leaseMs, announced = {}) => {
      await on.heartbeat(`SELECT ${s}.enlist($1, $2, $3, $4)`, [worker, name, leaseMs, JSON.stringify(announced)])
    },
    announced: async () => {
      const { rows } = await on.reads<{ now_ms: number; by: Record<string, string> }>(
        `SELECT extract(epoch FROM ${s}.clock())::float8 * 1000 AS now_ms, coalesce((SELECT json_object_agg(x.label, x.text)
           FROM (SELECT DISTINCT ON (e.key) e.key AS label, e.value AS text FROM ${s}.workers w, jsonb_each_text(w.announced) e
             WHERE w.until >= ${s}.clock()) x), '{}') AS by`,
      )
      return { nowMs: rows[0]?.now_ms ?? 0, by: rows[0]?.by ?? {} }
    },
    pulse: async (worker, leaseMs, running) => {
      const values = [worker, leaseMs, JSON.stringify(running)]
      const beat = `${s}.pulse($1, $2, $3)`
      const { rows } = await probe.beat(
        () => on.accept<PulseRow>(`SELECT p.* FROM ${s}.space_check() c, ${beat} p`, values),
        () => on.heartbeat<PulseRow>(`SELECT * FROM ${beat}`, values),
      )
      return toPulse(rows[0])
    },
    acceptFault: () => probe.fault,
    recover: async () => {
      const { rows } = await on.settle<{ worker: string; name: string; lanes: number }>(`SELECT * FROM ${s}.recover()`)
      return rows[0] ?? null
    },
    // Not on the work connections: a process that stops while the database does not answer would wait for half a minute.
    retire: async (worker) => (await value<number>(on.heartbeat, `${s}.retire($1)`, [worker])) ?? 0,
    disown: async (worker, known) => (await value<number>(on.settle, `${s}.disown($1, $2)`, [worker, known])) ?? 0,
  }
}

/** The operators' calls: tickets, dead letters, pauses. */
function ticketStatements({
  s,
  on,
  value,
}: Database): Pick<
  Store,
  | 'ticket'
  | 'finished'
  | 'statusOf'
  | 'laneDepths'
  | 'tickets'
  | 'stats'
  | 'cancel'
  | 'deadLetters'
  | 'deadLetter'
  | 'deadLetterIds'
  | 'redrive'
  | 'purge'
  | 'pause'
  | 'resume'
  | 'pausedBy'
> {
  return {
    ticket: (id) => ticket(on.reads, s, id),
    finished: (ids) => finishedTickets(on.reads, s, ids),
    statusOf: (ids) => statusOf(on.reads, s, ids),
    laneDepths: (lanes) => laneDepths(on.reads, s, lanes),
    tickets: (filter, limit, before) => listTickets(on.reads, s, filter, limit, before),
    stats: (bound) => stats(on.reads, s, bound),
    cancel: async (id, abortable, why) =>
      (await value<'cancelled' | 'asked' | 'running' | 'gone'>(on.reads, `${s}.cancel($1, $2, $3)`, [
        id,
        abortable,
        why,
      ])) ?? 'gone',
    deadLetters: (filter, limit, before) => listDeadLetters(on.reads, s, filter, limit, before),
    deadLetter: (id) => deadLetter(on.reads, s, id),
    deadLetterIds: (filter, limit, after) => deadLetterIds(on.reads, s, filter, limit, after),
    redrive: async (ids) => {
      const { rows } = await on.reads<{ moved: number; skipped: number }>(`SELECT * FROM ${s}.redrive($1)`, [ids])
      return rows[0] ?? { moved: 0, skipped: 0 }
    },
    purge: async (ids) => (await value<number>(on.reads, `${s}.purge($1)`, [ids])) ?? 0,
    pause: async (queue, partition) => {
      await on.reads(`SELECT ${s}.pause($1, $2)`, [queue, partition])
    },
    resume: async (queue, partition) => {
      await on.reads(`SELECT ${s}.resume($1, $2)`, [queue, partition])
    },
    pausedBy: async (queue, partition) => {
      const { rows } = await on.reads<{ by: 'queue' | 'partition' }>(
        `SELECT CASE WHEN p.partition IS NULL THEN 'queue' ELSE 'partition' END AS by FROM ${s}.pauses p
         WHERE p.queue = $1 AND (p.partition IS NULL OR p.partition = $2) ORDER BY p.partition NULLS FIRST LIMIT 1`,
        [queue, partition],
      )
      return rows[0]?.by ?? null
    },
  }
}

/** Gates, halts and permits. */
function gateStatements({
  s,
  on,
  value,
}: Database): Pick<Store, 'registerGate' | 'releaseGate' | 'halt' | 'unhalt' | 'changeConnections'> {
  return {
    registerGate: async (name, fullAt, resumeBelow) => {
      await on.reads(`SELECT ${s}.gate_register($1, $2, $3)`, [name, fullAt, resumeBelow])
    },
    releaseGate: async (tx, name, count) => {
      await tx.query(`SELECT ${s}.gates_release($1, $2)`, [[name], [count]])
    },
    halt: async (scope, reason, tx) =>
      (await value<boolean>(tx?.query ?? on.settle, `${s}.halt_set($1, $2)`, [scope, reason])) === true,
    unhalt: async (scope, tx) =>
      ((await (tx?.query ?? on.settle)(`DELETE FROM ${s}.halts WHERE scope = $1`, [scope])).rowCount ?? 0) > 0,
    changeConnections: (worker, pool, change) => changeConnections(on.accept, s, worker, pool, change),
  }
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
