/** Messages line by line, on the wire: queues and what comes into them. */
import { randomUUID } from 'node:crypto'
import { afterAll, beforeAll, describe, expect, it } from 'vitest'
import { freshDatabase, type TestDatabase } from '../../../spillway/test/setup/database.js'
import {
  calm,
  configure,
  dataOf,
  drained,
  later,
  operationsOf,
  pauseLane,
  push,
  pushed,
  pushResults,
  resumeLane,
  take,
  takeAll,
} from '../message-calls.js'
import { expectProblem, uuidForm } from '../petition-calls.js'
import { endAll, post, type ServerProcess, startServer } from '../server-process.js'

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

const defaults = {
  ...{
    leaseTime: 300,
    retryLimit: 3,
    retryDelay: 1000,
    maxSize: 0,
    priority: 0,
    delayedProcessing: 0,
    windowBuffer: 0,
  },
  ...{ retentionSeconds: 0, completedRetentionSeconds: 0, retentionEnabled: false, maxWaitTimeSeconds: 0 },
  ...{ deadLetterQueue: false, dlqAfterMaxRetries: false, encryptionEnabled: false },
}

describe('configure', () => {
  it('makes a queue with every option at its default', async () => {
    const queue = randomUUID()
    const answer = await configure(server, queue)
    expect(answer.status).toBe(201)
    expect(answer.body).toEqual({ configured: true, queue, namespace: null, task: null, options: defaults })
  })

  it('merges: missing and null members stay unchanged', async () => {
    const queue = randomUUID()
    await configure(server, queue, { leaseTime: 7, retryLimit: 1 }, { namespace: 'n', task: 't' })
    const answer = await configure(server, queue, { retryLimit: 5, leaseTime: null }, { namespace: null })
    expect(answer.body).toMatchObject({ queue, namespace: 'n', task: 't', options: { leaseTime: 7, retryLimit: 5 } })
  })

  it('does without options, and ignores members it does not know', async () => {
    const queue = randomUUID()
    const answer = await post(server, '/api/v1/configure', { queue, options: { colour: 'red' }, more: [1] })
    expect([answer.status, answer.body.options]).toEqual([201, defaults])
    expect((await post(server, '/api/v1/configure', { queue, options: null })).status).toBe(201)
  })

  it.each([{ leaseTime: 0 }, { retryLimit: -1 }, { retryDelay: 0.5 }, { priority: 'high' }, { maxSize: -1 }])(
    'refuses %j',
    async (options) => {
      const answer = await configure(server, randomUUID(), options)
      expectProblem(answer, 400, 'invalid_request')
      expect(answer.body.error).toEqual(expect.stringMatching(/./))
      expect(answer.body.errors[0]?.path).toBe(`/options/${Object.keys(options)[0]}`)
    },
  )

  it('refuses ttl, which Queen takes and does not enforce', async () => {
    const answer = await configure(server, randomUUID(), { ttl: 3_600 })
    expectProblem(answer, 400, 'invalid_request')
    expect(answer.body.errors[0]?.path).toBe('/options/ttl')
  })

  it('refuses encryption when there is no key for it', async () => {
    const answer = await configure(server, randomUUID(), { encryptionEnabled: true })
    expectProblem(answer, 400, 'invalid_request')
    expect(answer.body.error).toEqual(expect.stringContaining('SPILLWAY_ENCRYPTION_KEY'))
  })
})

describe('push', () => {
  it('all lanes ran now: 201, an array in the order of the items', async () => {
    const queue = randomUUID()
    const answer = await push(server, [
      { queue, payload: 0, transactionId: 'given', traceId: randomUUID() },
      { queue, partition: 'other', payload: 1, unknownMember: true },
      { queue, partition: null, payload: 2, transactionId: null, traceId: null },
    ])
    expect(answer.status).toBe(201)
    expect(pushResults(answer)).toMatchObject([
      { index: 0, transaction_id: 'given', queueName: queue, status: 'queued' },
      { index: 1, queueName: queue, status: 'queued' },
      { index: 2, queueName: queue, status: 'queued' },
    ])
    for (const { message_id, transaction_id } of pushResults(answer)) {
      expect(message_id).toMatch(uuidForm)
      expect(transaction_id).toMatch(/./)
    }
    const stored = await takeAll(server, queue, 3)
    expect(stored.map(({ data, partition }) => [data, partition]).sort()).toEqual([
      [0, 'Default'],
      [1, 'other'],
      [2, 'Default'],
    ])
    const expectedIds = new Map(
      pushResults(answer).map(({ message_id, transaction_id }) => [message_id, transaction_id]),
    )
    expect(new Map(stored.map(({ id, transactionId }) => [id, transactionId]))).toEqual(expectedIds)
  })

  it('some lane has to wait: 202, the ticket of the first and a result for every item', async () => {
    const queue = randomUUID()
    await pauseLane(server, queue, 'held')
    const answer = await push(server, [
      { queue, payload: 'now' },
      { queue, partition: 'held', payload: 'waits' },
    ])
    expect(answer.status).toBe(202)
    const [operation] = operationsOf(answer)
    expect(operation).toEqual({
      ...{ queue, partition: 'held', operationId: expect.stringMatching(uuidForm) },
      ...{ queuePosition: 0, reason: 'maintaining_order' },
    })
    expect(answer.body).toMatchObject({
      ...{ status: 'queued', operationId: operation?.operationId, queuePosition: 0, reason: 'maintaining_order' },
      ...{ estimatedWaitSeconds: expect.any(Number), estimatedWait: expect.stringMatching(/^\d+s$/) },
      results: [
        { index: 0, status: 'queued', queueName: queue },
        { index: 1, status: 'pending', queueName: queue },
      ],
    })
    expect(answer.headers.get('location')).toBe(`/api/v1/operations/${operation?.operationId}`)
    await resumeLane(server, queue, 'held')
    await drained(server, answer)
    const stored = await takeAll(server, queue, 2)
    expect(stored.map(({ id }) => id).sort()).toEqual(
      pushResults(answer)
        .map((r) => r.message_id)
        .sort(),
    )
  })

  it('Prefer: respond-async and wait are honoured and confirmed', async () => {
    const queue = randomUUID()
    const asked = await push(server, [{ queue, payload: 1 }], later)
    expect([asked.status, asked.body.reason]).toEqual([202, 'requested'])
    expect(asked.headers.get('preference-applied')).toBe('respond-async')
    const waited = await push(server, [{ queue, payload: 2 }], { prefer: 'respond-async, wait=10' })
    expect(waited.status, waited.text).toBe(201)
    expect(waited.headers.get('preference-applied')).toBe('wait=10')
    expect(pushResults(waited)).toMatchObject([
      { index: 0, status: 'queued', message_id: expect.stringMatching(uuidForm) },
    ])
    expect(dataOf(await takeAll(server, queue, 2))).toEqual([1, 2])
  })

  it('a transactionId that the partition has already: duplicate, with the id of the first', async () => {
    const queue = randomUUID()
    const item = { queue, payload: 'first', transactionId: 'same' }
    const [first] = await pushed(server, [item])
    const results = await pushed(server, [
      { queue, payload: 'new' },
      { ...item, payload: 'second' },
      { ...item, partition: 'other', payload: 'elsewhere' },
      { queue, payload: 'twin', transactionId: 'twin' },
      { queue, payload: 'twin again', transactionId: 'twin' },
    ])
    expect(results.map(({ status }) => status)).toEqual(['queued', 'duplicate', 'queued', 'queued', 'duplicate'])
    expect(results[1]?.message_id).toBe(first?.message_id)
    expect(results[4]?.message_id).toBe(results[3]?.message_id)
    const seen = await takeAll(server, queue, 4)
    const own = seen.filter(({ partition }) => partition === 'Default')
    expect(dataOf(own)).toEqual(['first', 'new', 'twin'])
  })

  it('a duplicate on the queued path is one message', async () => {
    const queue = randomUUID()
    await pauseLane(server, queue)
    const item = { queue, payload: 'once', transactionId: 'same' }
    for (let n = 0; n < 2; n++) expect((await push(server, [item])).status).toBe(202)
    const last = await push(server, [{ queue, payload: 'last' }])
    await resumeLane(server, queue)
    await drained(server, last)
    expect(dataOf(await takeAll(server, queue, 2))).toEqual(['once', 'last'])
  })

  it.each([
    { payload: null },
    { payload: false },
    { payload: 0 },
    { payload: '' },
    { payload: [] },
    { payload: {} },
    { payload: 'text\u2028 \u001e \u{1f600}' },
    { payload: { a: [{ b: null }] } },
    { payload: -1.5e-300 },
    { payload: '\\u0000' },
  ])('$payload comes out as it went in, direct and queued', async ({ payload }) => {
    const queue = randomUUID()
    await pushed(server, [{ queue, payload }])
    const queued = await push(server, [{ queue, payload }], later)
    await drained(server, queued)
    expect(dataOf(await takeAll(server, queue, 2))).toEqual([payload, payload])
  })

  it('a payload as deep as may be comes out as it went in', async () => {
    const queue = randomUUID()
    const depth = 60
    const text = `${'['.repeat(depth)}1${']'.repeat(depth)}`
    const answer = await post(server, '/api/v1/push', `{"items":[{"queue":"${queue}","payload":${text}}]}`, {
      'content-type': 'application/json',
    })
    expect(answer.status, answer.text).toBe(201)
    expect(JSON.stringify(dataOf(await take(server, queue)))).toBe(`[${text}]`)
  })

  it('a queue at maxSize: items that do not fit fail with queue_full, the rest is stored', async () => {
    const queue = randomUUID()
    await configure(server, queue, { maxSize: 2 })
    await pushed(server, [{ queue, payload: 'a', transactionId: 'a' }])
    const results = await pushed(server, [
      { queue, payload: 'a', transactionId: 'a' },
      { queue, payload: 'b' },
      { queue, payload: 'c' },
    ])
    expect(results.map(({ status, code }) => code ?? status)).toEqual(['duplicate', 'queued', 'queue_full'])
    expect(results[2]).toMatchObject({ status: 'failed', error: expect.stringMatching(/./) })
    expect(dataOf(await takeAll(server, queue, 2)).sort()).toEqual(['a', 'b'])
    expect(await pushed(server, [{ queue, payload: 'd' }])).toMatchObject([{ status: 'queued' }])
  })

  it('a queue at maxSize has no room for a message that comes twice in a batch', async () => {
    const queue = randomUUID()
    await configure(server, queue, { maxSize: 1 })
    await pushed(server, [{ queue, payload: 'first' }])
    const twin = { queue, payload: 'twin', transactionId: 'twin' }
    expect((await pushed(server, [twin, twin])).map(({ code }) => code)).toEqual(['queue_full', 'queue_full'])
    expect(dataOf(await takeAll(server, queue, 1))).toEqual(['first'])
  })

  it('a queue with maxSize takes large batches at once, as others do', async () => {
    const queue = randomUUID()
    await configure(server, queue, { maxSize: 1_000_000 })
    const batch = Array.from({ length: 1_000 }, (_, n) => ({ queue, partition: `p${n % 10}`, payload: n }))
    const answers = await Promise.all([1, 2, 3, 4].map(() => push(server, batch)))
    for (const answer of answers) expect([201, 202], answer.text.slice(0, 300)).toContain(answer.status)
    expect(await takeAll(server, queue, 4_000, { batch: 1_000 })).toHaveLength(4_000)
  })
})

describe('Idempotency-Key on push', () => {
  it('same body: the same answer, marked as replayed, and stored once', async () => {
    const queue = randomUUID()
    const items = [0, 1].map((n) => ({ queue, partition: `p${n}`, payload: n }))
    const key = { 'idempotency-key': randomUUID() }
    const first = await push(server, items, key)
    const again = await push(server, items, key)
    expect([first.status, first.headers.get('idempotent-replayed')]).toEqual([201, null])
    expect([again.status, again.headers.get('idempotent-replayed')]).toEqual([201, 'true'])
    expect(pushResults(again)).toEqual(pushResults(first))
    expect(await takeAll(server, queue, 2)).toHaveLength(2)
  })

  it('a queued push is replayed with the same ids', async () => {
    const queue = randomUUID()
    const key = { 'idempotency-key': randomUUID() }
    await pauseLane(server, queue)
    const first = await push(server, [{ queue, payload: 1 }], key)
    const again = await push(server, [{ queue, payload: 1 }], key)
    expect([first.status, again.status, again.headers.get('idempotent-replayed')]).toEqual([202, 202, 'true'])
    expect(again.body.operationId).toBe(first.body.operationId)
    expect(pushResults(again)).toEqual(pushResults(first))
    await resumeLane(server, queue)
    expect((await takeAll(server, queue, 1)).map(({ id }) => id)).toEqual([pushResults(first)[0]?.message_id])
  })

  it('other body: 422, and nothing of it is stored, in whatever lanes', async () => {
    const queue = randomUUID()
    const key = { 'idempotency-key': randomUUID() }
    const item = { queue, partition: 'a', payload: 'first' }
    await push(server, [item], key)
    const others = ['b', 'c', 'd'].map((partition) => ({ queue, partition, payload: 'other' }))
    for (const items of [[{ ...item, payload: 'other' }], [item, ...others], others]) {
      const answer = await push(server, items, key)
      expectProblem(answer, 422, 'idempotency_mismatch')
      expect(answer.body.error).toEqual(expect.stringMatching(/./))
    }
    expect(dataOf(await takeAll(server, queue, 1))).toEqual(['first'])
    expect((await push(server, [item], key)).status).toBe(201)
  })
})
