/** Redis is lost during many streams: each ends explicitly, and new ones are served all the while. */
import { afterAll, beforeAll, describe, expect, it, vi } from 'vitest'
import { freshDatabase, type TestDatabase } from '../../../spillway/test/setup/database.js'
import { findRedis, type RedisServer, startRedis } from '../../../spillway/test/setup/redis.js'
import { type GenerationFleet, startGenerationFleet } from '../generation-faults-fleet.js'
import { Reader } from '../generation-faults-reader.js'
import { judge } from '../generation-faults-verdict.js'
import { killed, wave } from '../generation-faults-wave.js'
import { native } from '../generation-server.js'
import { get, until } from '../server-process.js'

const found = await findRedis()
const small = { streams: 16, users: 4, tokens: 30, everyMs: 40 }

vi.setConfig({ testTimeout: 60_000, hookTimeout: 120_000 })

let database: TestDatabase
let redis: RedisServer
let fleet: GenerationFleet

async function startWith(settings: Record<string, string>): Promise<void> {
  database = await freshDatabase()
  redis = await startRedis({ settings })
  fleet = await startGenerationFleet({
    ...{ url: database.url, roles: ['gateway', 'worker', 'worker'], env: { REDIS_URL: redis.url } },
  })
}

async function stopAll(): Promise<void> {
  await fleet?.close()
  await redis?.stop()
  await database?.drop()
}

const redisIsUp = async (process: { origin: string }): Promise<boolean | undefined> =>
  (await get(process, '/health')).body.checks.redis?.ok

const allSeeRedis = (isUp: boolean) =>
  until(`all see that Redis is ${isUp ? 'there' : 'away'}`, async () => {
    const seen = await Promise.all(fleet.members.map(({ process }) => redisIsUp(process)))
    return seen.every((each) => each === isUp)
  })

const logOf = async (streamId: string | null): Promise<string | undefined> =>
  (await fleet.sql<{ log: string }>('SELECT log FROM spillway.streams WHERE id = $1', [streamId]))[0]?.log

async function one(marker: string) {
  const ask = { format: 'native', marker, user: marker, tokens: 5, everyMs: 5 } as const
  const transcript = await new Reader(fleet.origins, ask, { patienceMs: 10_000 }).over
  return {
    findings: judge([transcript], fleet.upstream.requests).findings,
    log: await logOf(transcript.streamId),
    transcript,
  }
}

describe.skipIf('missing' in found)('Redis that keeps nothing', () => {
  beforeAll(() => startWith({}))
  afterAll(stopAll)

  it('has the streams while it is available', async () => {
    await allSeeRedis(true)
    expect(await one('before')).toMatchObject({ findings: [], log: 'redis' })
  })

  it('ends its streams explicitly when it is lost, however much came before', async () => {
    const seen = await wave(fleet, { ...small, name: 'lost', happens: () => redis.kill() })
    expect(seen.findings).toEqual([])
    // A stream without content may have started again elsewhere.
    expect(seen.errors).toEqual({ stream_interrupted: seen.failed })
    expect(seen.failed).toBeGreaterThanOrEqual(seen.hit)
    expect(seen.lateMs).toBeLessThan(25_000)
  })

  it('is not needed: new streams are served at once from PostgreSQL, and health says so', async () => {
    await allSeeRedis(false)
    const { transcript, ...seen } = await one('without')
    expect(seen).toEqual({ findings: [], log: 'postgres' })
    expect(transcript.overMs - transcript.askedMs).toBeLessThan(3_000)
    expect((await get(fleet.of('gateway').process, '/health/ready')).status).toBe(200)
  })

  it('has new streams again once it is back', async () => {
    await redis.restart()
    await allSeeRedis(true)
    expect(await one('after')).toMatchObject({ findings: [], log: 'redis' })
  })

  it('that hangs costs none of the streams that have nothing in it yet', async () => {
    const [gateway] = fleet.members
    if (gateway === undefined) throw new Error('there is no gateway')
    const before = await native(gateway.process, 'hangs', 'marker=hangs tokens=2 headers=1500')
    await until('the upstream is asked', () => fleet.upstream.requests.some(({ marker }) => marker === 'hangs'))
    const begun = await native(gateway.process, 'begun', 'marker=begun tokens=500 every=20')
    await begun.seen('a token', ({ content }) => content !== '')
    expect([before.layer, await logOf(before.id)]).toEqual(['1-Direct', 'redis'])
    redis.hang()
    try {
      const after = await native(gateway.process, 'hung', 'marker=hung tokens=2')
      await Promise.all([before.whole(), after.whole(), begun.whole()])
      expect(begun.error).toMatchObject({ code: 'stream_interrupted', message: expect.stringContaining('log') })
      expect([before.content, after.content]).toEqual([' hangs#1 hangs#2', ' hung#1 hung#2'])
      expect([await logOf(before.id), await logOf(after.id)]).toEqual(['postgres', 'postgres'])
    } finally {
      redis.goOn()
    }
    await allSeeRedis(true)
  })

  it('loses nothing of a worker that is killed', async () => {
    const seen = await wave(fleet, { ...small, name: 'worker', happens: () => killed(fleet, 'worker') })
    expect(seen.findings).toEqual([])
    expect(seen.errors).toEqual({ stream_interrupted: seen.failed })
    expect(seen.failed).toBeGreaterThan(0)
  })

  it('that forgets everything in the middle of streams splices nothing', async () => {
    const seen = await wave(fleet, { ...small, name: 'forgets', happens: () => redis.restart() })
    expect(seen.findings).toEqual([])
  })
})

describe.skipIf('missing' in found)('Redis that keeps everything', () => {
  beforeAll(() => startWith({ appendonly: 'yes', appendfsync: 'always' }))
  afterAll(stopAll)

  it('that is killed and restarts repeats nothing, and leaves nothing without an end', async () => {
    const seen = await wave(fleet, { ...small, name: 'kept', happens: () => redis.restart() })
    expect(seen.findings).toEqual([])
    expect(seen.hit).toBeGreaterThan(0)
  })
})
