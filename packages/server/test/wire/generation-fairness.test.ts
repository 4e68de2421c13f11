/** One user with a hundred requests in the queue does not keep the others waiting. */
import { afterAll, beforeAll, expect, it, vi } from 'vitest'
import { freshDatabase, type TestDatabase } from '../../../spillway/test/setup/database.js'
import { contend } from '../generation-contention.js'
import { type GenerationFleet, startGenerationFleet } from '../generation-faults-fleet.js'

vi.setConfig({ testTimeout: 60_000, hookTimeout: 120_000 })

let database: TestDatabase
let fleet: GenerationFleet

beforeAll(async () => {
  database = await freshDatabase()
  const env = { GENERATION_CONCURRENCY: '4', QUEUE_FAILOVER_TIMEOUT_SECONDS: '120', CONNECTION_POOL_MAX_PER_USER: '4' }
  fleet = await startGenerationFleet({ url: database.url, roles: ['all'], env })
})

afterAll(async () => {
  await fleet?.close()
  await database?.drop()
})

it('twenty users with one request each are served before most of a hundred that came first', async () => {
  const seen = await contend(fleet, { greedy: 100, modest: 20, serviceMs: 100 })
  expect(seen.findings).toEqual([])
  // First come, first served would have begun nearly all of the hundred before the first of them.
  expect(seen.greedyBefore.p50).toBeLessThan(15)
  expect(seen.greedyBefore.max).toBeLessThan(30)
  expect(seen.jain).toBeGreaterThan(0.3)
})
