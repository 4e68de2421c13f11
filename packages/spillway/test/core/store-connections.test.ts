import { randomUUID } from 'node:crypto'
import Type from 'typebox'
import { afterEach, beforeEach, describe, expect, it } from 'vitest'
import { postgres } from '../../src/index.js'
import type { OpenTx } from '../../src/store/port.js'
import { type Bench, bench, eventually } from '../pipeline-fixture.js'

const Body = Type.Object({ n: Type.Number() })
/** Heartbeats and LISTEN. */
const beyondPoolMax = 2
const poolMax = 10
const lane = ({ n }: { n: number }): readonly [string, string] => ['numbers', String(n % 50)]

let b: Bench
beforeEach(async () => {
  b = await bench()
})
afterEach(() => b.close())

const connections = async (): Promise<number> => {
  const [row] = await b.sql<{ n: number }>(
    `SELECT count(*)::int AS n FROM pg_stat_activity
     WHERE datname = current_database() AND application_name LIKE 'spillway%'`,
  )
  return row?.n ?? 0
}

describe('the connections of a process', () => {
  it('are never more than poolMax, one for heartbeats and one for LISTEN', async () => {
    const store = postgres({ url: b.url, poolMax })
    const intake = await b.intake({ wrap: () => store })
    const { log, registry } = store.streams({ retentionMs: 60_000, longestMs: 60_000 })
    const op = intake.define('op', { body: Body, lane, run: (_, ctx) => ctx.tx.query('SELECT pg_sleep(0.005)') })
    const plain = intake.define('plain', { body: Body, lane, run: () => undefined })
    let most = 0
    let isOver = false
    const watching = (async () => {
      while (!isOver) most = Math.max(most, await connections())
    })()
    const round = async (n: number): Promise<void> => {
      const key = await registry.open({
        ...{ id: randomUUID(), identity: 'a', format: 'native', threadId: 't', log: 'postgres', direct: true },
        watcher: randomUUID(),
      })
      await Promise.all([
        intake.submit(op, { n }),
        intake.submit(plain, { n }),
        log.append([{ key: key.key, writer: 'w', ring: true, first: 1, chunks: ['1'], end: null }]),
        log.head(key.key),
        store.read('SELECT pg_sleep(0.002)'),
        store.statements.take('SELECT 1'),
        store.statements.release('SELECT 1'),
        intake.transaction((tx) => intake.enqueue(plain, { n }, { tx })),
        store.tickets({}, 10, null),
      ])
    }
    try {
      for (let i = 0; i < 10; i++) await Promise.all(Array.from({ length: 20 }, (_, n) => round(i * 20 + n)))
    } finally {
      isOver = true
      await watching
    }
    expect(most).toBeGreaterThan(poolMax / 2)
    expect(most).toBeLessThanOrEqual(poolMax + beyondPoolMax)
  })

  it('leave some for settling, acks, heartbeats, accepting and reads while handlers hold all they may', async () => {
    const store = postgres({ url: b.url, poolMax })
    const held: OpenTx[] = []
    let flooding = true
    try {
      await store.migrate()
      const worker = randomUUID()
      await store.enlist(worker, 'one', 30_000)
      for (let n = 0; n < 40; n++)
        void store.begin(60_000).then(
          (tx) => held.push(tx),
          () => undefined,
        )
      await eventually(() => store.poolState().waiting > 0 || undefined, 'the handlers to use all that they may')
      const flood = Array.from({ length: 3 }, async () => {
        while (flooding)
          await Promise.all(
            Array.from({ length: 50 }, () => store.answerKey(randomUUID(), randomUUID(), { v: 'cancelled' })),
          )
      })
      const began = performance.now()
      await Promise.all([
        store.step(worker, 0, [], { lanes: 1, budget: 1, each: 1, turn: 0 }),
        store.statements.release('SELECT 1'),
        store.pulse(worker, 30_000, {}),
        store.halt('a', 'b'),
        store.read('SELECT 1'),
        store.statements.take('SELECT 1'),
      ])
      expect(performance.now() - began).toBeLessThan(1_000)
      flooding = false
      await Promise.all(flood)
      expect(held.length).toBe(poolMax - 5)
    } finally {
      flooding = false
      await Promise.all(held.map((tx) => tx.rollback()))
      await store.close()
    }
  })

  it('are used again without what a handler changed in its session', async () => {
    const store = postgres({ url: b.url, poolMax })
    try {
      await store.migrate()
      const show = `SELECT current_setting('synchronous_commit') AS commit, current_setting('statement_timeout') AS timeout,
        current_setting('datestyle') AS dates, pg_backend_pid() AS pid`
      const [before] = (await store.read(show)).rows
      const tx = await store.begin(10_000)
      await tx.query("SET synchronous_commit = off; SET statement_timeout = 1; SET datestyle = 'SQL, DMY'")
      await tx.commit()
      expect((await store.read(show)).rows).toEqual([before])
    } finally {
      await store.close()
    }
  })

  it('need a poolMax of at least 8', () => {
    expect(() => postgres({ url: b.url, poolMax: 7 })).toThrow(
      'poolMax must be a whole number from 8 to 10000; given: 7',
    )
  })
})
