/** Operations as their callers and operators see them. Rows have the names of `Ticket`. */
import { expired } from '../../core/outcome.js'
import { leftOutSql, listedErrorSql, listedSql } from '../page-sql.js'
import type { CancelOutcome, DeadLetter, QueueBound, StatRow, Ticket, TicketFilter, TicketOwner } from '../port.js'
import type { Database } from './database.js'
import { placeCountedMax } from './operation-status.js'

type Sizes = 'resultBytes' | 'errorBytes' | 'payloadBytes'

/** `lane`, `seq`, `head` and `stamp` are for counting the place. A size is null if nothing was left out. */
type RowOf<Shown> = Omit<Shown, Sizes | 'said' | 'stack' | 'progress'> &
  Record<string, unknown> & { [Name in Sizes | 'lane' | 'seq' | 'head' | 'stamp']?: unknown } & {
    /** Of history. */
    ended?: string | null
    code?: string | null
    http_status?: number | null
    stack?: string | null
    progress?: number | null
    note?: string | null
    said_at?: Date | null
  }

const unfinished = (s: string): string => `
  SELECT o.id, o.type, l.queue, l.partition, o.priority, o.identity,
    CASE WHEN o.started_at IS NULL THEN 'pending' ELSE 'processing' END AS status,
    o.accepted_at AS "createdAt", o.started_at AS "startedAt", NULL::timestamptz AS "finishedAt", o.attempts,
    o.max_attempts AS "maxAttempts", o.error, NULL::json AS result, o.trace, NULL::text AS ended, o.lane, o.seq, l.head, o.stamp
  FROM ${s}.ops o JOIN ${s}.lanes l ON l.id = o.lane`

const finished = (s: string): string => `
  SELECT h.id, h.type, h.queue, h.partition, h.priority, h.identity, h.status, h.accepted_at AS "createdAt",
    h.started_at AS "startedAt", h.finished_at AS "finishedAt", h.attempts, h.max_attempts AS "maxAttempts", h.error,
    h.result, h.trace, h.code AS ended, NULL::uuid AS lane, NULL::bigint AS seq, NULL::bigint AS head, NULL::bigint AS stamp
  FROM ${s}.history h`

const dead = (s: string, more = ''): string => `
  SELECT d.id, d.type, d.queue, d.partition, d.priority, d.identity, 'failed' AS status, d.accepted_at AS "createdAt",
    d.started_at AS "startedAt", d.died_at AS "finishedAt", d.attempts, d.max_attempts AS "maxAttempts", d.error,
    d.result, d.trace, NULL::text AS ended, NULL::uuid AS lane, NULL::bigint AS seq, NULL::bigint AS head, NULL::bigint AS stamp${more}
  FROM ${s}.dead_letters d`

const payload = ', d.payload::text AS payload'

/** The columns that a list shows whole, for rows of the three kinds above. */
const short =
  'id type queue partition priority identity status "createdAt" "startedAt" "finishedAt" attempts "maxAttempts" trace ended lane seq head stamp'
    .split(' ')
    .map((name) => `r.${name}`)
    .join()

/** The rows as a list shows them; `long` are their columns of any size. OFFSET 0: each size is computed once. */
function listed(rows: string, long: readonly string[]): string {
  const shown = long.map(
    (name) => `${listedSql(`r.${name}`, `b.${name}`)} AS ${name}, ${leftOutSql(`b.${name}`)} AS "${name}Bytes"`,
  )
  const sizes = ['error', ...long].map((name) => `octet_length(r.${name}::text) AS ${name}`)
  return `SELECT ${short}, ${listedErrorSql('r.error')} AS error, ${leftOutSql('b.error')} AS "errorBytes", ${shown.join()}
    FROM (${rows}) r CROSS JOIN LATERAL (SELECT ${sizes.join()} OFFSET 0) b`
}

const newest = 'r.id DESC'

/**
 * The place of a parallel operation, alone in its lane, is among those that wait for a turn of its key, else among all that
 * are ready, in the order in which they are claimed.
 */
const withPlace = (s: string, from: string): string => `
  SELECT t.*, CASE WHEN t.status <> 'pending' THEN NULL
    WHEN t.lane = t.id THEN coalesce(
      (SELECT (SELECT count(*) FROM (SELECT FROM ${s}.parked x
          WHERE x.key = p.key AND x.reason = 'turn' AND x.turn < p.turn LIMIT ${placeCountedMax}) r)
        FROM ${s}.parked p WHERE p.lane = t.lane AND p.reason = 'turn'),
      (SELECT count(*) FROM (SELECT FROM ${s}.ready x
          WHERE (x.priority, x.stamp) < (t.priority, t.stamp) LIMIT ${placeCountedMax}) r))
    WHEN t.seq - t.head > ${placeCountedMax} THEN t.seq - t.head - 1
    ELSE (SELECT count(*) FROM ${s}.ops x WHERE x.lane = t.lane AND x.seq > t.head AND x.seq < t.seq AND x.started_at IS NULL) END AS place
  FROM (${from}) t`

const withoutPlace = (from: string): string => `SELECT t.*, NULL::bigint AS place FROM (${from}) t`

/** With its last error, if the last attempt ended with one. */
const withFailure = (s: string, from: string): string => `
  SELECT t.*, f.code, f.http_status, f.stack FROM (${from}) t
  LEFT JOIN ${s}.failures f ON f.id = t.id AND f.attempt = t.attempts AND t.error IS NOT NULL`

/** With what its handler said of its progress, while that attempt runs. */
const withProgress = (s: string, from: string): string => `
  SELECT t.*, p.value::float8 AS progress, p.note, p.at AS said_at FROM (${from}) t
  LEFT JOIN ${s}.progress p ON p.id = t.id AND t.status = 'processing' AND p.attempt = t.attempts + 1`

function shownOf<Shown extends Ticket>(given: RowOf<Shown>): Shown {
  const { lane, seq, head, stamp, ended, code, http_status: status, stack, ...more } = given as RowOf<Ticket>
  const { progress: value, note, said_at: at, ...rest } = more
  const row: Omit<typeof more, 'progress'> & Pick<Ticket, 'progress'> = rest
  if (typeof value === 'number' && at) row.progress = { value: Math.round(value * 1e6) / 1e6, note: note ?? null, at }
  if (typeof stack === 'string') row.stack = stack
  if (ended === expired.said.code) row.said = expired.said
  else if (typeof code === 'string' && typeof status === 'number') row.said = { code, status }
  for (const size of ['resultBytes', 'errorBytes', 'payloadBytes'] as const) if (row[size] === null) delete row[size]
  return row as unknown as Shown
}

export function ticketStatements({ s, on: { reads } }: Database) {
  return {
    ticket: async (id: string): Promise<Ticket | null> => {
      // Three tables, one statement: an operation that moves between them is seen in exactly one.
      const all = `${unfinished(s)} WHERE o.id = $1 UNION ALL ${finished(s)} WHERE h.id = $1 UNION ALL ${dead(s)} WHERE d.id = $1`
      const { rows } = await reads<RowOf<Ticket>>(withProgress(s, withFailure(s, withPlace(s, all))), [id])
      return rows[0] === undefined ? null : shownOf(rows[0])
    },
    /** The finished ones of `ids`. */
    finished: async (ids: readonly string[]): Promise<Ticket[]> => {
      const all = `${finished(s)} WHERE h.id = ANY ($1) UNION ALL ${dead(s)} WHERE d.id = ANY ($1)`
      const { rows } = await reads<RowOf<Ticket>>(withFailure(s, withoutPlace(all)), [ids])
      return rows.map(shownOf<Ticket>)
    },
    /** Newest first, by id (UUIDv7: the order of acceptance to the millisecond); without long results and errors. */
    tickets: async (filter: TicketFilter, limit: number, before: string | null): Promise<Ticket[]> => {
      const values: unknown[] = [limit]
      const where = conditions(filter, before, values)
      const { status } = filter
      const parts: string[] = []
      if (status === undefined || status === 'pending' || status === 'processing') parts.push(unfinished(s))
      if (status !== 'pending' && status !== 'processing') parts.push(finished(s))
      if (status === undefined || status === 'failed') parts.push(dead(s))
      const some = parts.map((from) => `(SELECT * FROM (${from}) p WHERE ${where('p')} ORDER BY p.id DESC LIMIT $1)`)
      const rows = `SELECT * FROM (${some.join(' UNION ALL ')}) r ORDER BY ${newest} LIMIT $1`
      const sql = `${withPlace(s, listed(rows, ['result']))} ORDER BY t.id DESC`
      return (await reads<RowOf<Ticket>>(sql, values)).rows.map(shownOf<Ticket>)
    },
    /** With `bound`: only operations that the caller may see. */
    stats: async (bound?: QueueBound): Promise<StatRow[]> => {
      const values: unknown[] = []
      const within = bound === undefined ? null : boundTest(bound, values)
      const and = (table: string): string => (within === null ? '' : ` AND ${within(table, table)}`)
      const ops =
        within === null ? `${s}.ops o` : `${s}.ops o JOIN ${s}.lanes l ON l.id = o.lane WHERE ${within('o', 'l')}`
      const { rows } = await reads<StatRow & Record<string, unknown>>(
        `SELECT type, priority, status, count(*) AS count, min(created_at) AS oldest, max(created_at) AS newest,
           avg(extract(epoch FROM finished_at - created_at))::float8 AS "averageLatencySeconds"
         FROM (
           SELECT o.type, o.priority, CASE WHEN o.started_at IS NULL THEN 'pending' ELSE 'processing' END AS status, o.accepted_at AS created_at, NULL::timestamptz AS finished_at FROM ${ops}
           UNION ALL SELECT h.type, h.priority, h.status, h.accepted_at, h.finished_at FROM ${s}.history h WHERE h.finished_at > ${s}.clock() - interval '5 minutes'${and('h')}
           UNION ALL SELECT d.type, d.priority, 'failed', d.accepted_at, d.died_at FROM ${s}.dead_letters d WHERE d.died_at > ${s}.clock() - interval '5 minutes'${and('d')}
         ) t GROUP BY type, priority, status ORDER BY type, priority, status`,
        values,
      )
      return rows
    },
  }
}

export function deadLetterStatements({ s, on: { reads }, value }: Database) {
  return {
    /** Newest first, without long results, errors and payloads. */
    deadLetters: async (filter: TicketFilter, limit: number, before: string | null): Promise<DeadLetter[]> => {
      const values: unknown[] = [limit]
      const where = conditions(filter, before, values)
      const letters = `SELECT * FROM (${dead(s, payload)}) r WHERE ${where('r')} ORDER BY ${newest} LIMIT $1`
      const sql = `${withoutPlace(listed(letters, ['result', 'payload']))} ORDER BY t.id DESC`
      return (await reads<RowOf<DeadLetter>>(sql, values)).rows.map(shownOf<DeadLetter>)
    },
    /** One dead letter, whole. */
    deadLetter: async (id: string): Promise<DeadLetter | null> => {
      const { rows } = await reads<RowOf<DeadLetter>>(
        withFailure(s, withoutPlace(`${dead(s, payload)} WHERE d.id = $1`)),
        [id],
      )
      return rows[0] === undefined ? null : shownOf(rows[0])
    },
    /** Up to `limit` ids of matching dead letters, oldest first, after `after`. */
    deadLetterIds: async (filter: TicketFilter, limit: number, after: string | null): Promise<string[]> => {
      const values: unknown[] = [limit, after]
      const where = conditions(filter, null, values)
      const { rows } = await reads<{ id: string }>(
        `SELECT p.id FROM (${dead(s)}) p WHERE ($2::uuid IS NULL OR p.id > $2) AND ${where('p')} ORDER BY p.id LIMIT $1`,
        values,
      )
      return rows.map((row) => row.id)
    },
    /** A caller that waited was answered with the failure: the dead letter becomes history, if its handler said FailOperation. */
    letterAnswered: async (id: string): Promise<void> => {
      await reads(`SELECT ${s}.letter_answered($1)`, [id])
    },
    redrive: async (ids: readonly string[]): Promise<{ moved: number; skipped: number }> => {
      const { rows } = await reads<{ moved: number; skipped: number }>(`SELECT * FROM ${s}.redrive($1)`, [ids])
      return rows[0] ?? { moved: 0, skipped: 0 }
    },
    purge: async (ids: readonly string[]): Promise<number> =>
      (await value<number>(reads, `${s}.purge($1)`, [ids])) ?? 0,
  }
}

/** Cancelling one operation, and pausing many. */
export function cancelStatements({ s, on: { reads }, value }: Database) {
  return {
    /** Operations that wait although their time is over. */
    expired: async (most: number): Promise<{ id: string; type: string }[]> =>
      (await reads<{ id: string; type: string }>(`SELECT * FROM ${s}.expired($1)`, [most])).rows,
    /** Ends one of them. False: it runs, or was ended by another process. */
    expire: async (id: string): Promise<boolean> =>
      (await value<CancelOutcome>(reads, `${s}.withdraw($1, '{}', $2, 'expired')`, [id, expired.error])) ===
      'cancelled',
    cancel: async (id: string, abortable: readonly string[], why: string): Promise<CancelOutcome> =>
      (await value<CancelOutcome>(reads, `${s}.cancel($1, $2, $3)`, [id, abortable, why])) ?? 'gone',
    /** With no queue (''): the type `partition`, in every lane where it is first. */
    pause: async (queue: string, partition: string | null): Promise<void> => {
      await reads(`SELECT ${s}.pause($1, $2)`, [queue, partition])
    },
    resume: async (queue: string, partition: string | null): Promise<void> => {
      await reads(`SELECT ${s}.resume($1, $2)`, [queue, partition])
    },
    /** What pauses it now: its whole queue, before the partition alone; null: nothing. */
    pausedBy: async (queue: string, partition: string | null): Promise<'queue' | 'partition' | null> => {
      const { rows } = await reads<{ by: 'queue' | 'partition' }>(
        `SELECT CASE WHEN p.partition IS NULL THEN 'queue' ELSE 'partition' END AS by FROM ${s}.pauses p
         WHERE p.queue = $1 AND (p.partition IS NULL OR p.partition = $2) ORDER BY p.partition NULLS FIRST LIMIT 1`,
        [queue, partition],
      )
      return rows[0]?.by ?? null
    },
  }
}

/** The same as `isWithin` of http/viewer.ts. */
function boundTest(
  { queues, identity, namedTypes }: QueueBound,
  values: unknown[],
): (table: string, queueTable: string) => string {
  const first = values.push(queues, identity, namedTypes) - 2
  return (table, queueTable) =>
    `(EXISTS (SELECT FROM unnest($${first}::text[]) x(pattern) WHERE CASE WHEN right(x.pattern, 1) = '*'
        THEN starts_with(${queueTable}.queue, left(x.pattern, -1)) ELSE ${queueTable}.queue = x.pattern END)
      OR (${table}.identity = $${first + 1} AND ${table}.type <> ALL ($${first + 2}::text[])))`
}

/** The same as `owns` of http/viewer.ts. */
function ownerTest({ identity, types, identities }: TicketOwner, values: unknown[]): (table: string) => string {
  const first = values.push(identity)
  if (types.length === 0) return (table) => `${table}.identity = $${first}`
  values.push(types, identities)
  return (table) =>
    `(${table}.type <> ALL ($${first + 1}::text[]) AND ${table}.identity = $${first}
      OR (${table}.type, ${table}.identity) IN (SELECT * FROM unnest($${first + 1}::text[], $${first + 2}::text[])))`
}

function conditions(filter: TicketFilter, before: string | null, values: unknown[]): (table: string) => string {
  const tests: [column: string, test: string][] = []
  const add = (column: string, operator: string, value: unknown): void => {
    if (value !== undefined && value !== null) tests.push([column, `${operator} $${values.push(value)}`])
  }
  add('id', '<', before)
  add('status', '=', filter.status)
  add('type', '=', filter.type)
  add('queue', '=', filter.queue)
  add('partition', '=', filter.partition)
  add('identity', '=', filter.identity)
  add('"createdAt"', '>=', filter.from)
  add('"createdAt"', '<', filter.to)
  if (filter.ids !== undefined) tests.push(['id', `= ANY ($${values.push(filter.ids)}::uuid[])`])
  const owned = filter.owner === undefined ? null : ownerTest(filter.owner, values)
  const within = filter.bound === undefined ? null : boundTest(filter.bound, values)
  return (table) =>
    [
      'true',
      ...tests.map(([column, test]) => `${table}.${column} ${test}`),
      ...(owned === null ? [] : [owned(table)]),
      ...(within === null ? [] : [within(table, table)]),
    ].join(' AND ')
}
