import { randomUUID } from 'node:crypto'
import { afterAll, afterEach, beforeAll, beforeEach, describe, expect, it } from 'vitest'
import type { Tx } from '../../src/store/port.js'
import { StoreFault } from '../../src/store/postgres/faults.js'
import { StreamBell } from '../../src/store/postgres/stream-bell.js'
import { postgresStreamRegistry } from '../../src/store/postgres/stream-registry.js'
import type { Append, OpenRequest, StreamKey, StreamLog, StreamRegistry } from '../../src/streams/port.js'
import { items, must, type OpenedStore, type OpenStore, queue, storesOn } from '../conformance/harness.js'
import { eventually } from '../pipeline-fixture.js'
import { freshDatabase, type TestDatabase } from '../setup/database.js'

const minute = 60_000
const hour = 60 * minute
const retentionMs = hour
const longestMs = 10 * minute
const kept = { retentionMs, longestMs }

let database: TestDatabase
let openStore: OpenStore
let opened: OpenedStore
let log: StreamLog
let registry: StreamRegistry

beforeAll(async () => {
  database = await freshDatabase()
  openStore = storesOn(database.url)
})
afterAll(() => database.drop())
beforeEach(async () => {
  opened = await openStore()
  const streams = opened.store.streams(kept)
  log = streams.log
  registry = streams.registry
})
afterEach(async () => {
  for (const { name } of await spans()) await opened.sql(`DROP TABLE ${name}`)
  await opened.sql('DELETE FROM stream_spans')
  await opened.close()
})

const spans = () =>
  opened.sql<{ name: string; from: Date; to: Date }>(
    'SELECT name, from_at AS "from", to_at AS "to" FROM stream_spans ORDER BY from_at',
  )

const request = (given: Partial<OpenRequest> = {}): OpenRequest => ({
  ...{ id: randomUUID(), identity: 'ann', format: 'native', threadId: 'thread-1', log: 'postgres', direct: true },
  ...{ watcher: randomUUID() },
  ...given,
})

const append = (key: StreamKey, first: number, given: Partial<Append> = {}): Append => ({
  ...{ key, first, chunks: [`"chunk ${first}"`], end: null, writer: 'a', ring: false },
  ...given,
})

const openedKey = async (given: Partial<OpenRequest> = {}): Promise<StreamKey> =>
  (await registry.open(request(given))).key

/** A process that is enlisted, as watchers are. */
async function process(): Promise<string> {
  const id = randomUUID()
  await opened.store.enlist(id, 'a test', 1_000 * hour)
  return id
}

describe('opening a stream', () => {
  it('makes it known as it was asked for, born by the clock of the database', async () => {
    await opened.freeze('2031-02-03T04:05:06.789Z')
    const id = randomUUID()
    expect(await registry.open(request({ id }))).toEqual({
      key: { id, bornMs: Date.parse('2031-02-03T04:05:06.789Z') },
      identity: 'ann',
      format: 'native',
      threadId: 'thread-1',
      log: 'postgres',
      direct: true,
      ageMs: 0,
      ended: null,
      last: 0,
      created: true,
    })
  })

  it('finds a known one with its state', async () => {
    const { key } = await registry.open(request({ identity: 'first' }))
    await log.append([append(key, 1), append(key, 2, { end: 'done' })])
    const again = await registry.open(request({ id: key.id, identity: 'second', log: 'redis' }))
    expect(again).toMatchObject({ key, identity: 'first', log: 'postgres', ended: 'done', last: 2, created: false })
  })

  it('makes it known once, however many processes open it at the same time', async () => {
    const others = [registry, opened.another().streams(kept).registry, opened.another().streams(kept).registry]
    const ids = Array.from({ length: 60 }, () => randomUUID())
    const rounds = await Promise.all(
      others.map((each, i) => Promise.all((i === 1 ? ids.toReversed() : ids).map((id) => each.open(request({ id }))))),
    )
    const created = rounds.flat().filter((entry) => entry.created)
    expect(created.map(({ key }) => key.id).sort()).toEqual([...ids].sort())
    expect(new Set(rounds.flat().map(({ key }) => `${key.id} ${key.bornMs}`)).size).toBe(ids.length)
  })

  it('counts its age from when it was accepted', async () => {
    await opened.freeze('2031-02-03T04:05:06Z')
    const entry = await registry.open(request({ acceptedMsAgo: 4_200.4 }))
    expect(entry.ageMs).toBe(4_200)
    expect(await log.append([append(entry.key, 1)])).toEqual(['written'])
  })

  it('keeps any text of an identity and a thread', async () => {
    const text = '{"a\\b"},NULL ä😀'
    const { key } = await registry.open(request({ identity: text, threadId: text }))
    expect(await registry.find(key.id)).toMatchObject({ identity: text, threadId: text })
  })

  it('fails alone when it alone is wrong', async () => {
    const bad = registry.open(request({ threadId: 'a\0b' }))
    const good = registry.open(request())
    await expect(bad).rejects.toThrow(StoreFault)
    expect((await good).created).toBe(true)
  })
})

describe('finding a stream', () => {
  it('answers null for an unknown or invalid id', async () => {
    expect(await registry.find(randomUUID())).toBeNull()
    expect(await registry.find("x'; --")).toBeNull()
  })

  it('does not know the length of another log', async () => {
    const key = await openedKey({ log: 'redis' })
    expect(await registry.find(key.id)).toMatchObject({ log: 'redis', last: 0, ended: null })
  })

  it('knows one that has ended for its retention, not longer', async () => {
    await opened.freeze('2031-01-01T00:00:00Z')
    const key = await openedKey()
    await opened.advance(longestMs)
    await log.append([append(key, 1, { end: 'error' })])
    await opened.advance(retentionMs)
    expect(await registry.find(key.id)).toMatchObject({ ended: 'error', last: 1 })
    await opened.advance(1)
    expect(await registry.find(key.id)).toBeNull()
  })

  it('gives up one without an end when it cannot get one any more', async () => {
    await opened.freeze('2031-01-01T00:00:00Z')
    const key = await openedKey()
    await opened.advance(longestMs + retentionMs)
    expect(await registry.find(key.id)).toMatchObject({ ended: null })
    await opened.advance(1)
    expect(await registry.find(key.id)).toBeNull()
  })

  it('shares statements between callers', async () => {
    const key = await openedKey()
    let statements = 0
    const query: Tx['query'] = (text, values) => {
      statements++
      return opened.store.read(text, values)
    }
    const bell = new StreamBell({ query, channel: 'none' })
    const own = postgresStreamRegistry({
      ...{ query, sweep: query, bell, schema: '"conformance"', timeoutMs: 5_000 },
      ...kept,
    })
    const others = Array.from({ length: 100 }, () => randomUUID())
    const found = await Promise.all([key.id, ...others].map((id) => own.find(id)))
    expect(found.map((entry) => entry?.key.id)).toEqual([key.id, ...others.map(() => undefined)])
    expect(statements).toBe(1)
  })
})

describe('the end of a stream in another log', () => {
  it('is noted once: the first counts', async () => {
    const key = await openedKey({ log: 'redis' })
    await registry.ended(key.id, 'done')
    await registry.ended(key.id, 'error')
    expect(await registry.find(key.id)).toMatchObject({ ended: 'done' })
  })
})

describe('watching', () => {
  it('leaves alone what somebody reads', async () => {
    const key = await openedKey({ watcher: await process() })
    expect(await registry.abandoned([key.id, randomUUID()])).toEqual([])
  })

  it('counts from when the reader left, by the clock of the database', async () => {
    await opened.freeze('2031-01-01T00:00:00Z')
    const watcher = await process()
    const [left, stayed] = [await openedKey({ watcher }), await openedKey({ watcher })]
    await registry.unwatched(left.id, watcher)
    await opened.advance(5_000)
    expect(await registry.abandoned([left.id, stayed.id])).toEqual([{ id: left.id, forMs: 5_000 }])
  })

  it('does not restart the count when the reader is said to have left again', async () => {
    await opened.freeze('2031-01-01T00:00:00Z')
    const watcher = await process()
    const key = await openedKey({ watcher })
    await registry.unwatched(key.id, watcher)
    await opened.advance(5_000)
    await registry.unwatched(key.id, watcher)
    expect(await registry.abandoned([key.id])).toEqual([{ id: key.id, forMs: 5_000 }])
  })

  it('ignores the leaving of a reader whose place another has taken', async () => {
    const [before, now] = [await process(), await process()]
    const key = await openedKey({ watcher: before })
    await registry.watched(key.id, now)
    expect(await registry.unwatched(key.id, before)).toBe(false)
    expect(await registry.abandoned([key.id])).toEqual([])
    expect(await registry.unwatched(key.id, now)).toBe(true)
  })

  it('ends the waiting when another process returns', async () => {
    const watcher = await process()
    const key = await openedKey({ watcher })
    await registry.unwatched(key.id, watcher)
    await registry.watched(key.id, watcher)
    expect(await registry.abandoned([key.id])).toEqual([])
  })

  it('keeps the order of concurrent changes of one stream', async () => {
    const watcher = await process()
    const [back, left] = [await openedKey({ watcher }), await openedKey({ watcher })]
    await Promise.all([
      registry.unwatched(back.id, watcher),
      registry.watched(back.id, watcher),
      registry.watched(left.id, watcher),
      registry.unwatched(left.id, watcher),
    ])
    expect(await registry.abandoned([back.id, left.id])).toMatchObject([{ id: left.id }])
  })

  it('takes a reader whose process is gone as one that leaves when this is noticed', async () => {
    await opened.freeze('2031-01-01T00:00:00Z')
    const watcher = await process()
    const key = await openedKey({ watcher })
    await opened.store.retire(watcher)
    await opened.advance(30_000)
    expect(await registry.abandoned([key.id])).toEqual([{ id: key.id, forMs: 0 }])
    await opened.advance(7_000)
    expect(await registry.abandoned([key.id])).toEqual([{ id: key.id, forMs: 7_000 }])
  })

  it('shows other processes its current readers', async () => {
    const heard: string[] = []
    await opened.another().listen((kind) => heard.push(kind))
    const watcher = await process()
    const key = await openedKey()
    await registry.watched(key.id, watcher)
    await eventually(() => heard.includes(`stream-watch:${key.id}:${watcher}`), 'the notice')
  })
})

describe('a stream whose operation has left the queue', () => {
  const graceMs = 3_000
  const orphaned = async () => (await registry.orphaned(0, graceMs)).map(({ key }) => key.id).sort()

  it('without an end is orphaned once its operation has left the queue for a while', async () => {
    const ids = await queue(opened.store, items('lane', 3))
    for (const id of ids) await registry.open(request({ id }))
    const [waits = '', left = '', ended = ''] = ids
    const { key } = must(await registry.find(ended))
    await log.append([append(key, 1, { end: 'done' })])
    for (const id of [left, ended]) expect(await opened.store.cancel(id, [], 'a test')).toBe('cancelled')
    await opened.advance(graceMs - 1_000)
    expect(await orphaned()).toEqual([])
    await opened.advance(2_000)
    expect(await orphaned()).toEqual([left])
    expect(await registry.find(waits)).toMatchObject({ ended: null })
  })

  it('is reported with its last state to one process', async () => {
    const key = await openedKey()
    await log.append([append(key, 1)])
    await opened.advance(graceMs + 1)
    const everyMs = 60_000
    const others = [registry, opened.another().streams(kept).registry]
    const reports = await Promise.all(others.map((each) => each.orphaned(everyMs, graceMs)))
    expect(reports.flat()).toMatchObject([{ key, ended: null, last: 1 }])
  })
})

describe('sweeping', () => {
  const sweep = () => registry.sweep(retentionMs, longestMs)
  /** Goes on in small steps, as time does between two sweeps. */
  const pass = async (ms: number) => {
    const total = { streams: 0, partitions: 0 }
    for (let passed = 0; passed < ms; passed += 5 * minute) {
      await opened.advance(Math.min(5 * minute, ms - passed))
      const { streams, partitions } = await sweep()
      total.streams += streams
      total.partitions += partitions
    }
    return total
  }
  const countOf = async (table: string): Promise<number> =>
    must((await opened.sql<{ n: number }>(`SELECT count(*)::int AS n FROM ${table}`))[0]).n

  it('makes partitions ahead, one behind the other', async () => {
    await sweep()
    await pass(hour)
    const made = await spans()
    expect(made.length).toBeGreaterThan(2)
    for (const [i, span] of made.entries()) if (i > 0) expect(span.from).toEqual(must(made[i - 1]).to)
    const key = await openedKey()
    await log.append([append(key, 1)])
    expect(await countOf('stream_chunks_rest')).toBe(0)
  })

  it('removes expired streams, and the partition with its records', async () => {
    await sweep()
    await pass(5 * minute)
    const key = await openedKey()
    await log.append([append(key, 1, { end: 'done' })])
    expect(await pass(retentionMs - 10 * minute)).toEqual({ streams: 0, partitions: 0 })
    expect(await log.head(key)).toEqual({ last: 1, end: 'done' })
    const swept = await pass(longestMs + hour)
    expect(swept.streams).toBe(1)
    expect(swept.partitions).toBeGreaterThan(0)
    expect(await log.head(key)).toEqual({ last: 0, end: null })
    expect(await countOf('stream_chunks')).toBe(0)
  })

  it('removes one that never ended when it cannot end any more', async () => {
    const key = await openedKey()
    await log.append([append(key, 1)])
    await opened.advance(longestMs + retentionMs + 1_000)
    expect(await sweep()).toMatchObject({ streams: 1 })
    expect(await log.append([append(key, 2)])).toEqual(['lost'])
    expect(await countOf('stream_chunks')).toBe(0)
  })

  it('keeps the records of one that ended later than it should have', async () => {
    await sweep()
    await pass(5 * minute)
    const key = await openedKey()
    await log.append([append(key, 1)])
    await pass(longestMs + 50 * minute)
    await log.append([append(key, 2, { end: 'done' })])
    await pass(50 * minute)
    expect(await registry.find(key.id)).toMatchObject({ ended: 'done', last: 2 })
  })

  it('leaves it to the process that sweeps already', async () => {
    await openedKey()
    await opened.advance(longestMs + retentionMs + 1_000)
    const session = await opened.session()
    await session.query('BEGIN')
    await session.query('SELECT stream_sweep_lock()')
    expect(await sweep()).toEqual({ streams: 0, partitions: 0, isFull: false })
    await session.query('COMMIT')
    expect(await sweep()).toMatchObject({ streams: 1 })
  })

  it('loses no record of streams that are written meanwhile', async () => {
    const other = opened.another().streams(kept).registry
    let sweeping = true
    const keys: StreamKey[] = []
    const answers = new Set<string>()
    const write = async (): Promise<void> => {
      while (sweeping) {
        const key = await openedKey()
        keys.push(key)
        for (let n = 1; n <= 5; n++)
          for (const answer of await log.append([append(key, n, n === 5 ? { end: 'done' } : {})])) answers.add(answer)
      }
    }
    const writing = write()
    let dropped = 0
    try {
      for (let round = 0; round < 25; round++) {
        const before = keys.length
        dropped += (await other.sweep(retentionMs, longestMs)).partitions
        await opened.advance(7 * minute)
        // The clock is not to run away from a stream that is being written.
        await eventually(() => keys.length > before, 'the next stream')
      }
    } finally {
      sweeping = false
      await writing
    }
    expect(dropped).toBeGreaterThan(0)
    expect([...answers]).toEqual(['written'])
    expect(await log.head(must(keys.at(-1)))).toEqual({ last: 5, end: 'done' })
  })
})
