/** How many connections to PostgreSQL one process opens, whatever it is asked to do at once. */
import { setTimeout as delay } from 'node:timers/promises'
import pg from 'pg'
import { afterEach, beforeEach, expect, it } from 'vitest'
import { freshDatabase, type TestDatabase } from '../../../spillway/test/setup/database.js'
import { calm, pop, push } from '../message-calls.js'
import { endAll, get, inBatches, type ServerProcess, startServer, startTarget, submit } from '../server-process.js'

/** One for heartbeats, one for LISTEN. */
const beyondPoolMax = 2
const poolMax = 10

let database: TestDatabase
let watcher: pg.Client
beforeEach(async () => {
  database = await freshDatabase()
  watcher = new pg.Client({ connectionString: database.url })
  await watcher.connect()
})
afterEach(async () => {
  await watcher.end()
  await endAll()
  await database.drop()
})

async function connections(): Promise<number> {
  const { rows } = await watcher.query<{ n: number }>(
    `SELECT count(*)::int AS n FROM pg_stat_activity
     WHERE datname = current_database() AND application_name LIKE 'spillway%'`,
  )
  return rows[0]?.n ?? 0
}

/** The most connections that were seen while the load ran. */
async function mostDuring(load: Promise<unknown>): Promise<number> {
  let most = 0
  let isOver = false
  const look = async (): Promise<void> => {
    while (!isOver) {
      most = Math.max(most, await connections())
      await delay(5)
    }
  }
  const ended = load.finally(() => {
    isOver = true
  })
  await Promise.all([ended, look()])
  return most
}

const streamed = async (server: ServerProcess, n: number): Promise<{ status: number }> => {
  const response = await fetch(`${server.origin}/api/v1/stream`, {
    method: 'POST',
    headers: { 'content-type': 'application/json', 'x-user-id': `user-${n}` },
    body: JSON.stringify({ query: 'hello', model: 'demo' }),
  })
  await response.text()
  return { status: response.status }
}

it('a process under mixed load opens at most SPILLWAY_POOL_MAX + 2 connections, and answers everything', async () => {
  const target = await startTarget((_, response) => void response.end())
  const server = await startServer({
    ...calm,
    DATABASE_URL: database.url,
    SPILLWAY_POOL_MAX: String(poolMax),
    SPILLWAY_FORWARD_ALLOW: target.origin,
  })
  const most = await mostDuring(
    Promise.all([
      answers(200, [201, 202], (n) => submit(server, target.origin, { queue: 'q', partition: `${n}` })),
      answers(200, [201, 202], (n) => push(server, [{ queue: 'm', partition: `${n % 50}`, payload: n }])),
      answers(100, [200, 204, 503], () => pop(server, 'm', { batch: 5 })),
      answers(40, [200], (n) => streamed(server, n)),
      answers(100, [200], () => get(server, '/api/v1/operations?limit=10')),
    ]),
  )
  expect(most).toBeGreaterThan(beyondPoolMax)
  expect(most).toBeLessThanOrEqual(poolMax + beyondPoolMax)
})

async function answers(count: number, allowed: number[], call: (n: number) => Promise<{ status: number }>) {
  await inBatches(count, async (n) => {
    const answer = await call(n)
    expect(allowed, JSON.stringify(answer)).toContain(answer.status)
  })
}
