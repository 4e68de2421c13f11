import { randomUUID } from 'node:crypto'
import pg from 'pg'
import { afterAll, afterEach, beforeAll, beforeEach, describe, expect, it } from 'vitest'
import type { Store } from '../../src/store/port.js'
import { postgresStore } from '../../src/store/postgres/store.js'
import {
  type Append,
  LogFault,
  type OpenRequest,
  type StreamKey,
  type StreamLog,
  type StreamRegistry,
} from '../../src/streams/port.js'
import { until } from '../conformance/harness.js'
import { eventually } from '../pipeline-fixture.js'
import { freshDatabase, type TestDatabase } from '../setup/database.js'
import { type OpenedLog, streamLogConformance } from '../stream-log-conformance.js'

let database: TestDatabase
let admin: pg.Pool
beforeAll(async () => {
  database = await freshDatabase()
  admin = new pg.Pool({ connectionString: database.url, options: '-c search_path=spillway', max: 4 })
  admin.on('error', () => undefined)
  const store = postgresStore({ url: database.url })
  await store.migrate()
  await store.close()
})
afterAll(async () => {
  await admin.end()
  await database.drop()
})

interface Process {
  store: Store
  log: StreamLog
  registry: StreamRegistry
}

const started = async (timeoutMs = 10_000): Promise<Process> => {
  const store = postgresStore({ url: database.url, timeoutMs })
  await store.listen(() => undefined)
  return { store, ...store.streams({ retentionMs: 3_600_000, longestMs: 600_000 }) }
}

const requestOf = (id: string): OpenRequest => ({
  id,
  identity: 'ann',
  format: 'openai',
  threadId: id,
  log: 'postgres',
  direct: true,
  watcher: randomUUID(),
})

/** For all tests of the suite: most of the time went into new connections. */
let pair: { mine: Process; other: Process } | undefined
afterAll(async () => {
  await Promise.all([pair?.mine.store.close(), pair?.other.store.close()])
})

async function opened(): Promise<OpenedLog> {
  pair ??= { mine: await started(), other: await started() }
  const { mine, other } = pair
  return {
    log: mine.log,
    other: other.log,
    open: async () => (await mine.registry.open(requestOf(randomUUID()))).key,
    lose: async ({ id }) => {
      await admin.query('DELETE FROM streams WHERE id = $1', [id])
      await admin.query('DELETE FROM stream_chunks WHERE stream = $1', [id])
    },
    close: async () => undefined,
  }
}

streamLogConformance('PostgreSQL', opened)

describe('the stream log in PostgreSQL', () => {
  let process: Process
  let key: StreamKey
  beforeEach(async () => {
    process = await started(1_000)
    key = (await process.registry.open(requestOf(randomUUID()))).key
  })
  afterEach(() => process.store.close())

  const append = (first: number, given: Partial<Append> = {}): Append => ({
    ...{ key, first, chunks: [`"chunk ${first}"`], end: null, writer: 'a', ring: false },
    ...given,
  })
  const inTransaction = async (use: (client: pg.PoolClient) => Promise<void>): Promise<void> => {
    const client = await admin.connect()
    try {
      await client.query('BEGIN')
      await use(client)
    } finally {
      await client.query('ROLLBACK')
      client.release()
    }
  }
  /** As the other writer's statement that is not committed yet. */
  const insertOf = (client: pg.PoolClient, writer: string, first: number) =>
    client.query(
      `INSERT INTO stream_chunks (stream, born_at, first, last, writer, chunks) SELECT id, born_at, $2, $2, $3, '"x"' FROM streams WHERE id = $1`,
      [key.id, first, writer],
    )
  const untilItWaits = () =>
    until('an append waits for a lock', async () => {
      const { rowCount } = await admin.query(
        "SELECT FROM pg_stat_activity WHERE datname = current_database() AND application_name = 'spillway streams' AND wait_event_type = 'Lock'",
      )
      return (rowCount ?? 0) > 0
    })

  it('waits for the writer before it, and has lost when that one commits', async () => {
    await process.log.append([append(1)])
    await inTransaction(async (client) => {
      await insertOf(client, 'b', 2)
      const answer = process.log.append([append(2)])
      await untilItWaits()
      await client.query('COMMIT')
      expect(await answer).toEqual(['lost'])
    })
  })

  it('waits for the writer before it, and writes when that one comes to nothing', async () => {
    await process.log.append([append(1)])
    await inTransaction(async (client) => {
      await insertOf(client, 'b', 2)
      const answer = process.log.append([append(2)])
      await untilItWaits()
      await client.query('ROLLBACK')
      expect(await answer).toEqual(['written'])
    })
  })

  it('has written what its own unanswered try commits while it tries again', async () => {
    await process.log.append([append(1)])
    await inTransaction(async (client) => {
      await insertOf(client, 'a', 2)
      const answer = process.log.append([append(2), append(3)])
      await untilItWaits()
      await client.query('COMMIT')
      expect(await answer).toEqual(['written', 'written'])
    })
  })

  it('reports an end to the registry together with the record', async () => {
    await process.log.append([append(1), append(2, { end: 'cancelled' })])
    expect(await process.registry.find(key.id)).toMatchObject({ ended: 'cancelled', last: 2 })
  })

  it('does not end a stream for a record that was lost', async () => {
    await process.log.append([append(1, { writer: 'b' })])
    expect(await process.log.append([append(1, { end: 'done' })])).toEqual(['lost'])
    expect(await process.registry.find(key.id)).toMatchObject({ ended: null, last: 1 })
  })

  it('has lost a stream that is not known, and one of another birth', async () => {
    const unknown = { id: randomUUID(), bornMs: key.bornMs }
    const otherwise = { id: key.id, bornMs: key.bornMs + 1 }
    expect(await process.log.append([append(1, { key: unknown }), append(1, { key: otherwise })])).toEqual([
      'lost',
      'lost',
    ])
  })

  it('refuses a chunk that is no JSON text before anything is written', async () => {
    await expect(process.log.append([append(1, { chunks: ['"a\x1eb"'] })])).rejects.toThrow(RangeError)
    expect(await process.log.head(key)).toEqual({ last: 0, end: null })
  })

  it('reads behind any number that a client may name', async () => {
    await process.log.append([append(1)])
    expect(await process.log.read([{ key, after: Number.MAX_SAFE_INTEGER }])).toEqual([{ records: [], more: false }])
  })

  it('is down when the database does not answer, and finds its record when it is back', async () => {
    await process.log.append([append(1)])
    await inTransaction(async (client) => {
      await client.query('LOCK TABLE stream_chunks')
      await expect(process.log.append([append(2)])).rejects.toThrow(LogFault)
      expect(process.log.isUp).toBe(false)
    })
    expect(await process.log.append([append(2)])).toEqual(['written'])
    expect(process.log.isUp).toBe(true)
    expect(await process.log.head(key)).toEqual({ last: 2, end: null })
  })

  it('reports that notices may have been missed when the connection for them was lost', async () => {
    const gaps: null[] = []
    process.log.onBell((ids) => {
      if (ids === null) gaps.push(ids)
    })
    await admin.query(
      "SELECT pg_terminate_backend(pid) FROM pg_stat_activity WHERE datname = current_database() AND application_name = 'spillway listen'",
    )
    await eventually(() => gaps.length > 0, 'the gap to be reported')
    expect(gaps).toEqual([null])
  })
})
