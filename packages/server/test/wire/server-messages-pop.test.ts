/** Messages line by line, on the wire: what is taken, and what is answered for it. */
import { randomUUID } from 'node:crypto'
import { afterAll, beforeAll, describe, expect, it } from 'vitest'
import { freshDatabase, type TestDatabase } from '../../../spillway/test/setup/database.js'
import {
  ack,
  ackBatch,
  acked,
  ackOf,
  calm,
  configure,
  dataOf,
  extend,
  type Message,
  messagesOf,
  pop,
  pushed,
  take,
  takeAll,
} from '../message-calls.js'
import { expectProblem, instantForm, uuidForm } from '../petition-calls.js'
import { endAll, type ServerProcess, startServer } from '../server-process.js'

let database: TestDatabase
let server: ServerProcess

beforeAll(async () => {
  database = await freshDatabase()
  server = await startServer({ DATABASE_URL: database.url, ...calm })
})
afterAll(async () => {
  await endAll()
  await database.drop()
})

describe('pop', () => {
  it('200: the members of an answer and of a message', async () => {
    const queue = randomUUID()
    await configure(server, queue, {}, { namespace: 'n', task: 't' })
    const traceId = randomUUID()
    const [result] = await pushed(server, [{ queue, partition: 'p', payload: { a: 1 }, transactionId: 'tx', traceId }])
    const answer = await pop(server, queue, { consumerGroup: 'g' })
    expect(answer.status).toBe(200)
    expect(answer.headers.get('content-type')).toMatch(/^application\/json/)
    expect(answer.body.success).toBe(true)
    expect(messagesOf(answer)).toEqual([
      {
        ...{ id: result?.message_id, transactionId: 'tx', traceId, queue, partition: 'p', consumerGroup: 'g' },
        ...{ partitionId: expect.stringMatching(uuidForm), leaseId: expect.stringMatching(uuidForm), data: { a: 1 } },
        ...{ createdAt: expect.stringMatching(instantForm), retryCount: 0, namespace: 'n', task: 't' },
      },
    ])
  })

  it('204 without a body: no such queue, no such partition, nothing more', async () => {
    const queue = randomUUID()
    expect([(await pop(server, queue)).status, (await pop(server, queue)).text]).toEqual([204, ''])
    await pushed(server, [{ queue, payload: 1 }])
    expect((await pop(server, queue, { partition: 'none' })).status).toBe(204)
    await take(server, queue, { autoAck: true })
    expect((await pop(server, queue)).status).toBe(204)
  })

  it('batch is the most there can be; without it one', async () => {
    const queue = randomUUID()
    await pushed(
      server,
      [0, 1, 2, 3].map((payload) => ({ queue, payload })),
    )
    const first = await take(server, queue)
    expect(dataOf(first)).toEqual([0])
    await acked(server, first)
    expect(dataOf(await take(server, queue, { batch: 2 }))).toEqual([1, 2])
  })

  it('of one partition alone', async () => {
    const queue = randomUUID()
    await pushed(
      server,
      ['a', 'b'].map((partition) => ({ queue, partition, payload: partition })),
    )
    expect(dataOf(await take(server, queue, { partition: 'b', batch: 10 }))).toEqual(['b'])
  })

  it('partitions: up to so many, and batch is their sum', async () => {
    const queue = randomUUID()
    const items = ['a', 'b', 'c'].flatMap((partition) => [0, 1].map((payload) => ({ queue, partition, payload })))
    await pushed(server, items)
    const found = await take(server, queue, { partitions: 2, batch: 100 })
    expect([found.length, new Set(found.map(({ partition }) => partition)).size]).toEqual([4, 2])
    await acked(server, found)
    expect(await take(server, queue, { partitions: 9, batch: 1 })).toHaveLength(1)
  })

  it('autoAck: settled when it is handed out, without a lease', async () => {
    const queue = randomUUID()
    await pushed(
      server,
      [0, 1].map((payload) => ({ queue, payload })),
    )
    const [first] = await take(server, queue, { autoAck: true })
    expect([first?.data, first?.leaseId]).toEqual([0, ''])
    expect(dataOf(await take(server, queue, { autoAck: true }))).toEqual([1])
    expect(await ack(server, first as Message, { leaseId: null })).toMatchObject({ success: false })
  })

  it.each(['new', 'new-only'])('subscriptionMode=%s: messages from now on', async (subscriptionMode) => {
    const queue = randomUUID()
    await pushed(server, [{ queue, payload: 'old' }])
    const group = { consumerGroup: 'g', subscriptionMode, autoAck: true, batch: 10 }
    expect(await take(server, queue, group)).toEqual([])
    await pushed(
      server,
      ['p', 'Default'].map((partition) => ({ queue, partition, payload: 'new' })),
    )
    expect(dataOf(await takeAll(server, queue, 2, group))).toEqual(['new', 'new'])
  })

  it('subscriptionMode=new on a queue that is not there yet: its first message', async () => {
    const queue = randomUUID()
    const group = { consumerGroup: 'g', subscriptionMode: 'new', autoAck: true }
    expect(await take(server, queue, group)).toEqual([])
    await pushed(server, [{ queue, payload: 'first' }])
    expect(dataOf(await take(server, queue, group))).toEqual(['first'])
  })

  it('subscriptionFrom: now, or before everything; an existing group keeps its position', async () => {
    const queue = randomUUID()
    await pushed(server, [{ queue, payload: 'old' }])
    expect(await take(server, queue, { consumerGroup: 'now', subscriptionFrom: 'now' })).toEqual([])
    const before = { consumerGroup: 'before', subscriptionFrom: '2001-01-01T00:00:00Z', batch: 5 }
    expect(dataOf(await take(server, queue, before))).toEqual(['old'])
    expect(await take(server, queue, { consumerGroup: 'now', subscriptionMode: 'all' })).toEqual([])
  })

  it('subscriptionFrom: a time that is still to come is as good as now', async () => {
    const queue = randomUUID()
    await pushed(server, [{ queue, payload: 'old' }])
    const group = { consumerGroup: 'g', subscriptionFrom: '2999-01-01T00:00:00Z', batch: 5 }
    expect(await take(server, queue, group)).toEqual([])
    await pushed(server, [{ queue, payload: 'next' }])
    expect(dataOf(await take(server, queue, group))).toEqual(['next'])
  })

  it('subscriptionFrom: the time of a message includes that message', async () => {
    const queue = randomUUID()
    for (let payload = 0; payload < 8; payload++) await pushed(server, [{ queue, payload }])
    const all = await take(server, queue, { batch: 8, consumerGroup: 'all' })
    for (const { data, createdAt } of all) {
      const from = { consumerGroup: `from ${data}`, subscriptionFrom: createdAt, batch: 8 }
      expect(dataOf(await take(server, queue, from)), createdAt).toContain(data)
    }
  })

  it('by namespace or task: from whichever queue, the one of higher priority first', async () => {
    const [namespace, low, high] = [randomUUID(), randomUUID(), randomUUID()]
    await configure(server, low, { priority: 1 }, { namespace, task: 'a' })
    await configure(server, high, { priority: 5 }, { namespace, task: 'b' })
    await pushed(
      server,
      [low, high].map((queue) => ({ queue, payload: queue })),
    )
    const ask = { namespace, autoAck: true, batch: 10 }
    expect(dataOf(await take(server, null, { ...ask, task: 'a' }))).toEqual([low])
    await pushed(server, [{ queue: low, payload: low }])
    expect(dataOf(await take(server, null, ask))).toEqual([high])
    expect(dataOf(await take(server, null, ask))).toEqual([low])
    expect((await pop(server, null, { namespace: randomUUID() })).status).toBe(204)
  })
})

describe('ack', () => {
  const one = async (): Promise<{ queue: string; message: Message }> => {
    const queue = randomUUID()
    await pushed(server, [{ queue, payload: 0 }])
    const [message] = await take(server, queue)
    if (message === undefined) throw new Error('nothing was delivered')
    return { queue, message }
  }

  it('answers what became of it, and null members are absent ones', async () => {
    const { queue, message } = await one()
    const nulls = { error: null, consumerGroup: null, leaseId: null, status: null, unknown: 1 }
    expect(await ack(server, message, nulls)).toMatchObject({
      ...{ transactionId: message.transactionId, success: true, error: null, dlq: false },
    })
    expect((await pop(server, queue)).status).toBe(204)
  })

  it('batch: one result for each, in order; a group for all', async () => {
    const queue = randomUUID()
    await pushed(
      server,
      [0, 1, 2].map((payload) => ({ queue, payload })),
    )
    const messages = await take(server, queue, { batch: 3, consumerGroup: 'g' })
    const acks = messages.map((message) => ({ ...ackOf(message), consumerGroup: undefined }))
    const [a, b, c] = acks
    const results = await ackBatch(server, [c ?? {}, { ...a, transactionId: 'nobody' }, b ?? {}], {
      consumerGroup: 'g',
    })
    expect(results.map(({ index, success }) => [index, success])).toEqual([
      [0, true],
      [1, false],
      [2, true],
    ])
    expect(results.map(({ transactionId }) => transactionId)).toEqual([c?.transactionId, 'nobody', b?.transactionId])
  })

  it('extend: a later end; of a lease that is none, 404', async () => {
    const { message } = await one()
    const plain = await extend(server, message.leaseId)
    const long = await extend(server, message.leaseId, 3_600)
    expect([plain.status, long.status, long.body.leaseId]).toEqual([200, 200, message.leaseId])
    expect(long.body.newExpiresAt).toMatch(instantForm)
    expect(Date.parse(String(long.body.newExpiresAt)) - Date.now()).toBeGreaterThan(3_500_000)
    for (const lease of [randomUUID(), 'none']) {
      const answer = await extend(server, lease)
      expectProblem(answer, 404, 'not_found')
      expect(answer.body.error).toEqual(expect.stringMatching(/./))
    }
  })
})

/** The last one: it stops the server, so that the log is complete. */
describe('the log', () => {
  it('says nothing of an answer that was sent twice', async () => {
    const queue = randomUUID()
    await pushed(server, [{ queue, payload: 1 }])
    expect([(await pop(server, queue)).status, (await pop(server, queue)).status]).toEqual([200, 204])
    await server.stop()
    const sentTwice = server.logs().filter(({ msg }) => String(msg).includes('already sent'))
    expect(sentTwice).toEqual([])
  })
})
