/** What must hold of the tables of messages, and that each break of it is reported. That the schema keeps to it, the runs show. */
import { randomUUID } from 'node:crypto'
import { workloadSql } from '@spillway/server/internal'
import pg from 'pg'
import { coreSql, migrate } from 'spillway/workload'
import { afterEach, beforeEach, describe, expect, it } from 'vitest'
import { freshDatabase, type TestDatabase } from '../packages/spillway/test/setup/database.js'
import { schema } from './cluster.js'
import { messagesAuditSql, messagesRestSql, messagesSql, unconsumedSql } from './message-tables.js'
import { queueName } from './workload.js'

const partition = randomUUID()
const group = 'mail'
const quiet = (): void => undefined

let database: TestDatabase
let client: pg.Client

beforeEach(async () => {
  database = await freshDatabase()
  const log = { info: quiet, warn: quiet, error: quiet }
  await migrate({ url: database.url, schema, sql: [coreSql, ...workloadSql], log })
  client = new pg.Client({ connectionString: database.url })
  await client.connect()
  await client.query(`SET search_path = ${schema}`)
})

afterEach(async () => {
  await client.end()
  await database.drop()
})

/** Four messages of one partition, as the schema keeps them. */
async function messages(): Promise<void> {
  await client.query(`INSERT INTO mq_queues (name, created_at) VALUES ('${queueName}', clock())`)
  await client.query(
    `INSERT INTO mq_partitions (id, queue, name, tail, pushed_at, created_at) SELECT '${partition}', id, 'push-1', 4, clock(), clock() FROM mq_queues`,
  )
  await client.query(`INSERT INTO mq_messages (partition, seq, id, transaction_id, sealed, payload, created_at)
    SELECT '${partition}', n, gen_random_uuid(), 'push-1#' || n, false, json_build_object('n', n + 10), clock() FROM generate_series(1, 4) n`)
}

/** A group that has read up to `head`: it is in line, in a lease, or nowhere. */
async function reads(head: number, place: 'line' | 'lease' | null): Promise<void> {
  await client.query(
    `INSERT INTO mq_groups (queue, name, mode, since, created_at) SELECT id, '${group}', 'all', clock(), clock() FROM mq_queues`,
  )
  const lease = place === 'lease' ? `'${randomUUID()}'::uuid` : 'NULL::uuid'
  await client.query(
    `INSERT INTO mq_cursors (partition, grp, head, consumed, lease) SELECT '${partition}', id, ${head}, ${head}, ${lease} FROM mq_groups`,
  )
  await client.query(
    `INSERT INTO mq_leases (id, grp, until, partitions) SELECT lease, grp, clock(), ARRAY[partition] FROM mq_cursors WHERE lease IS NOT NULL`,
  )
  if (place === 'line') await client.query('INSERT INTO mq_ready SELECT partition, grp, clock() FROM mq_cursors')
}

const faults = async (sql: string): Promise<string[]> =>
  (await client.query<{ fault: string }>(sql)).rows.map((row) => row.fault)
const unconsumed = async (): Promise<number | undefined> =>
  (await client.query<{ n: number }>(unconsumedSql(schema), [[group]])).rows[0]?.n

beforeEach(messages)

describe('what holds', () => {
  it.each(['line', 'lease'] as const)('something to read, in one place: %s', async (place) => {
    await reads(1, place)
    expect(await faults(messagesAuditSql(schema))).toEqual([])
    expect(await unconsumed()).toBe(place === 'line' ? 1 : 2)
  })

  it('at rest, when all is agreed to', async () => {
    await reads(4, null)
    expect(await faults(messagesRestSql(schema))).toEqual([])
    expect(await unconsumed()).toBe(0)
  })

  it('messages that no pop asked for are not consumed', async () => {
    expect(await unconsumed()).toBe(1)
  })

  it('each message is an effect, at its number', async () => {
    const { rows } = await client.query<unknown[]>({ text: `${messagesSql(schema)} ORDER BY 1`, rowMode: 'array' })
    expect(rows).toEqual([1, 2, 3, 4].map((n) => [n, expect.any(Number), 'push-1', n + 10, expect.any(String), 'push']))
  })
})

const neither = 'messages: mail of push-1 has read 1 of 4, and is neither in line nor leased'

describe('reports', () => {
  const breaks: readonly [what: string, place: 'line' | 'lease', reported: readonly RegExp[], statement: string][] = [
    ['something to read, in no place', 'line', [new RegExp(neither)], 'DELETE FROM mq_ready'],
    [
      'something to read, in two places',
      'lease',
      [/has read 1 of 4, and is in line and leased/],
      'INSERT INTO mq_ready SELECT partition, grp, clock() FROM mq_cursors',
    ],
    [
      'a number that is missing',
      'line',
      [/has 3 messages from 1 to 4, behind 0/],
      'DELETE FROM mq_messages WHERE seq = 2',
    ],
    [
      'a number that was cut off and is there',
      'line',
      [/from 1 to 4, behind 1 and/],
      'UPDATE mq_partitions SET low = 1',
    ],
    ['a number beyond the last', 'line', [/up to 3$/], 'UPDATE mq_partitions SET tail = 3'],
    ['a cursor beyond the last', 'line', [/has read 9 of 4/], 'UPDATE mq_cursors SET head = 9'],
    ['a lease that is not there', 'lease', [new RegExp(neither), /which does not say so/], 'DELETE FROM mq_leases'],
    [
      'a lease that the cursor does not name',
      'lease',
      [new RegExp(neither), /whose cursor does not name it/],
      'UPDATE mq_cursors SET lease = NULL',
    ],
    [
      'a lease of nothing',
      'lease',
      [new RegExp(neither), /which does not say so/, /is of nothing/],
      `UPDATE mq_leases SET partitions = '{}'`,
    ],
  ]
  it.each(breaks)('%s', async (_, place, reported, statement) => {
    await reads(1, place)
    await client.query(statement)
    expect(await faults(messagesAuditSql(schema))).toEqual(reported.map((pattern) => expect.stringMatching(pattern)))
  })

  it('at rest: a lease', async () => {
    await reads(4, 'lease')
    expect(await faults(messagesRestSql(schema))).toEqual([expect.stringMatching(/is there at rest/)])
  })

  it('at rest: a message that was not agreed to, or twice', async () => {
    await reads(4, null)
    await client.query('UPDATE mq_cursors SET consumed = 5')
    expect(await faults(messagesRestSql(schema))).toEqual([
      'messages: mail has agreed to 5 of the 4 messages of push-1',
    ])
  })

  it('at rest: a message that ran out of attempts', async () => {
    await reads(4, null)
    await client.query(`INSERT INTO mq_dead (message_id, partition, seq, queue, partition_name, grp, transaction_id, sealed, payload, retry_count, is_letter, created_at, moved_at)
      SELECT id, partition, seq, '${queueName}', 'push-1', '${group}', transaction_id, sealed, payload, 0, false, clock(), clock() FROM mq_messages WHERE seq = 2`)
    expect(await faults(messagesRestSql(schema))).toEqual(['messages: mail gave up push-1#2'])
  })
})
