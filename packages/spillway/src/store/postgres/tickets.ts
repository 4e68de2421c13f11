import { leftOutSql, listedErrorSql, listedSql } from '../page-sql.js'
import type { DeadLetter, QueueBound, StatRow, Ticket, TicketFilter, TicketOwner, Tx } from '../port.js'

interface TicketRow extends Record<string, unknown> {
  id: string
  type: string
  queue: string
  partition: string
  priority: number
  identity: string
  status: Ticket['status']
  created_at: Date
  started_at: Date | null
  finished_at: Date | null
  attempts: number
  max_attempts: number
  error: string | null
  result: unknown
  place: number | null
  trace: string
  result_bytes?: number | null
  error_bytes?: number | null
  payload?: string | null
  payload_bytes?: number | null
}

/** Positions are counted up to here; further back, the difference of sequence numbers is close enough. */
const placeCountedMax = 10_000

const unfinished = (s: string): string => `
  SELECT o.id, o.type, l.queue, l.partition, o.priority, o.identity,
    CASE WHEN o.started_at IS NULL THEN 'pending' ELSE 'processing' END AS status,
    o.accepted_at AS created_at, o.started_at, NULL::timestamptz AS finished_at, o.attempts, o.max_attempts, o.error,
    NULL::json AS result, o.trace, o.lane, o.seq, l.head
  FROM ${s}.ops o JOIN ${s}.lanes l ON l.id = o.lane`

const finished = (s: string): string => `
  SELECT h.id, h.type, h.queue, h.partition, h.priority, h.identity, h.status, h.accepted_at AS created_at, h.started_at,
    h.finished_at, h.attempts, h.max_attempts, h.error, h.result, h.trace, NULL::uuid AS lane, NULL::bigint AS seq, NULL::bigint AS head
  FROM ${s}.history h`

const dead = (s: string, more = ''): string => `
  SELECT d.id, d.type, d.queue, d.partition, d.priority, d.identity, 'failed' AS status, d.accepted_at AS created_at, d.started_at,
    d.died_at AS finished_at, d.attempts, d.max_attempts, d.error, d.result, d.trace, NULL::uuid AS lane, NULL::bigint AS seq, NULL::bigint AS head${more}
  FROM ${s}.dead_letters d`

/** The columns that a list shows whole, for rows of the three kinds above. */
const short =
  'id type queue partition priority identity status created_at started_at finished_at attempts max_attempts trace lane seq head'
    .split(' ')
    .map((name) => `r.${name}`)
    .join()

/** The rows as a list shows them; `long` are their columns of any size. OFFSET 0: each size is computed once. */
function listed(rows: string, long: readonly string[]): string {
  const shown = long.map(
    (name) => `${listedSql(`r.${name}`, `b.${name}`)} AS ${name}, ${leftOutSql(`b.${name}`)} AS ${name}_bytes`,
  )
  const sizes = ['error', ...long].map((name) => `octet_length(r.${name}::text) AS ${name}`)
  return `SELECT ${short}, ${listedErrorSql('r.error')} AS error, ${leftOutSql('b.error')} AS error_bytes, ${shown.join()}
    FROM (${rows}) r CROSS JOIN LATERAL (SELECT ${sizes.join()} OFFSET 0) b`
}

const newest = 'r.id DESC'

const withPlace = (s: string, from: string): string => `
  SELECT t.*, CASE WHEN t.status <> 'pending' THEN NULL
    WHEN t.seq - t.head > ${placeCountedMax} THEN t.seq - t.head - 1
    ELSE (SELECT count(*) FROM ${s}.ops x WHERE x.lane = t.lane AND x.seq > t.head AND x.seq < t.seq AND x.started_at IS NULL) END AS place
  FROM (${from}) t`

export async function ticket(query: Tx['query'], s: string, id: string): Promise<Ticket | null> {
  // Three tables, one statement: an operation that moves between them is seen in exactly one.
  const all = `${unfinished(s)} WHERE o.id = $1 UNION ALL ${finished(s)} WHERE h.id = $1 UNION ALL ${dead(s)} WHERE d.id = $1`
  const { rows } = await query<TicketRow>(withPlace(s, all), [id])
  return rows[0] === undefined ? null : toTicket(rows[0])
}

export async function finishedTickets(query: Tx['query'], s: string, ids: readonly string[]): Promise<Ticket[]> {
  const all = `${finished(s)} WHERE h.id = ANY ($1) UNION ALL ${dead(s)} WHERE d.id = ANY ($1)`
  const { rows } = await query<TicketRow>(`SELECT t.*, NULL::bigint AS place FROM (${all}) t`, [ids])
  return rows.map(toTicket)
}

/** Newest first, by id (UUIDv7: the order of acceptance to the millisecond). */
export async function listTickets(
  query: Tx['query'],
  s: string,
  filter: TicketFilter,
  limit: number,
  before: string | null,
): Promise<Ticket[]> {
  const values: unknown[] = [limit]
  const where = conditions(filter, before, values)
  const part = (from: string, id: string, extra = ''): string =>
    `(SELECT * FROM (${from}) p WHERE ${where(id)}${extra} ORDER BY p.id DESC LIMIT $1)`
  const { status } = filter
  const parts: string[] = []
  if (status === undefined || status === 'pending' || status === 'processing') parts.push(part(unfinished(s), 'p'))
  if (status === undefined || status === 'completed' || status === 'cancelled') parts.push(part(finished(s), 'p'))
  if (status === undefined || status === 'failed') parts.push(part(dead(s), 'p'))
  const rows = `SELECT * FROM (${parts.join(' UNION ALL ')}) r ORDER BY ${newest} LIMIT $1`
  const sql = withPlace(s, listed(rows, ['result']))
  const found = await query<TicketRow>(`${sql} ORDER BY t.id DESC`, values)
  return found.rows.map(toTicket)
}

export async function listDeadLetters(
  query: Tx['query'],
  s: string,
  filter: TicketFilter,
  limit: number,
  before: string | null,
): Promise<DeadLetter[]> {
  const values: unknown[] = [limit]
  const where = conditions(filter, before, values)
  const rows = `SELECT * FROM (${dead(s, ', d.payload::text AS payload')}) r WHERE ${where('r')} ORDER BY ${newest} LIMIT $1`
  const letters = listed(rows, ['result', 'payload'])
  const found = await query<TicketRow>(
    `SELECT t.*, NULL::bigint AS place FROM (${letters}) t ORDER BY t.id DESC`,
    values,
  )
  return found.rows.map(toDeadLetter)
}

export async function deadLetter(query: Tx['query'], s: string, id: string): Promise<DeadLetter | null> {
  const { rows } = await query<TicketRow>(
    `SELECT r.*, NULL::bigint AS place FROM (${dead(s, ', d.payload::text AS payload')} WHERE d.id = $1) r`,
    [id],
  )
  return rows[0] === undefined ? null : toDeadLetter(rows[0])
}

export async function deadLetterIds(
  query: Tx['query'],
  s: string,
  filter: TicketFilter,
  limit: number,
  after: string | null,
): Promise<string[]> {
  const values: unknown[] = [limit, after]
  const where = conditions(filter, null, values)
  const { rows } = await query<{ id: string }>(
    `SELECT p.id FROM (${dead(s)}) p WHERE ($2::uuid IS NULL OR p.id > $2) AND ${where('p')} ORDER BY p.id LIMIT $1`,
    values,
  )
  return rows.map((row) => row.id)
}

/** With `bound`: only operations that the caller may see. */
export async function stats(query: Tx['query'], s: string, bound?: QueueBound): Promise<StatRow[]> {
  const values: unknown[] = []
  const within = bound === undefined ? null : boundTest(bound, values)
  const and = (table: string, queue = table): string => (within === null ? '' : ` AND ${within(table, queue)}`)
  const ops = within === null ? `${s}.ops o` : `${s}.ops o JOIN ${s}.lanes l ON l.id = o.lane WHERE ${within('o', 'l')}`
  const { rows } = await query<{
    type: string
    priority: number
    status: StatRow['status']
    count: number
    oldest: Date
    newest: Date
    latency: number | null
  }>(
    `SELECT type, priority, status, count(*) AS count, min(created_at) AS oldest, max(created_at) AS newest,
       avg(extract(epoch FROM finished_at - created_at))::float8 AS latency
     FROM (
       SELECT o.type, o.priority, CASE WHEN o.started_at IS NULL THEN 'pending' ELSE 'processing' END AS status, o.accepted_at AS created_at, NULL::timestamptz AS finished_at FROM ${ops}
       UNION ALL SELECT h.type, h.priority, h.status, h.accepted_at, h.finished_at FROM ${s}.history h WHERE h.finished_at > ${s}.clock() - interval '5 minutes'${and('h')}
       UNION ALL SELECT d.type, d.priority, 'failed', d.accepted_at, d.died_at FROM ${s}.dead_letters d WHERE d.died_at > ${s}.clock() - interval '5 minutes'${and('d')}
     ) t GROUP BY type, priority, status ORDER BY type, priority, status`,
    values,
  )
  return rows.map(({ latency, ...row }) => ({ ...row, averageLatencySeconds: latency }))
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
  const tests: [string, string, unknown][] = []
  const add = (column: string, operator: string, value: unknown): void => {
    if (value !== undefined && value !== null) tests.push([column, operator, value])
  }
  add('id', '<', before)
  add('status', '=', filter.status)
  add('type', '=', filter.type)
  add('queue', '=', filter.queue)
  add('partition', '=', filter.partition)
  add('identity', '=', filter.identity)
  add('created_at', '>=', filter.from)
  add('created_at', '<', filter.to)
  const texts = tests.map(([column, operator, value]) => {
    values.push(value)
    return { column, test: `${operator} $${values.length}` }
  })
  if (filter.ids !== undefined) texts.push({ column: 'id', test: `= ANY ($${values.push(filter.ids)}::uuid[])` })
  const owned = filter.owner === undefined ? null : ownerTest(filter.owner, values)
  const within = filter.bound === undefined ? null : boundTest(filter.bound, values)
  return (table) =>
    [
      'true',
      ...texts.map(({ column, test }) => `${table}.${column} ${test}`),
      ...(owned === null ? [] : [owned(table)]),
      ...(within === null ? [] : [within(table, table)]),
    ].join(' AND ')
}

function toTicket(row: TicketRow): Ticket {
  return {
    id: row.id,
    type: row.type,
    queue: row.queue,
    partition: row.partition,
    priority: row.priority,
    identity: row.identity,
    status: row.status,
    createdAt: row.created_at,
    startedAt: row.started_at,
    finishedAt: row.finished_at,
    attempts: row.attempts,
    maxAttempts: row.max_attempts,
    error: row.error,
    result: row.result,
    place: row.place,
    trace: row.trace,
    ...(row.result_bytes != null && { resultBytes: row.result_bytes }),
    ...(row.error_bytes != null && { errorBytes: row.error_bytes }),
  }
}

function toDeadLetter(row: TicketRow): DeadLetter {
  const { payload, payload_bytes: payloadBytes } = row
  return { ...toTicket(row), payload: payload ?? null, ...(payloadBytes != null && { payloadBytes }) }
}
