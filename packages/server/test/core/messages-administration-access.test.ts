/** Traces, and who may see what of the messages. */
import { randomUUID } from 'node:crypto'
import { afterAll, beforeAll, describe, expect, it } from 'vitest'
import type { Principal, Role } from '../../src/auth/identity.js'
import { type MessagesBench, messagesBench, partitionOf } from '../messages-administration-fixture.js'

const who = (role: Role, queues?: string[]): Principal => ({
  identity: 'somebody',
  roles: new Set([role]),
  ...(queues !== undefined && { queues }),
})

let m: MessagesBench
let keyed: MessagesBench
beforeAll(async () => {
  const principals = { operator: who('operate'), consumer: who('consume', ['orders*']), submitter: who('submit') }
  ;[m, keyed] = await Promise.all([messagesBench(), messagesBench({ hasKey: false, principals })])
})
afterAll(() => Promise.all([m.close(), keyed.close()]))

const numbered = (count: number) =>
  Array.from({ length: count }, (_, n) => ({ payload: { n }, transactionId: `tx-${n}` }))
const get = (url: string) => m.call('GET', `/api/v1${url}`)
const messageUrl = (queue: string, partition: string, transactionId: string) =>
  `/messages/${partitionOf(queue, partition)}/${transactionId}`
const nowhere = { status: 404, body: { code: 'not_found', error: expect.any(String) } }

describe('traces', () => {
  const trace = (body: object) => m.call('POST', '/api/v1/traces', { body })

  it('are kept in order, with their data', async () => {
    await m.push('traced', 'p', numbered(1))
    const name = { partitionId: partitionOf('traced', 'p'), transactionId: 'tx-0' }
    expect(await trace({ ...name, data: { step: 1 }, traceNames: ['order', 'pay'], other: 1 })).toMatchObject({
      status: 201,
      body: { success: true, traceId: expect.any(String) },
    })
    await trace({ ...name, data: { step: 2 }, traceNames: 'single', eventType: 'error', consumerGroup: 'g' })
    await trace({ ...name, data: { step: 3 }, traceNames: null, eventType: null, consumerGroup: null })
    const { traces } = (await get(`/traces/${name.partitionId}/tx-0`)).body
    expect(traces).toMatchObject([
      { event_type: 'info', data: { step: 1 }, trace_names: ['order', 'pay'], consumer_group: '__QUEUE_MODE__' },
      { event_type: 'error', data: { step: 2 }, trace_names: ['single'], consumer_group: 'g' },
      { event_type: 'info', data: { step: 3 }, trace_names: [] },
    ])
  })

  it('need a message, and something to say', async () => {
    await m.push('untraced', 'p', numbered(1))
    const partitionId = partitionOf('untraced', 'p')
    expect(await trace({ partitionId, transactionId: 'none', data: {} })).toMatchObject(nowhere)
    expect(await trace({ partitionId: 'p', transactionId: 'tx-0', data: {} })).toMatchObject(nowhere)
    expect((await trace({ partitionId, transactionId: 'tx-0' })).status).toBe(400)
    expect((await trace({ partitionId, transactionId: 'tx-0', data: null })).status).toBe(400)
    expect(await get(`/traces/${partitionId}/none`)).toMatchObject(nowhere)
    expect((await get(`/traces/${partitionId}/tx-0`)).body).toEqual({ traces: [], next_cursor: null })
  })
})

describe('with authentication', () => {
  const as = (name: string) => (url: string) => keyed.call('GET', `/api/v1${url}`, { as: name })
  const consumer = as('consumer')

  beforeAll(async () => {
    await keyed.configure('orders.eu', { encryption_enabled: true })
    for (const queue of ['orders.eu', 'payroll']) {
      await keyed.push(queue, 'p', [{ payload: queue, transactionId: 't' }])
      await keyed.push(queue, 'p', numbered(1))
      await keyed.ack(await keyed.pop(queue, 'g'), 'g', 'dlq')
    }
  })

  it('consumers see their queues in lists, and no others', async () => {
    expect((await consumer('/dlq')).body).toMatchObject({ messages: [{ queue: 'orders.eu' }], total: 1 })
    expect((await consumer('/resources/queues')).body.queues).toMatchObject([{ name: 'orders.eu' }])
    expect((await consumer('/messages')).body.messages).toMatchObject([{ queue: 'orders.eu' }, { queue: 'orders.eu' }])
    expect((await consumer('/messages?status=dead_letter')).body.messages).toHaveLength(1)
    expect((await consumer('/resources/overview')).body).toMatchObject({ queues: 1, partitions: 1 })
    expect((await consumer('/status')).body).toMatchObject({ queues: [{ name: 'orders.eu' }], messages: { total: 2 } })
  })

  it('another queue looks like none', async () => {
    const seen = messageUrl('orders.eu', 'p', 't')
    const hidden = messageUrl('payroll', 'p', 't')
    expect((await consumer(seen)).status).toBe(200)
    for (const url of [
      hidden,
      hidden.replace('/messages/', '/traces/'),
      '/resources/queues/payroll',
      '/status/queues/payroll',
    ]) {
      expect(await consumer(url)).toMatchObject(nowhere)
    }
    const body = { partitionId: partitionOf('payroll', 'p'), transactionId: 't', data: {} }
    expect(await keyed.call('POST', '/api/v1/traces', { as: 'consumer', body })).toMatchObject(nowhere)
  })

  it('consumers may look, not act', async () => {
    const url = `/api/v1${messageUrl('orders.eu', 'p', 't')}`
    for (const [method, path] of [
      ['DELETE', url],
      ['POST', `${url}/retry`],
      ['POST', `${url}/dlq`],
      ['POST', `/api/v1/dlq/${randomUUID()}/replay`],
      ['DELETE', '/api/v1/resources/queues/orders.eu'],
      ['DELETE', '/api/v1/queues/orders.eu/clear'],
      ['GET', '/api/v1/consumer-groups'],
      ['DELETE', '/api/v1/consumer-groups/g'],
      ['GET', '/api/v1/system/maintenance'],
    ] as const) {
      expect((await keyed.call(method, path, { as: 'consumer' })).status, `${method} ${path}`).toBe(403)
    }
  })

  it('submitters see nothing; without authentication everybody may', async () => {
    expect((await as('submitter')('/dlq')).status).toBe(403)
    expect((await keyed.call('GET', '/api/v1/dlq')).status).toBe(401)
  })

  it('operators see all; encrypted payloads say that there is no key', async () => {
    const { messages } = (await as('operator')('/dlq')).body
    expect(messages).toMatchObject([
      { queue: 'payroll', data: 'payroll' },
      { queue: 'orders.eu', data: null },
    ])
    expect(messages[1]?.error).toEqual(expect.any(String))
    expect((await as('operator')('/consumer-groups')).body).toHaveLength(2)
  })
})
