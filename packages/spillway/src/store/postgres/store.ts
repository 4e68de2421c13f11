import { setTimeout as delay } from 'node:timers/promises'
import type pg from 'pg'
import type { Accepted, Decided, Store, StoredAnswer, Tx } from '../port.js'
import { accept, acceptSql, acceptWithEffect, applyWithin, effectSql, parts } from './accept.js'
import { AcceptProbe } from './accept-probe.js'
import { type Log, openPool, type PoolOptions } from './connect.js'
import { changeConnections } from './connections.js'
import { StoreFault } from './faults.js'
import { coreSql } from './generated/sql.js'
import { ledgerStatements } from './ledger.js'
import { type Listener, listenOn, pollInstead } from './listen.js'
import { migrate, type SqlModule } from './migrate.js'
import { laneDepths, statusOf } from './operation-status.js'
import { type QueryConfig, queryPinned, type Result } from './pinned-query.js'
import { type PulseRow, toPulse } from './pulse.js'
import { findReach, type Reach } from './reach.js'
import { type Renewable, renewable } from './renewable.js'
import { pinSql, type Settings } from './session.js'
import { claimSql, type QueryRows, settleSql, settleValues, step, stepSql } from './step.js'
import { StreamBell } from './stream-bell.js'
import { appendSettings, PostgresStreamLog } from './stream-log.js'
import { postgresStreamRegistry } from './stream-registry.js'
import { sweepStatements } from './sweeping.js'
import { deadLetter, deadLetterIds, finishedTickets, listDeadLetters, listTickets, stats, ticket } from './tickets.js'
import { openTx } from './transaction.js'

export interface PostgresOptions {
  url: string
  /** A direct address of the same database for LISTEN, if `url` leads to a pooler that cannot carry it. */
  listenUrl?: string
  /** Default `spillway`. */
  schema?: string
  /** Tables and functions that workloads add; the core's are always installed. */
  sql?: readonly SqlModule[]
  /** Connections for reads and handlers' transactions. Default 10; a few more are reserved for accepting and settling. */
  poolMax?: number
  /** A call that takes longer has failed. Default 2,000. */
  timeoutMs?: number
  /** Slows each write, for drills. Default 0. */
  delayMs?: number
  log?: Log
}

/** Settling a large batch after a pause may take longer than a caller would wait. */
const workTimeoutMs = 10_000
/** An audit may take longer. */
const sweepTimeoutMs = 120_000
/** How long a handler waits for a connection; its own timeout may be shorter. */
const txConnectTimeoutMs = 30_000
const shortMax = 4

/** A hint need not wait for the disk. */
const bellSettings: Settings = { synchronous_commit: 'off' }
const localPins = pinSql({}, { local: true })
const streamPins = pinSql(appendSettings, { local: true })

const quote = (name: string): string => `"${name.replaceAll('"', '""')}"`

export function postgresStore(options: PostgresOptions): Store {
  const s = quote(options.schema ?? 'spillway')
  const timeoutMs = options.timeoutMs ?? 2_000
  const channel = `spillway_${options.schema ?? 'spillway'}`
  const poolMax = options.poolMax ?? 10
  const readsMax = Math.max(1, Math.floor(poolMax / 3))
  const log = options.log ?? silent
  let reach: Reach | undefined
  let finding: Promise<Reach> | undefined
  /** Detected once, at the first call; retried while the database is not reachable. */
  const findOut = (): Promise<Reach> => {
    finding ??= findReach(options.url).then(
      (found) => {
        if (found !== 'direct') log.info({ pooler: found }, `the database is reached through a pooler in ${found} mode`)
        reach = found
        return found
      },
      (fault: unknown) => {
        finding = undefined
        throw fault
      },
    )
    return finding
  }
  const open = (max: number, purpose: string, queryTimeoutMs: number, more: Partial<PoolOptions> = {}): pg.Pool =>
    openPool({
      url: options.url,
      max,
      applicationName: `spillway ${purpose}`,
      ...(queryTimeoutMs > 0 && { queryTimeoutMs }),
      pin: { settings: {}, reach: findOut },
      ...more,
      ...(options.log && { log: options.log }),
    })
  const withSettings = (settings: Settings): Partial<PoolOptions> => ({ pin: { settings, reach: findOut } })
  // Work that releases work must never wait behind work that brings more, so each kind has its own connections.
  const pools = {
    accept: renewable(() => open(3, 'accept', timeoutMs)),
    work: renewable(() => open(4, 'work', workTimeoutMs)),
    // An idle process sends heartbeats over the connections of accepting; this one must be available when those are not.
    pulse: renewable(() => open(1, 'pulse', timeoutMs, { keepIdle: true })),
    take: renewable(() => open(2, 'take', timeoutMs)),
    release: renewable(() => open(2, 'release', timeoutMs)),
    reads: renewable(() => open(readsMax, 'reads', timeoutMs)),
    // The operation's timeout limits a handler's statements, not ours.
    tx: renewable(() => open(poolMax - readsMax, 'handlers', 0, { connectTimeoutMs: txConnectTimeoutMs })),
    // For operators: halting must not wait for handlers.
    short: renewable(() => open(shortMax, 'short', timeoutMs)),
    sweep: renewable(() => open(1, 'sweep', sweepTimeoutMs)),
    // Opened with the first stream.
    append: renewable(() => open(2, 'streams append', timeoutMs, withSettings(appendSettings))),
    streams: renewable(() => open(3, 'streams', timeoutMs, withSettings(appendSettings))),
    bell: renewable(() => open(1, 'streams bell', timeoutMs, withSettings(bellSettings))),
  }
  const ask = async <Row>(connections: Renewable, config: QueryConfig, pins = localPins): Promise<Result<Row>> => {
    const pool = connections.current
    try {
      if ((reach ?? (await findOut())) === 'transaction') return await queryPinned(pool, config, pins)
      const name = prepared.get(config.text)
      const answer: unknown = await pool.query(name === undefined ? config : { ...config, name })
      return answer as Result<Row>
    } catch (error) {
      throw connections.judge(pool, error)
    }
  }
  const runner =
    (connections: Renewable, pins?: string): Tx['query'] =>
    (text, values) =>
      ask(connections, { text, ...(values && { values: [...values] }) }, pins)
  const rows: QueryRows = async (text, values) =>
    (await ask<unknown[]>(pools.work, { text, values: [...values], rowMode: 'array' })).rows
  /** The settings that a transaction must set; null if its connection has them. */
  const pinsOfTx = async (): Promise<string | null> =>
    (reach ?? (await findOut())) === 'transaction' ? localPins : null
  const sql = { accept: acceptSql(s), step: stepSql(s), settle: settleSql(s), claim: claimSql(s) }
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
  const accepting = runner(pools.accept)
  const on = {
    accept: (async (text, values) => {
      const answer = await accepting(text, values)
      probe.proven()
      return answer
    }) as Tx['query'],
    work: runner(pools.work),
    pulse: runner(pools.pulse),
    reads: runner(pools.reads),
    short: runner(pools.short),
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

  let listener: Listener | undefined
  let streamLog: PostgresStreamLog | undefined

  return {
    migrate: () =>
      migrate({
        url: options.url,
        schema: options.schema ?? 'spillway',
        sql: [coreSql, ...(options.sql ?? [])],
        log,
      }),

    accept: (items, context) =>
      slowly(() => accept(on.accept, sql.accept, items, context, { part: parts.accept, apply: false })),
    acceptAndApply: (items, context, effect) =>
      slowly(async () => {
        const tx = await openTx(pools.accept.current, timeoutMs, await pinsOfTx())
        try {
          const accepted = await accept(tx.query, sql.accept, items, context, { part: parts.apply, apply: true })
          const decided = decidedOf(accepted)
          const answers = decided.applied.length > 0 ? await inTime(effect(tx, decided), timeoutMs) : []
          const keyed = decided.applied.flatMap((index, i) => {
            const item = items[index]
            const answer = answers[i]
            const key = item?.idempotency?.key
            return key === undefined || answer === undefined ? [] : [{ key, op: item?.id ?? '', answer }]
          })
          if (keyed.length > 0) await answerKeys(tx.query, keyed)
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
      (await value<'left' | 'pending' | 'lost'>(on.work, `${s}.confirm($1, $2, $3, $4)`, [worker, fence, lane, seq])) ??
      'lost',
    mark: async (worker, started) => {
      await on.work(`SELECT ${s}.mark($1, $2, $3, $4, $5)`, [
        worker,
        started.map((m) => m.fence),
        started.map((m) => m.lane),
        started.map((m) => m.seq),
        started.map((m) => Math.round(m.startedMsAgo)),
      ])
    },
    begin: async (longestMs, of = 'handlers') => {
      const connections = of === 'handlers' ? pools.tx : pools.short
      const pool = connections.current
      try {
        return await openTx(pool, longestMs, await pinsOfTx())
      } catch (error) {
        throw connections.judge(pool, error)
      }
    },
    answerKey: (key, operationId, answer) => answerKeys(on.accept, [{ key, op: operationId, answer }]),
    forgetKey: async (key, operationId) => {
      await on.accept(`DELETE FROM ${s}.idempotency d WHERE d.key = $1 AND d.op = $2`, [key, operationId])
    },

    enlist: async (worker, name, leaseMs, announced = {}) => {
      await on.pulse(`SELECT ${s}.enlist($1, $2, $3, $4)`, [worker, name, leaseMs, JSON.stringify(announced)])
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
        () => on.pulse<PulseRow>(`SELECT * FROM ${beat}`, values),
      )
      return toPulse(rows[0])
    },
    acceptFault: () => probe.fault,
    recover: async () => {
      const { rows } = await on.work<{ worker: string; name: string; lanes: number }>(`SELECT * FROM ${s}.recover()`)
      return rows[0] ?? null
    },
    // Not on the work connections: a process that stops while the database does not answer would wait for half a minute.
    retire: async (worker) => (await value<number>(on.pulse, `${s}.retire($1)`, [worker])) ?? 0,
    disown: async (worker, known) => (await value<number>(on.work, `${s}.disown($1, $2)`, [worker, known])) ?? 0,
    ...sweepStatements(on.sweep, s),
    audit: async () => (await on.sweep<{ fault: string }>(`SELECT fault FROM ${s}.audit()`)).rows.map((r) => r.fault),

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

    ...ledgerStatements(on.reads, s),
    read: on.reads,
    statements: { take: preparing(runner(pools.take)), release: preparing(runner(pools.release)) },
    registerGate: async (name, fullAt, resumeBelow) => {
      await on.reads(`SELECT ${s}.gate_register($1, $2, $3)`, [name, fullAt, resumeBelow])
    },
    releaseGate: async (tx, name, count) => {
      await tx.query(`SELECT ${s}.gates_release($1, $2)`, [[name], [count]])
    },
    halt: async (scope, reason, tx) =>
      (await value<boolean>(tx?.query ?? on.short, `${s}.halt_set($1, $2)`, [scope, reason])) === true,
    unhalt: async (scope, tx) =>
      ((await (tx?.query ?? on.short)(`DELETE FROM ${s}.halts WHERE scope = $1`, [scope])).rowCount ?? 0) > 0,
    changeConnections: (worker, pool, change) => changeConnections(on.accept, s, worker, pool, change),

    wake: async (kind) => {
      await on.pulse('SELECT pg_notify($1, $2)', [channel, kind])
    },
    listen: async (onWake, onMissed) => {
      const streams = 'streams:'
      const missed = (): void => {
        streamLog?.heard(null)
        onMissed?.()
      }
      if (options.listenUrl === undefined && (reach ?? (await findOut())) === 'transaction') {
        log.warn(
          {},
          'the pooler cannot carry LISTEN: polling each second; set SPILLWAY_LISTEN_URL to a direct address of the database for quicker wake-ups',
        )
        listener = pollInstead(missed)
        return
      }
      listener = listenOn({
        url: options.listenUrl ?? options.url,
        channel,
        onNotice: (kind) => (kind.startsWith(streams) ? streamLog?.heard(kind.slice(streams.length)) : onWake(kind)),
        onGap: missed,
        log,
      })
      await listener.started
    },
    streams: ({ retentionMs, longestMs }) => {
      if (streamLog !== undefined) throw new Error('the streams of this store are in use already')
      const query = preparing(runner(pools.streams, streamPins))
      const bell = new StreamBell({
        query: preparing(runner(pools.bell, pinSql(bellSettings, { local: true }))),
        channel,
      })
      const append: Tx['query'] = (text, values) => slowly(() => appending(text, values))
      const appending = preparing(runner(pools.append, streamPins))
      streamLog = new PostgresStreamLog({ append, read: query, bell, schema: s })
      const registry = postgresStreamRegistry({
        ...{ query, sweep: on.sweep, bell, schema: s },
        ...{ timeoutMs, retentionMs, longestMs },
      })
      return { log: streamLog, registry }
    },
    poolState: () => {
      const both = [pools.reads.current, pools.tx.current]
      const sum = (of: (pool: pg.Pool) => number): number => both.reduce((n, pool) => n + of(pool), 0)
      const idle = sum((pool) => pool.idleCount)
      return {
        max: poolMax,
        busy: sum((pool) => pool.totalCount) - idle,
        idle,
        waiting: sum((pool) => pool.waitingCount),
      }
    },
    ping: async () => {
      const before = Date.now()
      const theirs = (await value<number>(on.pulse, `extract(epoch FROM ${s}.clock())::float8 * 1000`, [])) ?? 0
      return { skewMs: Math.round(theirs - (before + Date.now()) / 2) }
    },
    close: async () => {
      const ended = Promise.all([listener?.close(), ...Object.values(pools).map((pool) => pool.end())])
      // A pool waits for its statements, the wake-up connection for its end; a server that never answers must not delay closing.
      await Promise.race([ended, delay(timeoutMs, undefined, { ref: false })])
    },
  }

  async function answerKeys(
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
function inTime<T>(promise: Promise<T>, ms: number): Promise<T> {
  return new Promise((resolve, reject) => {
    const timer = setTimeout(() => reject(new StoreFault('timeout')), ms)
    promise.then(resolve, reject).finally(() => clearTimeout(timer))
  })
}

const silent: Log = { info: () => undefined, warn: () => undefined, error: () => undefined }
