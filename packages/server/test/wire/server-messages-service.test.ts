/** What operators do to messages and see of them: maintenance, a pool that is used up, keys, metrics. */
import { createHash, randomUUID } from 'node:crypto'
import { mkdtemp, rm, writeFile } from 'node:fs/promises'
import { tmpdir } from 'node:os'
import { join } from 'node:path'
import pg from 'pg'
import { afterAll, beforeAll, describe, expect, it } from 'vitest'
import { freshDatabase, type TestDatabase } from '../../../spillway/test/setup/database.js'
import {
  ack,
  ackOf,
  calm,
  configure,
  dataOf,
  drained,
  type Message,
  type MessageTables,
  openMessageTables,
  operationsOf,
  pop,
  push,
  pushed,
  take,
  takeAll,
  transaction,
} from '../message-calls.js'
import { call, endAll, get, post, type ServerProcess, sample, startServer, until } from '../server-process.js'

const keys = { own: 'key-of-its-own-queues', ops: 'key-of-an-operator', sends: 'key-of-a-sender' }
const as = (name: keyof typeof keys) => ({ authorization: `Bearer ${keys[name]}` })

let database: TestDatabase
let tables: MessageTables
let one: ServerProcess
let two: ServerProcess
let guarded: ServerProcess
let dir: string

beforeAll(async () => {
  database = await freshDatabase()
  tables = openMessageTables(database.url)
  dir = await mkdtemp(join(tmpdir(), 'spillway-messages-'))
  const named = (key: string) => `sha256:${createHash('sha256').update(key).digest('hex')}`
  await writeFile(
    join(dir, 'keys.json'),
    JSON.stringify({
      [named(keys.own)]: { identity: 'own', roles: ['submit', 'consume'], queues: ['own-*'] },
      [named(keys.sends)]: { identity: 'sends', roles: ['submit'] },
      [named(keys.ops)]: { identity: 'ops', roles: ['operate'] },
    }),
  )
  const env = { DATABASE_URL: database.url, ...calm }
  ;[one, two, guarded] = await Promise.all([
    startServer(env),
    startServer(env),
    startServer({ ...env, SPILLWAY_API_KEYS: join(dir, 'keys.json') }),
  ])
})
afterAll(async () => {
  await tables.close()
  await endAll()
  await database.drop()
  await rm(dir, { recursive: true, force: true })
})

const maintenance = '/api/v1/system/maintenance'

describe('maintenance', () => {
  it('holds pushes on every instance while pops continue, and releases them in order', async () => {
    const queue = randomUUID()
    await pushed(one, [{ queue, payload: 0 }])
    expect((await post(one, maintenance, { enabled: true })).body).toMatchObject({ maintenanceMode: true })
    try {
      const held = []
      for (const n of [1, 2, 3, 4]) held.push(await push(n % 2 === 0 ? one : two, [{ queue, payload: n }]))
      expect(held.map(({ status }) => status)).toEqual([202, 202, 202, 202])
      expect((await get(two, maintenance)).body).toEqual({ maintenanceMode: true, bufferedMessages: 4 })
      expect(dataOf(await take(two, queue, { autoAck: true, batch: 10 }))).toEqual([0])
      expect((await post(two, maintenance, { enabled: false })).body).toMatchObject({ maintenanceMode: false })
      for (const answer of held) await drained(one, answer)
    } finally {
      await post(one, maintenance, { enabled: false })
    }
    expect(dataOf(await takeAll(one, queue, 4))).toEqual([1, 2, 3, 4])
    expect((await push(one, [{ queue, payload: 5 }])).status).toBe(201)
  })

  it('outlives the process that began it', async () => {
    const queue = randomUUID()
    const short = await startServer({ DATABASE_URL: database.url, ...calm })
    await post(short, maintenance, { enabled: true })
    try {
      await short.kill()
      const held = await push(two, [{ queue, payload: 'held' }])
      expect(held.status).toBe(202)
      await post(one, maintenance, { enabled: false })
      await drained(one, held)
    } finally {
      await post(one, maintenance, { enabled: false })
    }
    expect(dataOf(await takeAll(one, queue, 1))).toEqual(['held'])
  })

  it.each([{}, { enabled: 'yes' }, { enabled: null }])('%j is refused', async (body) => {
    const answer = await post(one, maintenance, body)
    expect(answer.status).toBe(400)
    expect(answer.body.error).toEqual(expect.any(String))
  })
})

describe('a pool that is used up', () => {
  it('queues pushes, and stores them in order when it is free again', async () => {
    const own = await freshDatabase()
    const server = await startServer({
      DATABASE_URL: own.url,
      SPILLWAY_POOL_MAX: '8',
      SPILLWAY_STORE_TIMEOUT_MS: '20000',
    })
    const queue = randomUUID()
    await pushed(server, [{ queue, payload: 0 }])
    const holder = new pg.Client({ connectionString: own.url })
    await holder.connect()
    await holder.query('BEGIN; LOCK TABLE spillway.mq_dead IN ACCESS EXCLUSIVE MODE')
    const reads = Array.from({ length: 12 }, () => get(server, `/api/v1/dlq?queue=${queue}`))
    const answers = [
      await until('a push is queued', async () => {
        const answer = await push(server, [{ queue, payload: 'x' }])
        return answer.status === 202 ? answer : undefined
      }),
    ]
    for (const n of [1, 2, 3]) answers.push(await push(server, [{ queue, payload: n }]))
    expect(answers.map(({ status }) => status)).toEqual([202, 202, 202, 202])
    expect(operationsOf(answers[0] ?? never()).map(({ reason }) => reason)).toEqual(['system_busy'])
    await holder.query('ROLLBACK')
    await holder.end()
    await Promise.all(reads)
    for (const answer of answers) await drained(server, answer)
    const seen = dataOf(await take(server, queue, { batch: 100 }))
    expect(seen.slice(-4)).toEqual(['x', 1, 2, 3])
    await server.kill()
    await own.drop()
  }, 60_000)
})

describe('keys', () => {
  it('push to and pop from their queues only', async () => {
    const queue = `own-${randomUUID()}`
    const foreign = randomUUID()
    expect((await push(guarded, [{ queue, payload: 1 }], as('own'))).status).toBe(201)
    const refused = await push(
      guarded,
      [queue, foreign].map((name) => ({ queue: name, payload: 2 })),
      as('own'),
    )
    expect([refused.status, refused.body.code, typeof refused.body.error]).toEqual([403, 'forbidden', 'string'])
    expect((await get(guarded, `/api/v1/pop/queue/${foreign}`, as('own'))).status).toBe(403)
    expect((await get(guarded, '/api/v1/pop?namespace=any', as('own'))).status).toBe(403)
    expect((await get(guarded, `/api/v1/pop/queue/${queue}`, as('sends'))).status).toBe(403)
    expect((await get(guarded, `/api/v1/pop/queue/${queue}`)).status).toBe(401)
    const popped = await get(guarded, `/api/v1/pop/queue/${queue}`, as('own'))
    expect(popped.status).toBe(200)
    const extended = await post(guarded, `/api/v1/lease/${popped.body.leaseId}/extend`, { seconds: 600 }, as('own'))
    expect(extended.status, extended.text).toBe(200)
  })

  it('cannot acknowledge messages of queues that they may not use', async () => {
    const foreign = randomUUID()
    await pushed(one, [{ queue: foreign, payload: 1 }])
    const [message] = await take(one, foreign)
    if (message === undefined) return never()
    const tried = await post(guarded, '/api/v1/ack', ackOf(message), as('own'))
    expect(tried.body).toMatchObject({ success: false })
    const transacted = await post(
      guarded,
      '/api/v1/transaction',
      { operations: [{ type: 'ack', ...ackOf(message) }] },
      as('own'),
    )
    expect(transacted.body).toMatchObject({ success: false })
    const extended = await post(guarded, `/api/v1/lease/${message.leaseId}/extend`, { seconds: 3_600 }, as('own'))
    expect([extended.status, extended.body.code]).toEqual([404, 'not_found'])
    expect(await ack(one, message)).toMatchObject({ success: true })
  })

  it.each([
    ['GET', maintenance],
    ['DELETE', '/api/v1/resources/queues/own-x'],
    ['DELETE', '/api/v1/dlq?queue=own-x'],
    ['DELETE', '/api/v1/consumer-groups/g'],
  ] as const)('of consumers do not operate: %s %s', async (method, path) => {
    expect((await call(guarded, method, path, { headers: as('own') })).status).toBe(403)
    expect((await call(guarded, method, path, { headers: as('ops') })).status).toBe(200)
  })

  it('are not needed without authentication: every named user submits and consumes, none operates', async () => {
    const headers = { 'x-user-id': 'ann' }
    expect((await get(one, maintenance, headers)).status).toBe(403)
    expect((await get(one, '/api/v1/dlq', headers)).status).toBe(200)
    expect((await get(one, maintenance)).status).toBe(200)
  })
})

describe('metrics', () => {
  it('count what became of messages, where it is decided', async () => {
    const queue = randomUUID()
    await configure(one, queue, { maxSize: 3, retryDelay: 0, retryLimit: 0 })
    const scrape = async () => {
      const { text } = await get(one, '/metrics')
      const pushes = (status: string) => sample(text, 'spillway_messages_pushed_total', { status }) ?? never()
      const answered = (outcome: string) => sample(text, 'spillway_messages_answered_total', { outcome }) ?? never()
      return {
        stored: pushes('stored'),
        pending: pushes('pending'),
        duplicate: pushes('duplicate'),
        failed: pushes('failed'),
        popped: sample(text, 'spillway_messages_popped_total') ?? never(),
        done: answered('done'),
        skipped: answered('skipped'),
        lost: answered('lost'),
        unknown: answered('unknown'),
      }
    }
    const before = await scrape()
    await pushed(
      one,
      [1, 2, 3, 4].map((n) => ({ queue, payload: n, transactionId: `t${n}` })),
    )
    await pushed(one, [{ queue, payload: 1, transactionId: 't1' }])
    const [first, second] = await take(one, queue, { batch: 3 })
    if (first === undefined || second === undefined) return never()
    await ack(one, first)
    await ack(one, first)
    await ack(one, second, { status: 'failed' })
    await ack(one, { ...first, transactionId: 'nobody knows' })
    const held = await push(one, [{ queue: randomUUID(), payload: 5 }], { prefer: 'respond-async' })
    await drained(one, held)
    const after = await scrape()
    const grown = Object.fromEntries(
      Object.entries(after).map(([name, value]) => [name, value - before[name as keyof typeof before]]),
    )
    expect(grown).toEqual({
      ...{ stored: 3, pending: 1, duplicate: 1, failed: 1 },
      ...{ popped: 3, done: 1, skipped: 1, lost: 1, unknown: 1 },
    })
  })
})

function never(): never {
  throw new Error('that should be there')
}

describe('a queue that is deleted while others use it', () => {
  const waiting = async (count: number): Promise<void> => {
    await until(`${count} wait for the one who deletes`, async () => {
      const rows = await tables.query(
        `SELECT FROM pg_locks WHERE locktype = 'advisory' AND NOT granted AND database = (SELECT oid FROM pg_database WHERE datname = current_database())`,
      )
      return rows.length >= count
    })
  }

  it('is created again by a push, a transaction and a replay that waited; a pop finds nothing, or the new messages', async () => {
    const queue = randomUUID()
    await configure(one, queue, { deadLetterQueue: true })
    await pushed(one, [{ queue, payload: 'old' }])
    const [old] = await take(one, queue, { consumerGroup: 'g' })
    await ack(one, old as Message, { status: 'dlq' })
    const [letter] = (await get(one, `/api/v1/dlq?queue=${queue}`)).body.messages as { id: string }[]
    const drop = await tables.begin()
    await drop.query('SELECT mq_drop($1)', [queue])
    const asked = Promise.all([
      push(one, [{ queue, partition: 'a', payload: 'pushed' }]),
      transaction(one, [{ type: 'push', items: [{ queue, partition: 'b', payload: 'transacted' }] }]),
      pop(one, queue, { consumerGroup: 'other' }),
      post(one, `/api/v1/dlq/${letter?.id}/replay`, undefined),
      // A neighbour in the same flush.
      push(one, [{ queue: randomUUID(), payload: 1 }]),
    ])
    await waiting(4)
    await drop.query('COMMIT')
    await drop.rollback()
    const [push1, transacted, popped, replayed, neighbour] = await asked
    expect([push1.status, transacted.status, replayed.status, neighbour.status], push1.text).toEqual([
      201, 200, 200, 201,
    ])
    expect([200, 204]).toContain(popped.status)
    const found = await takeAll(one, queue, 3, { consumerGroup: 'g' })
    expect(dataOf(found).sort()).toEqual(['old', 'pushed', 'transacted'])
  })

  it('is not deleted again by one who waited, under its name', async () => {
    const queue = randomUUID()
    await configure(one, queue)
    const drop = await tables.begin()
    await drop.query('SELECT mq_drop($1)', [queue])
    const second = call(one, 'DELETE', `/api/v1/resources/queues/${queue}`)
    await waiting(1)
    // What comes behind the first one's commit, and before the second has its turn.
    await drop.query('SELECT mq_queue($1)', [queue])
    await drop.query('COMMIT')
    await drop.rollback()
    expect((await second).body).toMatchObject({ existed: false })
    expect(await tables.query('SELECT FROM mq_queues WHERE name = $1', [queue])).toHaveLength(1)
  })
})
