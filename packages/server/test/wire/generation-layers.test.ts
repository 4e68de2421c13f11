/** All three layers as they are run: nginx → two gateways → two workers → an upstream, with each of the two stream logs. */
import type { ServerResponse } from 'node:http'
import { Redis } from 'ioredis'
import pg from 'pg'
import { afterAll, beforeAll, describe, expect, it } from 'vitest'
import { freshDatabase, type TestDatabase } from '../../../spillway/test/setup/database.js'
import { findNginx, type Nginx, startNginx } from '../../../spillway/test/setup/nginx.js'
import { findRedis, type RedisServer, startRedis } from '../../../spillway/test/setup/redis.js'
import { monotonicMs } from '../../../spillway/test/setup/scripted-upstream.js'
import { as, chat, native, open, resume, type SseStream } from '../generation-server.js'
import {
  type Call,
  endAll,
  get,
  runProgram,
  type ServerProcess,
  sample,
  startServer,
  startTarget,
  type Target,
  until,
} from '../server-process.js'

const soonMs = 1_000
const tokens = 4
const nginxFound = await findNginx()
const redisFound = await findRedis()

/** What breaks where bytes are cut, lines are counted, or text is escaped twice. */
const tokenOf = (marker: string, number: number) => ` ${marker}#${number} "ü\n\r🌊\u2028\\"`
const wordsOf = (marker: string, count = tokens) =>
  Array.from({ length: count }, (_, n) => tokenOf(marker, n + 1)).join('')

interface Asked {
  response: ServerResponse
  sent: number
  /** When its client was seen to have left; null while it has not, or when it was served to the end. */
  leftMs: number | null
}

/** Sends its next token only when the test asks: a token that is buffered until a later one comes is never delivered. */
class SteppedUpstream {
  readonly asked = new Map<string, Asked>()

  readonly take = ({ body }: Call, response: ServerResponse): void => {
    const marker = /script: (\S+)/.exec(JSON.parse(body).messages.at(-1).content)?.[1] ?? ''
    const asked: Asked = { response, sent: 0, leftMs: null }
    this.asked.set(marker, asked)
    response.on('close', () => {
      if (!response.writableFinished) asked.leftMs = monotonicMs()
    })
    response.writeHead(200, { 'content-type': 'text/event-stream' })
    this.#say(response, marker, { role: 'assistant', content: '' })
    this.step(marker)
  }

  step(marker: string): void {
    const asked = this.asked.get(marker)
    if (asked === undefined) throw new Error(`${marker} was not asked for`)
    const { response } = asked
    if (asked.sent < tokens) {
      this.#say(response, marker, { content: tokenOf(marker, ++asked.sent) })
      return
    }
    this.#say(response, marker, {}, 'stop')
    response.end('data: [DONE]\n\n')
  }

  leftMs(marker: string): Promise<number> {
    return until(`${marker} is left`, () => this.asked.get(marker)?.leftMs)
  }

  #say(response: ServerResponse, marker: string, delta: object, finish_reason: string | null = null): void {
    const head = { id: `chatcmpl-${marker}`, object: 'chat.completion.chunk', created: 1_700_000_000, model: 'stepped' }
    response.write(`data: ${JSON.stringify({ ...head, choices: [{ index: 0, delta, finish_reason }] })}\n\n`)
  }
}

const logs = [
  ['PostgreSQL', 'postgres'],
  ['Redis', 'redis'],
] as const

describe.skipIf('missing' in nginxFound || 'missing' in redisFound).each(logs)('the layers over %s', (_, log) => {
  const upstream = new SteppedUpstream()
  let database: TestDatabase
  let redis: RedisServer | undefined
  let model: Target
  let gateways: ServerProcess[]
  let nginx: Nginx

  beforeAll(async () => {
    database = await freshDatabase()
    redis = log === 'redis' ? await startRedis() : undefined
    model = await startTarget(upstream.take)
    const env = {
      DATABASE_URL: database.url,
      GENERATION_UPSTREAM_URL: `${model.origin}/v1`,
      CONNECTION_POOL_MAX_PER_USER: '1',
      CONNECTION_POOL_MAX_GLOBAL: '2',
      SPILLWAY_TRUSTED_PROXIES: '127.0.0.1',
      // A machine that is short of CPU must not read as a store that is busy or gone.
      SPILLWAY_ACCEPT_WAIT_BUDGET_MS: '60000',
      SPILLWAY_STORE_TIMEOUT_MS: '10000',
      ...(redis !== undefined && { REDIS_URL: redis.url }),
    }
    await runProgram({ DATABASE_URL: database.url }, { args: ['migrate'] })
    const gateway = { ...env, SPILLWAY_ROLES: 'gateway', GENERATION_CONCURRENCY: '1' }
    const worker = { ...env, SPILLWAY_ROLES: 'worker', GENERATION_CONCURRENCY: '8' }
    // Two at a time: four would share two cores, and each has only so long to start.
    const started = await Promise.all([startServer(gateway), startServer(gateway)])
    started.push(...(await Promise.all([startServer(worker), startServer(worker)])))
    // One that has not found Redis yet keeps what it takes in PostgreSQL.
    if (redis !== undefined) await Promise.all(started.map(untilRedis))
    gateways = started.slice(0, 2)
    nginx = await startNginx({ servers: gateways.map(({ origin }) => origin) })
  })

  afterAll(async () => {
    await nginx?.stop()
    await endAll()
    await model?.close()
    await redis?.stop()
    await database?.drop()
  })

  const script = (marker: string) => `${marker} `

  const untilRedis = (server: ServerProcess) =>
    until('Redis is found', async () => (await get(server, '/health')).body.checks.redis?.ok)

  /** Each token is taken before the next one is said. */
  async function readInSteps(stream: SseStream, marker: string, from = 1): Promise<SseStream> {
    for (let number = from; number <= tokens; number++) {
      await stream.seen(`token ${number} of ${marker}`, ({ content }) => content.includes(tokenOf(marker, number)))
      upstream.step(marker)
    }
    return stream.whole()
  }

  /** The two places of the pool, which are the two slots of the gateways as well: from now on all are served by workers. */
  async function holdPlaces(): Promise<SseStream[]> {
    const held: SseStream[] = []
    await until('both places are held', async () => {
      const user = `held-${held.length}`
      const stream = await native(nginx, user, script(user))
      if (stream.layer === '1-Direct') held.push(stream)
      else stream.leave()
      return held.length === 2
    })
    return held
  }

  it('a client that leaves a direct stream is gone for the upstream within 1 s', async () => {
    const stream = await chat(nginx, 'leaves-direct', script('leaves-direct'))
    await stream.seen('its token', ({ content }) => content !== '')
    expect(stream.layer).toBe('1-Direct')
    const leftMs = stream.leave()
    expect((await upstream.leftMs('leaves-direct')) - leftMs).toBeLessThan(soonMs)
  })

  describe('with the pool full', () => {
    let direct: SseStream

    beforeAll(async () => {
      direct = await until('a direct stream', async () => {
        const stream = await chat(nginx, 'direct', script('direct'))
        await readInSteps(stream, 'direct')
        return stream.layer === '1-Direct' && stream
      })
      await holdPlaces()
    })

    it('60 requests of 20 users are all served token by token, byte for byte as the direct one', async () => {
      const markers = Array.from({ length: 60 }, (_, n) => `wave-${n % 20}-${n}`)
      const reading: Promise<SseStream>[] = []
      // One of each user at a time: on a machine without CPU to spare, sixty at once would wait for connections to PostgreSQL.
      for (const from of [0, 20, 40]) {
        const some = markers.slice(from, from + 20)
        const opened = await Promise.all(some.map((marker, n) => chat(nginx, `wave-${n}`, script(marker))))
        reading.push(...opened.map((stream, n) => readInSteps(stream, some[n] ?? '')))
      }
      const streams = await Promise.all(reading)
      expect(new Set(streams.map(({ status, layer }) => `${status} ${layer}`))).toEqual(
        new Set(['200 3-Queue-Failover']),
      )
      const withoutComments = ({ raw }: SseStream) => raw.replace(/^:.*\n/gm, '')
      expect(direct.content).toBe(wordsOf('direct'))
      const expected = markers.map((marker) => withoutComments(direct).replaceAll('direct', marker))
      expect(streams.map(withoutComments)).toEqual(expected)
    })

    it('a client that leaves while a worker generates is gone for the upstream within 1 s', async () => {
      const stream = await chat(nginx, 'leaves', script('leaves'))
      await stream.seen('its token', ({ content }) => content !== '')
      expect(stream.layer).toBe('3-Queue-Failover')
      const leftMs = stream.leave()
      expect((await upstream.leftMs('leaves')) - leftMs).toBeLessThan(soonMs)
    })

    it('a client that leaves while it waits is out of the queue within 1 s', async () => {
      const before = await native(nginx, 'waits', script('waits-before'))
      await before.seen('its token', ({ content }) => content !== '')
      const waiting = await chat(nginx, 'waits', script('waits'))
      await waiting.seen('its position', ({ raw }) => /position=\d/.test(raw))
      const leftAt = Date.now()
      waiting.leave()
      const { processed_at } = await until('it is cancelled', async () => {
        const { body } = await get(nginx, `/api/v1/operations/${waiting.id}`, as('waits'))
        return body.status === 'cancelled' && body
      })
      expect(Date.parse(processed_at) - leftAt).toBeLessThan(soonMs)
      await readInSteps(before, 'waits-before')
      expect(upstream.asked.has('waits')).toBe(false)
    })

    it('a stream is resumed at the other gateway without gap or repeat', async () => {
      await until('nothing is open but what is held', async () => {
        const open = await Promise.all(gateways.map(async (each) => (await get(each, '/metrics')).text))
        return open.every((text) => sample(text, 'sse_active_connections') === 1)
      })
      const traces = ['a', 'b'].map((digit) => digit.repeat(32))
      const headers = traces.map((trace) => ({ traceparent: `00-${trace}-${'c'.repeat(16)}-01` }))
      const first = await native(nginx, 'moves', script('moves'), { headers: headers[0] ?? {} })
      await first.seen('its token', ({ content }) => content === wordsOf('moves', 1))
      upstream.step('moves')
      await first.seen('its second token', ({ content }) => content === wordsOf('moves', 2))
      const after = first.named('chunk').at(-1)?.id ?? ''
      // The first is still connected: the gateway with the fewest connections gets it.
      const second = await open(nginx, `/api/v1/streams/${first.id}`, {
        headers: { ...as('moves'), ...headers[1], 'last-event-id': after },
      })
      first.leave()
      upstream.step('moves')
      await readInSteps(second, 'moves', 3)
      expect(first.content + second.content).toBe(wordsOf('moves'))
      const events = [...first.events, ...second.events].filter(({ id }) => id !== null)
      expect(events.map(({ id }) => id)).toEqual(events.map((_, n) => String(n + 1)))
      const seen = await until('both are in the log', async () => {
        const lines = (await nginx.accesses()).filter(({ trace_id }) => traces.includes(String(trace_id)))
        return lines.length === 2 && lines
      })
      expect(new Set(seen.map(({ gateway }) => gateway)).size).toBe(2)
    })

    it('the clients of a killed gateway continue at the other one', async () => {
      const users = Array.from({ length: 8 }, (_, n) => `goes-on-${n}`)
      const streams = await Promise.all(users.map((user) => native(nginx, user, script(user))))
      await Promise.all(
        streams.map((stream, n) => stream.seen('its token', ({ content }) => content === wordsOf(users[n] ?? '', 1))),
      )
      await gateways[0]?.kill()
      for (const user of users) upstream.step(user)
      const read = await Promise.all(streams.map((stream, n) => readOn(stream, users[n] ?? '')))
      expect(read.map(({ content }) => content)).toEqual(users.map((user) => wordsOf(user)))
      expect(read.map(({ ids }) => ids)).toEqual(read.map(({ ids }) => ids.map((_, n) => String(n + 1))))
      const resumed = read.filter(({ isResumed }) => isResumed).length
      expect([resumed > 0, resumed < users.length]).toEqual([true, true])
    })

    /** From its second token on, at another gateway if its own is gone. */
    async function readOn(first: SseStream, user: string) {
      const parts = [first]
      const second = await first
        .seen('its second token', ({ content }) => content === wordsOf(user, 2))
        .then(() => first)
        .catch(async () => {
          expect(first.isOver).toBe(true)
          const last = first.named('chunk').at(-1)?.id ?? ''
          const again = await resume(nginx, user, first.id, { header: last })
          parts.push(again)
          await again.seen('its second token', ({ content }) => content === tokenOf(user, 2))
          return again
        })
      upstream.step(user)
      await readInSteps(second, user, 3)
      const ids = parts.flatMap(({ events }) => events.flatMap(({ id }) => (id === null ? [] : [id])))
      return { content: parts.map(({ content }) => content).join(''), ids, isResumed: parts.length > 1 }
    }

    it('its messages are in this log', async () => {
      const client = new pg.Client({ connectionString: database.url })
      await client.connect()
      const { rows } = await client.query('SELECT DISTINCT log FROM spillway.streams')
      await client.end()
      expect(rows).toEqual([{ log }])
    })

    if (log !== 'redis') return

    it('a worker that is faster than the mark of a stream waits for it', async () => {
      const client = new Redis(redis?.url ?? '')
      await client.client('PAUSE', 700, 'WRITE')
      client.disconnect()
      const stream = await chat(nginx, 'marked', script('marked'))
      await readInSteps(stream, 'marked')
      expect([stream.error, stream.content]).toEqual([undefined, wordsOf('marked')])
    })
  })
})
