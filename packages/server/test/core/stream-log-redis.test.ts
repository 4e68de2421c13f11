import { randomBytes, randomUUID } from 'node:crypto'
import { Redis } from 'ioredis'
import { afterAll, afterEach, beforeAll, beforeEach, describe, expect, it } from 'vitest'
import { type Append, LogFault, type StreamKey } from '../../../spillway/src/streams/port.js'
import { startHalfOpenProxy, through } from '../../../spillway/test/half-open-proxy.js'
import { eventually, type Logged, loggingTo } from '../../../spillway/test/pipeline-fixture.js'
import { findRedis, type RedisServer, startRedis } from '../../../spillway/test/setup/redis.js'
import { streamLogConformance } from '../../../spillway/test/stream-log-conformance.js'
import { probeRedis, RedisStreams, type RedisStreamsOptions } from '../../src/brokers/redis/index.js'
import { namesFor } from '../../src/brokers/redis/names.js'

const found = await findRedis()

const retentionMs = 60_000
const longestMs = 600_000

/** A prefix of its own on a server that others may share, its logs, and a plain connection to look with. */
interface Room {
  prefix: string
  logged: Logged[]
  plain: Redis
  /** Up and subscribed, unless `wait` is false. */
  log(options?: Partial<RedisStreamsOptions> & { wait?: boolean }): Promise<RedisStreams>
  keyOf(stream: StreamKey): string
  /** So many processes hear the bell. */
  hearing(count: number): Promise<void>
  close(): Promise<void>
}

function openRoom(server: RedisServer): Room {
  const prefix = `test_${randomBytes(6).toString('hex')}`
  const names = namesFor(prefix)
  const logged: Logged[] = []
  const logs: RedisStreams[] = []
  const plain = new Redis(server.url, { lazyConnect: true, retryStrategy: () => 20 })
  // It is killed with its server, and is back with it.
  plain.on('error', () => undefined)
  const hearing = async (count: number): Promise<void> => {
    const subscribers = async () => Number((await plain.pubsub('NUMSUB', names.bell))[1])
    await eventually(async () => (await subscribers()) === count, `${count} to hear the bell`)
  }
  return {
    prefix,
    logged,
    plain,
    keyOf: ({ id }) => names.stream(id),
    hearing,
    log: async ({ wait = true, ...options } = {}) => {
      const settings = { url: server.url, prefix, retentionMs, longestMs, log: loggingTo(logged), ...options }
      const log = new RedisStreams(settings)
      logs.push(log)
      if (wait) await isUp(log)
      return log
    },
    close: async () => {
      await Promise.all(logs.map((log) => log.close()))
      plain.disconnect()
    },
  }
}

const isUp = (log: RedisStreams): Promise<unknown> => eventually(() => log.isUp, 'Redis to be up')
const isDown = (log: RedisStreams): Promise<unknown> => eventually(() => !log.isUp, 'the loss to be seen')

const newStream = (): StreamKey => ({ id: randomUUID(), bornMs: Date.now() })

const append = (key: StreamKey, first: number, given: Partial<Append> = {}): Append => {
  return { key, first, chunks: [`{"n":${first}}`], end: null, writer: 'a', ring: false, ...given }
}

/** How it failed, and after how long. */
async function failureOf(work: Promise<unknown>): Promise<{ error: unknown; ms: number }> {
  const begun = performance.now()
  try {
    await work
  } catch (error) {
    return { error, ms: performance.now() - begun }
  }
  throw new Error('it did not fail')
}

describe.skipIf('missing' in found)('on a server that runs', () => {
  let server: RedisServer
  let room: Room

  beforeAll(async () => {
    server = await startRedis()
  })
  afterAll(() => server.stop())
  beforeEach(() => {
    room = openRoom(server)
  })
  afterEach(() => room.close())

  streamLogConformance('Redis', async () => {
    const own = openRoom(server)
    const [log, other] = [await own.log(), await own.log()]
    await own.hearing(2)
    const lose = async (key: StreamKey) => void (await own.plain.del(own.keyOf(key)))
    return { log, other, open: async () => newStream(), lose, close: own.close }
  })

  it('keeps a running stream for its longest time and the retention, an ended one for the retention', async () => {
    const log = await room.log()
    const key = newStream()
    await log.append([append(key, 1), append(key, 2)])
    const running = await room.plain.pttl(room.keyOf(key))
    expect(running).toBeGreaterThan(longestMs + retentionMs - 30_000)
    expect(running).toBeLessThanOrEqual(longestMs + retentionMs)
    await log.append([append(key, 3, { end: 'done' })])
    const ended = await room.plain.pttl(room.keyOf(key))
    expect(ended).toBeGreaterThan(retentionMs - 30_000)
    expect(ended).toBeLessThanOrEqual(retentionMs)
  })

  it('shares the server with other installations', async () => {
    const [ours, theirs] = [await room.log(), await room.log({ prefix: `${room.prefix}_other` })]
    const key = newStream()
    await ours.append([append(key, 1)])
    expect(await theirs.head(key)).toEqual({ last: 0, end: null })
  })

  it('does not hear its own bell', async () => {
    const [log, other] = [await room.log(), await room.log()]
    await room.hearing(2)
    const heard: (readonly string[] | null)[] = []
    log.onBell((ids) => heard.push(ids))
    const [own, foreign] = [newStream(), newStream()]
    await log.append([append(own, 1, { ring: true })])
    await other.append([append(foreign, 1, { ring: true })])
    await eventually(() => heard.length > 0, 'the bell')
    expect(heard).toEqual([[foreign.id]])
  })

  it('has two connections, however many listen', async () => {
    const log = await room.log({ url: `${server.url}/3` })
    await room.hearing(1)
    for (let i = 0; i < 50; i++) log.onBell(() => undefined)
    const clients = String(await room.plain.client('LIST')).split('\n')
    expect(clients.filter((line) => / name=spillway(-bell)? .* db=3 /.test(line))).toHaveLength(2)
  })

  it('continues when the server has dropped the script', async () => {
    const log = await room.log()
    const key = newStream()
    await log.append([append(key, 1)])
    await room.plain.script('FLUSH')
    expect(await log.append([append(key, 2)])).toEqual(['written'])
  })

  it('has lost a stream of which the server has lost the newest record', async () => {
    const log = await room.log()
    const key = newStream()
    await log.append([append(key, 1), append(key, 2)])
    await room.plain.xdel(room.keyOf(key), '2-2')
    expect(await log.append([append(key, 3)])).toEqual(['lost'])
  })

  it('has lost a stream that another log started again', async () => {
    const [log, other] = [await room.log(), await room.log()]
    const key = newStream()
    await log.append([append(key, 1), append(key, 2), append(key, 3)])
    await room.plain.del(room.keyOf(key))
    await other.append([append(key, 1, { writer: 'b' })])
    expect(await log.append([append(key, 4)])).toEqual(['lost'])
  })

  it('loses one stream, not the others of the call, when a key holds something else', async () => {
    const log = await room.log()
    const [broken, sound] = [newStream(), newStream()]
    await room.plain.set(room.keyOf(broken), 'a text')
    expect(await log.append([append(broken, 1), append(sound, 1)])).toEqual(['lost', 'written'])
    const answers = await log.read([broken, sound].map((key) => ({ key, after: 0 })))
    expect(answers.map(({ records }) => records.length)).toEqual([0, 1])
    expect(log.isUp).toBe(true)
  })

  it('does not take a pause of this process for one of the server', async () => {
    const log = await room.log({ timeoutMs: 100 })
    // Behind an immediate come the timers that are due, and only then what has arrived.
    await new Promise((resolve) => setImmediate(resolve))
    const appending = log.append([append(newStream(), 1)])
    Atomics.wait(new Int32Array(new SharedArrayBuffer(4)), 0, 0, 300)
    expect(await appending).toEqual(['written'])
    expect(log.isUp).toBe(true)
  })

  it('shows the doctor its version and settings', async () => {
    expect(await probeRedis(server.url)).toEqual({
      ok: true,
      shown: `127.0.0.1:${server.port}`,
      server: { version: expect.stringMatching(/^\d+\.\d+/), evictsBy: null, isAppendOnly: false },
    })
  })

  it('keeps a password out of the shown address', () => {
    const wrong = () =>
      new RedisStreams({ url: 'http://:secret@host', prefix: 'p', retentionMs, longestMs, log: loggingTo([]) })
    expect(wrong).toThrow(expect.objectContaining({ message: expect.not.stringContaining('secret') }))
  })
})

describe.skipIf('missing' in found)('on a server that fails', () => {
  let server: RedisServer
  let room: Room
  const begin = async (settings: Record<string, string> = {}): Promise<void> => {
    server = await startRedis({ settings })
    room = openRoom(server)
  }

  afterEach(async () => {
    await room.close()
    await server.stop()
  })

  it('is down, refuses at once, and comes up when there is a server', async () => {
    await begin()
    await server.kill()
    const log = await room.log({ wait: false })
    const { error, ms } = await failureOf(log.append([append(newStream(), 1)]))
    expect(error).toBeInstanceOf(LogFault)
    expect(ms).toBeLessThan(500)
    await eventually(() => log.check().detail === 'it cannot be reached', 'the reason')
    expect(log.check().ok).toBe(false)
    await server.restart()
    await isUp(log)
    expect(log.check()).toEqual({ ok: true })
    expect(await log.append([append(newStream(), 1)])).toEqual(['written'])
  })

  it('is reported by the doctor when it is unreachable', async () => {
    await begin()
    await server.kill()
    expect(await probeRedis(server.url)).toMatchObject({ ok: false, why: 'ECONNREFUSED' })
  })

  it('fails open calls when Redis is killed, and reports the stream as lost when it is back', async () => {
    await begin()
    const log = await room.log()
    const key = newStream()
    let next = 1
    const writing = (async () => {
      for (;;) {
        await log.append([append(key, next)])
        next += 1
      }
    })()
    await eventually(() => next > 100, 'a hundred records')
    const failing = failureOf(writing)
    await server.kill()
    const killed = performance.now()
    expect((await failing).error).toBeInstanceOf(LogFault)
    expect(performance.now() - killed).toBeLessThan(2_500)
    expect(log.isUp).toBe(false)
    await server.restart()
    await isUp(log)
    expect(await log.append([append(key, next)])).toEqual(['lost'])
    expect(await log.head(key)).toEqual({ last: 0, end: null })
  })

  it('keeps acknowledged records over a kill when it writes a file, and has the record in doubt once', async () => {
    await begin({ appendonly: 'yes', appendfsync: 'always' })
    const log = await room.log()
    const key = newStream()
    for (let kills = 1, first = 1; kills <= 3; kills++) {
      const until = first + 50
      const writing = (async () => {
        for (; ; first++) await log.append([append(key, first)])
      })()
      const failing = failureOf(writing)
      await eventually(() => first > until, 'more records')
      await server.restart()
      expect((await failing).error).toBeInstanceOf(LogFault)
      await isUp(log)
      expect(await log.append([append(key, first)])).toEqual(['written'])
      first += 1
      expect(await log.head(key)).toEqual({ last: first - 1, end: null })
    }
  })

  it('fails open calls in time when the server is silent, and recovers when it answers', async () => {
    await begin()
    const proxy = await startHalfOpenProxy({ host: '127.0.0.1', port: server.port })
    try {
      const log = await room.log({ url: through(proxy, server.url) })
      const key = newStream()
      await log.append([append(key, 1)])
      proxy.stall()
      const { error, ms } = await failureOf(log.append([append(key, 2)]))
      expect(error).toBeInstanceOf(LogFault)
      expect(ms).toBeLessThan(2_500)
      expect(log.isUp).toBe(false)
      await proxy.pass()
      await isUp(log)
      expect(await log.append([append(key, 2)])).toEqual(['written'])
    } finally {
      await proxy.close()
    }
  })

  it('detects a silent server by itself, and reports the gap when bells arrive again', async () => {
    await begin()
    const proxy = await startHalfOpenProxy({ host: '127.0.0.1', port: server.port })
    try {
      const log = await room.log({ url: through(proxy, server.url) })
      await room.hearing(1)
      const heard: (readonly string[] | null)[] = []
      log.onBell((ids) => heard.push(ids))
      proxy.stall()
      await isDown(log)
      proxy.resumeNew()
      await eventually(() => heard.length > 0, 'the gap')
      expect(heard).toEqual([null])
    } finally {
      await proxy.close()
    }
  })

  it('reports the gap after a restart, and rings again', async () => {
    await begin()
    const [log, other] = [await room.log(), await room.log()]
    await room.hearing(2)
    const heard: (readonly string[] | null)[] = []
    other.onBell((ids) => heard.push(ids))
    await server.restart()
    await eventually(() => heard.includes(null), 'the gap')
    await isUp(log)
    const key = newStream()
    await log.append([append(key, 1, { ring: true })])
    await eventually(() => heard.some((ids) => ids?.includes(key.id)), 'the bell')
  })

  it('says once per outage that it is away', async () => {
    await begin()
    const log = await room.log()
    await room.hearing(1)
    for (let outages = 1; outages <= 2; outages++) {
      await server.kill()
      await isDown(log)
      const warned = () => room.logged.filter(({ level }) => level === 'warn')
      await eventually(() => log.check().detail === 'it cannot be reached', 'a dial that fails')
      await server.restart()
      await isUp(log)
      await room.hearing(1)
      expect(warned()).toHaveLength(outages)
    }
  })

  it('is down while it is out of memory, and up when it has some', async () => {
    await begin({ 'maxmemory-policy': 'noeviction' })
    const log = await room.log()
    const key = newStream()
    await log.append([append(key, 1)])
    await room.plain.config('SET', 'maxmemory', '1')
    const { error } = await failureOf(log.append([append(key, 2)]))
    expect(error).toBeInstanceOf(LogFault)
    expect(String(error)).toContain('out of memory')
    expect(log.isUp).toBe(false)
    expect(await log.head(key)).toEqual({ last: 1, end: null })
    await room.plain.config('SET', 'maxmemory', '0')
    await isUp(log)
    expect(await log.append([append(key, 2)])).toEqual(['written'])
  })

  it('is not up on a replica, which takes no writes', async () => {
    await begin()
    const log = await room.log()
    await room.plain.replicaof('127.0.0.1', 1)
    const { error } = await failureOf(log.append([append(newStream(), 1)]))
    expect(error).toBeInstanceOf(LogFault)
    expect(String(error)).toContain('read-only')
    expect(log.isUp).toBe(false)
    await room.plain.replicaof('NO', 'ONE')
    await isUp(log)
  })

  it('warns of a server that throws streams away, and says what to set', async () => {
    await begin({ maxmemory: '100mb', 'maxmemory-policy': 'allkeys-lru' })
    await room.log()
    expect(room.logged).toContainEqual({
      level: 'warn',
      message: expect.stringContaining('maxmemory-policy to noeviction'),
      fields: { policy: 'allkeys-lru' },
    })
  })
})
