import { afterAll, beforeAll, describe, expect, it } from 'vitest'
import { type Client, createClient } from '../src/index.js'
import { runningServer } from './running-server.js'

let server: Awaited<ReturnType<typeof runningServer>>
let client: Client

beforeAll(async () => {
  server = await runningServer()
  client = createClient({ baseUrl: server.origin })
})
afterAll(() => server?.stop())

const order = (queue: string, query = '') => ({
  type: 'http.request',
  queue,
  payload: { url: `${server.origin}/demo/echo${query}`, body: { hello: queue } },
})

describe('against a real server', () => {
  it('gets the result of what ran at once', async () => {
    const done = await client.operations.submit(order('a'))
    expect(done).toMatchObject({
      status: 'executed',
      replayed: false,
      result: { status: 200, body: { body: { hello: 'a' } } },
    })
    expect(await client.operations.get(done.operationId)).toMatchObject({ id: done.operationId, status: 'completed' })
  })

  it('gets the same answer again for the same key', async () => {
    const first = await client.operations.submit(order('b'), { idempotencyKey: 'k1' })
    const again = await client.operations.submit(order('b'), { idempotencyKey: 'k1' })
    expect(again).toMatchObject({ operationId: first.operationId, replayed: true })
    await expect(client.operations.submit(order('x'), { idempotencyKey: 'k1' })).rejects.toMatchObject({
      code: 'idempotency_mismatch',
      status: 422,
    })
  })

  it('takes a 202 as a result, waits for it and cancels one behind it', async () => {
    const first = await client.operations.submit(order('c', '?delay_ms=1500'), { respondAsync: true })
    expect(first).toMatchObject({ status: 'queued', reason: 'requested', queuePosition: 0 })
    const second = await client.operations.submit(order('c'))
    expect(second).toMatchObject({ status: 'queued', reason: 'maintaining_order' })
    expect(await client.operations.wait(second.operationId, { timeoutMs: 50 })).toMatchObject({ status: 'pending' })
    expect(await client.operations.cancel(second.operationId)).toMatchObject({ status: 'cancelled' })
    expect(await client.operations.wait(first.operationId)).toMatchObject({
      status: 'completed',
      result: { status: 200 },
    })
  })

  it('waits for a queued one where it is submitted', async () => {
    expect(await client.operations.submit(order('d'), { respondAsync: true, waitSeconds: 20 })).toMatchObject({
      status: 'executed',
    })
  })

  it('tells what failed for good', async () => {
    expect(await client.operations.submit(order('e', '?fail=400'))).toMatchObject({
      status: 'failed',
      error_message: expect.stringContaining('400'),
      result: { status: 400 },
    })
  })

  it('throws what was refused, with its code', async () => {
    await expect(client.operations.submit({ type: 'http.request', queue: '', payload: {} })).rejects.toMatchObject({
      code: 'invalid_request',
      status: 400,
      problem: { errors: expect.any(Array) },
    })
    await expect(client.operations.get('01890a5d-ac96-774b-bcce-b302099a8057')).rejects.toMatchObject({
      code: 'not_found',
      status: 404,
      retryAfterMs: null,
    })
  })
})
