/** Places and slots are given back, whatever becomes of the client or of the process that held them. */
import { afterAll, beforeAll, describe, expect, it, vi } from 'vitest'
import { freshDatabase, type TestDatabase } from '../../../spillway/test/setup/database.js'
import { churn } from '../generation-churn.js'
import { type GenerationFleet, leaseSeconds, marginMs, startGenerationFleet } from '../generation-faults-fleet.js'
import { Reader } from '../generation-faults-reader.js'
import { settled } from '../generation-faults-wave.js'
import { until } from '../server-process.js'

const perUser = 3
const slots = 25

vi.setConfig({ testTimeout: 60_000, hookTimeout: 120_000 })

let database: TestDatabase
let fleet: GenerationFleet

beforeAll(async () => {
  database = await freshDatabase()
  const env = { GENERATION_CONCURRENCY: String(slots), CONNECTION_POOL_MAX_PER_USER: String(perUser) }
  fleet = await startGenerationFleet({ url: database.url, roles: ['all', 'all'], env })
})

afterAll(async () => {
  await fleet?.close()
  await database?.drop()
})

function hanging(name: string, count: number, users: number): Reader[] {
  return Array.from(
    { length: count },
    (_, n) =>
      new Reader(
        fleet.origins,
        {
          ...{ format: 'openai', marker: `${name}-${n}`, user: `${name}-user-${n % users}`, tokens: 2, everyMs: 1 },
          script: 'end=hang',
        },
        { turn: n },
      ),
  )
}

const heldPlaces = async (): Promise<number> =>
  (
    await fleet.sql<{ held: number }>(
      `SELECT coalesce(sum(held), 0)::int AS held FROM spillway.connections WHERE pool = 'generation'`,
    )
  )[0]?.held ?? -1

const gauge = (name: string, value: number) =>
  until(`${name} is ${value}`, async () => (await fleet.sum(name)) === value, leaseSeconds * 1_000 + marginMs)

describe('a hundred clients that leave at once', () => {
  it('reach the upstream within a second; queued ones never start', async () => {
    const readers = hanging('leave', 100, 50)
    await Promise.all(readers.map(({ promised }) => promised))
    const { upstream } = fleet
    await until('all slots are taken', () => upstream.counts.open === 2 * slots)
    const running = new Set(upstream.requests.map(({ marker }) => marker))
    const [first, then] = [readers.filter(({ transcript }) => !running.has(transcript.ask.marker)), readers]
    for (const reader of first) reader.leave()
    const unfinished = async (): Promise<number> =>
      (await fleet.sql<{ n: number }>('SELECT count(*)::int AS n FROM spillway.ops'))[0]?.n ?? -1
    await until('none of the queue is left', async () => (await unfinished()) === 2 * slots)
    const leftMs = Math.max(...then.map((reader) => reader.leave()))
    await until('the upstream has heard of it', () => upstream.counts.open === 0)
    const heardMs = Math.max(...upstream.requests.map(({ endedMs }) => (endedMs ?? Number.POSITIVE_INFINITY) - leftMs))
    expect(heardMs).toBeLessThan(1_000)
    expect(await settled(fleet)).toEqual([])
    expect(upstream.requests).toHaveLength(2 * slots)
    await gauge('sse_active_connections', 0)
  })
})

describe('three hundred clients that read, leave and cancel while processes are killed', () => {
  it('leave nothing behind, and none has ever had more than its user may', async () => {
    const seen = await churn(fleet, { clients: 300, width: 40, users: 10, crashes: 3, seed: 7 })
    const { directAtOnce } = seen
    expect(await settled(fleet)).toEqual([])
    expect(fleet.upstream.counts.open).toBe(0)
    await gauge('sse_active_connections', 0)
    await gauge('sse_queue_depth', 0)
    expect(Math.max(...directAtOnce.values())).toBeLessThanOrEqual(perUser)
    expect(Math.min(seen.left, seen.cancelled, seen.read)).toBeGreaterThan(20)
    expect(seen.crashes).toBe(3)
  })

  it("do not change the pool's count of open permits", async () => {
    const readers = hanging('count', 7, 7)
    await Promise.all(readers.map(({ begun }) => begun))
    expect(readers.map(({ transcript }) => transcript.layer)).toEqual(readers.map(() => '1-Direct'))
    expect(await heldPlaces()).toBe(7)
    for (const reader of readers.slice(3)) reader.leave()
    await until('four are given back', async () => (await heldPlaces()) === 3)
    fleet.upstream.release()
    await until('all are given back', async () => (await heldPlaces()) === 0)
    await Promise.all(readers.map(({ over }) => over))
  })
})
