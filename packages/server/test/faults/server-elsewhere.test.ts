/** Instances of one database that may call different targets: work goes to those who may, and fails only when none lives. */
import pg from 'pg'
import { afterEach, beforeEach, describe, expect, it, vi } from 'vitest'
import { freshDatabase, type TestDatabase } from '../../../spillway/test/setup/database.js'
import {
  type Body,
  endAll,
  get,
  inBatches,
  operation,
  post,
  type ServerProcess,
  startServer,
  startTarget,
  submit,
  type Target,
  until,
} from '../server-process.js'

vi.setConfig({ testTimeout: 180_000 })

let database: TestDatabase
let sql: pg.Client
const targets: Target[] = []

beforeEach(async () => {
  database = await freshDatabase()
  sql = new pg.Client({ connectionString: database.url })
  await sql.connect()
})
afterEach(async () => {
  await endAll()
  await sql.end()
  await Promise.all(targets.splice(0).map((target) => target.close()))
  await database.drop()
})

const start = (env: Record<string, string> = {}) => startServer({ DATABASE_URL: database.url, ...env })
async function target(handle?: Parameters<typeof startTarget>[0]): Promise<Target> {
  const started = await startTarget(handle)
  targets.push(started)
  return started
}
/** From now on the store's time runs so much faster: leases, delays and the minute of those whom none may run. */
async function hurry(factor: number): Promise<void> {
  const { rows } = await sql.query<{ here: string; there: string }>(
    'SELECT clock_timestamp()::text AS here, spillway.clock()::text AS there',
  )
  const [{ here, there } = { here: '', there: '' }] = rows
  await sql.query(`CREATE OR REPLACE FUNCTION spillway.clock() RETURNS timestamptz LANGUAGE sql VOLATILE AS
    $$ SELECT timestamptz '${there}' + (clock_timestamp() - timestamptz '${here}') * ${factor} $$`)
}
const number = async (query: string): Promise<number> => Number((await sql.query<{ n: string }>(query)).rows[0]?.n)
const claims = () => number('SELECT last_value AS n FROM spillway.fences')
const paused = async (server: ServerProcess, queue: string, work: () => Promise<void>) => {
  await post(server, '/api/v1/lanes/pause', { queue })
  await work()
  await post(server, '/api/v1/lanes/resume', { queue })
}
/** Their tickets, once they have all left the queue. The table is asked: hundreds of polling requests would be a load. */
async function finished(server: ServerProcess, ids: readonly string[], ms = 90_000): Promise<Body[]> {
  const left = `SELECT count(*) AS n FROM spillway.ops WHERE id IN (${ids.map((id) => `'${id}'`).join()})`
  await until('all are finished', async () => (await number(left)) === 0, ms)
  return inBatches(ids.length, (n) => operation(server, ids[n] ?? ''))
}
function statuses(all: readonly Body[]): Record<string, number> {
  const counts: Record<string, number> = {}
  for (const { status } of all) counts[status] = (counts[status] ?? 0) + 1
  return counts
}

describe('two instances, each of which may call its own origin alone', () => {
  it('complete 200 operations that either of them accepted', async () => {
    const both = await Promise.all([start(), start()])
    const ids: string[] = []
    await paused(both[0], 'demo', async () => {
      const answers = await inBatches(200, (n) => {
        const server = both[n % 2] as ServerProcess
        return submit(server, `${server.origin}/demo/echo`, { queue: 'demo', partition: `p${n % 57}` })
      })
      ids.push(...answers.map(({ body }) => body.operationId))
    })
    const all = await finished(both[1], ids)
    expect(statuses(all)).toEqual({ completed: 200 })
    expect(all.every(({ attempt, retry_count }) => attempt === 1 && retry_count === 0)).toBe(true)
  })
})

describe('a lane with targets of both', () => {
  it('keeps its order, spends no attempts, and is not claimed by processes that may not run its head', async () => {
    const seen: string[] = []
    const note: Parameters<typeof startTarget>[0] = ({ body }, response) => {
      seen.push(String(JSON.parse(body)))
      response.writeHead(200).end()
    }
    const [left, right] = await Promise.all([target(note), target(note)])
    const [a, b] = await Promise.all([
      start({ SPILLWAY_FORWARD_ALLOW: left.origin }),
      start({ SPILLWAY_FORWARD_ALLOW: right.origin }),
    ])
    const ids: string[] = []
    await paused(a, 'mixed', async () => {
      for (let n = 0; n < 40; n++) {
        const [server, to] = n % 3 === 0 ? [a, left] : [b, right]
        const order = { queue: 'mixed', payload: { body: `${n}` }, max_retries: 0 }
        ids.push((await submit(server, `${to.origin}/x`, order)).body.operationId)
      }
    })
    expect(statuses(await finished(a, ids))).toEqual({ completed: 40 })
    expect(seen).toEqual(Array.from({ length: 40 }, (_, n) => `${n}`))
  })

  it('waits for the one that may while that is busy, without being claimed by the other', async () => {
    const waiting: (() => void)[] = []
    const slow = await target((_, response) => {
      waiting.push(() => response.writeHead(200).end())
    })
    const other = await target()
    const [a, b] = await Promise.all([
      start({ SPILLWAY_FORWARD_ALLOW: slow.origin, SPILLWAY_CONCURRENCY: '1' }),
      start({ SPILLWAY_FORWARD_ALLOW: other.origin }),
    ])
    const ids: string[] = []
    await paused(a, 'busy', async () => {
      for (let n = 0; n < 20; n++) {
        const order = { queue: 'busy', partition: `p${n}`, max_retries: 0 }
        ids.push((await post(a, '/api/v1/operations', bodyOf(slow, order))).body.operationId)
      }
    })
    const labelled = () => number(`SELECT count(*) AS n FROM spillway.ready WHERE type LIKE 'http.request %'`)
    await until(
      'all but the running one are left to the one that may',
      async () => (await labelled()) === 19 && slow.calls.length === 1,
      60_000,
    )
    const before = await claims()
    // The other one looks with each of its heartbeats.
    const beats = () => sql.query<{ until: Date }>(`SELECT until FROM spillway.workers ORDER BY id`)
    for (let n = 0; n < 3; n++) {
      const last = JSON.stringify((await beats()).rows)
      await until('a heartbeat', async () => JSON.stringify((await beats()).rows) !== last)
      expect((await submit(b, `${other.origin}/x`, { queue: 'own' })).body.status).toBe('executed')
    }
    expect(await labelled()).toBe(19)
    // Its own work is executed at once, by a lease of its own each time; nothing was claimed from the queue.
    expect((await claims()) - before).toBeLessThanOrEqual(3)
    const released = setInterval(() => waiting.shift()?.(), 5)
    const all = await finished(b, ids).finally(() => clearInterval(released))
    expect(statuses(all)).toEqual({ completed: 20 })
  })
})

const bodyOf = (to: Target, order: object) => ({ type: 'http.request', payload: { url: `${to.origin}/x` }, ...order })

describe('when the only instance that may is gone', () => {
  /** Two instances, work for the first of them alone, and that one killed. */
  async function orphaned(lanes: number) {
    const [its, others] = await Promise.all([target(), target()])
    const [a, b] = await Promise.all([
      start({ SPILLWAY_FORWARD_ALLOW: its.origin }),
      start({ SPILLWAY_FORWARD_ALLOW: others.origin }),
    ])
    const ids: string[] = []
    await paused(b, 'orphans', async () => {
      for (let n = 0; n < lanes * 2; n++) {
        const order = { queue: 'orphans', partition: `p${n % lanes}` }
        ids.push((await post(a, '/api/v1/operations', bodyOf(its, order))).body.operationId)
      }
      await a.kill()
    })
    return { b, ids, its, others }
  }

  it('they fail after a minute, with the reason, and hold up nothing else', async () => {
    const { b, ids, its, others } = await orphaned(10)
    await hurry(8)
    const before = await claims()
    const own: string[] = []
    await until(
      'they are dead letters',
      async () => {
        const order = { queue: 'own', partition: `${own.length}` }
        own.push((await submit(b, `${others.origin}/x`, order)).body.operationId)
        return (await get(b, '/api/v1/dead-letters?queue=orphans')).body.items.length === ids.length
      },
      90_000,
    )
    expect(statuses(await finished(b, own))).toEqual({ completed: own.length })
    const all = await finished(b, ids)
    expect(statuses(all)).toEqual({ failed: 20 })
    for (const { error_message, created_at, processed_at } of all) {
      expect(error_message).toContain(its.origin)
      expect(error_message).toContain('SPILLWAY_FORWARD_ALLOW')
      expect(Date.parse(processed_at) - Date.parse(created_at)).toBeGreaterThanOrEqual(60_000)
    }
    expect(its.calls).toHaveLength(0)
    // Ten lanes that are looked at every five seconds for about 80, and each own operation by a lease of its own.
    expect((await claims()) - before - own.length).toBeLessThan(10 * 40)
    const said = b.logs().filter(({ msg }) => String(msg).includes('no running process may run this'))
    expect(said).toHaveLength(1)
  })

  it('they are done when a process that may run them returns in time', async () => {
    const { b, ids, its } = await orphaned(5)
    await hurry(8)
    await until('it is known that none may', () =>
      b.logs().some(({ msg }) => String(msg).includes('no running process')),
    )
    // However long a start takes here, it is in time.
    await hurry(1)
    const back = await start({ SPILLWAY_FORWARD_ALLOW: its.origin })
    await hurry(8)
    const all = await finished(back, ids)
    expect(statuses(all)).toEqual({ completed: 10 })
    expect(all.every(({ attempt }) => attempt === 1)).toBe(true)
    expect(its.calls).toHaveLength(10)
  })

  it('one that stops returns at once the operations left to it', async () => {
    const waiting: (() => void)[] = []
    const slow = await target((_, response) => void waiting.push(() => response.writeHead(200).end()))
    const other = await target()
    const allow = { SPILLWAY_FORWARD_ALLOW: slow.origin }
    const [a, b] = await Promise.all([
      start({ ...allow, SPILLWAY_CONCURRENCY: '1' }),
      start({ SPILLWAY_FORWARD_ALLOW: other.origin }),
    ])
    const ids: string[] = []
    for (let n = 0; n < 6; n++) {
      const order = bodyOf(slow, { queue: 'left', partition: `p${n}` })
      ids.push((await post(a, '/api/v1/operations', order, { prefer: 'respond-async' })).body.operationId)
    }
    const labelled = () => number(`SELECT count(*) AS n FROM spillway.ready WHERE type LIKE 'http.request %'`)
    await until('they are left to it', async () => (await labelled()) > 0)
    const released = setInterval(() => waiting.shift()?.(), 5)
    try {
      await a.stop()
      expect(await labelled()).toBe(0)
      const again = await start(allow)
      expect(statuses(await finished(again, ids))).toEqual({ completed: 6 })
      expect((await get(b, '/api/v1/dead-letters')).body.items).toEqual([])
    } finally {
      clearInterval(released)
    }
  })
})
