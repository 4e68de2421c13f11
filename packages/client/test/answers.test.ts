/** The table of the README, line by line: a real server, and faults of a proxy in front of it. */
import { randomUUID } from 'node:crypto'
import { afterAll, afterEach, beforeAll, describe, expect, it } from 'vitest'
import { type Client, type ClientOptions, createClient, type Retrying } from '../src/index.js'
import { type FaultProxy, refusal, startFaultProxy } from './fault-proxy.js'
import { type RunningServer, runningServer } from './running-server.js'

let server: RunningServer
let proxy: FaultProxy
let retries: Retrying[] = []

beforeAll(async () => {
  server = await runningServer({ PETITION_RATE_LIMIT_PER_HOUR: '1' })
  proxy = await startFaultProxy(server.origin)
})
afterAll(async () => {
  await proxy?.close()
  await server?.stop()
})
afterEach(() => {
  proxy.forget()
  retries = []
})

function client(options: Partial<ClientOptions> = {}): Client {
  const onRetry = (retrying: Retrying): void => {
    retries.push(retrying)
  }
  // Throttling is random, so it is off here. It has tests of its own.
  return createClient({ baseUrl: proxy.origin, throttle: false, hooks: { onRetry }, ...options })
}

const order = (queue: string, query = '') => ({
  type: 'http.request',
  queue,
  payload: { url: `${server.origin}/demo/echo${query}`, body: { hello: queue } },
})
const ran = async (queue: string) => (await client().operations.list({ queue })).items.length
const keys = () => proxy.seen.map(({ headers }) => headers['idempotency-key'])

describe('an answer', () => {
  it('201: is the result', async () => {
    const done = await client().operations.submit(order('ran'))
    expect(done).toMatchObject({ status: 'executed', replayed: false, result: { body: { body: { hello: 'ran' } } } })
  })

  it('201 of what failed for good: is a result, too', async () => {
    const failed = await client().operations.submit(order('failed', '?fail=400'))
    expect(failed).toMatchObject({ status: 'failed', error_message: expect.stringContaining('400') })
  })

  it('201 again for the same key: is the first one', async () => {
    const { operations } = client()
    const first = await operations.submit(order('again'), { idempotencyKey: 'k1' })
    const second = await operations.submit(order('again'), { idempotencyKey: 'k1' })
    expect(second).toMatchObject({ operationId: first.operationId, replayed: true })
  })

  it('202: is returned', async () => {
    const queued: string[] = []
    const { operations } = client({ hooks: { onQueued: ({ id }) => queued.push(id) } })
    const answer = await operations.submit(order('later'), { respondAsync: true })
    expect(answer).toMatchObject({ status: 'queued', reason: 'requested', estimatedWait: expect.any(String) })
    expect(queued).toEqual([answer.operationId])
  })

  it('202 with `poll`: is waited for', async () => {
    const { operations } = client({ queuedOperationBehavior: 'poll' })
    const answer = await operations.submit(order('polled'), { respondAsync: true })
    expect(answer).toMatchObject({ status: 'executed', result: { status: 200 } })
  })

  it('202 with `poll`, not finished before the deadline: is returned', async () => {
    const { operations } = client({ queuedOperationBehavior: 'poll' })
    const slow = { respondAsync: true, deadlineMs: 1_200 }
    expect(await operations.submit(order('long', '?delay_ms=20000'), slow)).toMatchObject({ status: 'queued' })
  })

  it('204: is empty', async () => {
    expect(await client().messages.pop('nothing-here')).toEqual([])
  })

  it('304: is null', async () => {
    const { petitions } = client({ identity: randomUUID() })
    const { petition_id } = await petitions.submit({ type: 'GENERAL', text: 'wait' })
    expect(await petitions.status(petition_id, { version: 1, waitSeconds: 0.05 })).toBeNull()
  })

  it('200 of a stranger: is thrown as `unexpected`', async () => {
    proxy.plan('/operations', { kind: 'answer', status: 200, body: '<html>' })
    await expect(client().operations.list()).rejects.toMatchObject({ code: 'unexpected', status: 200 })
    expect(proxy.seen).toHaveLength(1)
  })

  const id = '01890a5d-ac96-774b-bcce-b302099a8057'
  const task = { tenant_id: 't', task: { type: 'x', payload: {} } }
  it.each<[string, (from: Client) => Promise<unknown>]>([
    ['submit', ({ operations }) => operations.submit(order('stranger'))],
    ['operation', ({ operations }) => operations.get(id)],
    ['wait', ({ operations }) => operations.wait(id, { timeoutMs: 1_000 })],
    ['push', ({ push }) => push('stranger', [1])],
    ['pop', ({ messages }) => messages.pop('stranger')],
    ['ack', ({ messages }) => messages.ack({ transactionId: 't', partitionId: id })],
    ['petition', ({ petitions }) => petitions.submit({ type: 'GENERAL', text: 'x' })],
    ['decide', ({ routing }) => routing.decide(task)],
    ['dry run', ({ routing }) => routing.policies.dryRun([task])],
    ['generate', (from) => from.generate({ query: 'q', model: 'm' }).text()],
  ])('200 of a stranger to a %s, empty or other JSON: is thrown as `unexpected`', async (_, ask) => {
    for (const body of ['', '{"hello":"portal"}']) {
      proxy.plan('/api', { kind: 'answer', status: 200, body })
      await expect(ask(client())).rejects.toMatchObject({ name: 'SpillwayError', code: 'unexpected', status: 200 })
    }
    expect(proxy.seen).toHaveLength(2)
  })

  it.each([301, 302, 307])('%i of a proxy: is thrown, and nothing is taken for the answer', async (status) => {
    const headers = { location: `${server.origin}/api/v1/operations` }
    proxy.plan('/operations', { kind: 'answer', status, headers, body: '' })
    const sent = client().operations.submit(order('redirected'))
    await expect(sent).rejects.toMatchObject({ code: 'unexpected', status, retryable: false, attempts: 1 })
    expect(await ran('redirected')).toBe(0)
  })
})

describe('a refusal', () => {
  it('429: is waited out, as long as it says', async () => {
    proxy.plan('/operations', refusal(429, '1', 'system_overloaded'))
    const began = performance.now()
    expect(await client().operations.submit(order('busy'))).toMatchObject({ status: 'executed' })
    expect(performance.now() - began).toBeGreaterThanOrEqual(999)
    expect(retries).toMatchObject([{ error: { code: 'system_overloaded', status: 429, retryAfterMs: 1_000 } }])
  })

  it('429 with a date: is waited out until then', async () => {
    const soon = new Date(Date.now() + 1_000)
    proxy.plan('/operations', refusal(429, soon.toUTCString(), 'system_overloaded'))
    await client().operations.submit(order('dated'))
    expect(retries[0]?.error.retryAfterMs).toBeLessThanOrEqual(1_000)
    expect(Date.now()).toBeGreaterThanOrEqual(Math.floor(soon.getTime() / 1_000) * 1_000 - 1)
  })

  it('503: is waited out', async () => {
    proxy.plan('/operations', refusal(503, '0'), refusal(503, '0'))
    expect(await client().operations.submit(order('overloaded'))).toMatchObject({ status: 'executed' })
    expect(proxy.seen).toHaveLength(3)
  })

  it('503 of a proxy, without a problem: is waited out', async () => {
    proxy.plan('/pop/', { kind: 'answer', status: 503, headers: { 'retry-after': '0' }, body: 'busy' })
    expect(await client().messages.pop('nothing-here', { autoAck: true })).toEqual([])
  })

  it('429 that asks for more than 30 s: is thrown at once', async () => {
    const { petitions } = client({ identity: randomUUID() })
    await petitions.submit({ type: 'GENERAL', text: 'one' })
    const second = petitions.submit({ type: 'GENERAL', text: 'two' })
    await expect(second).rejects.toMatchObject({ code: 'rate_limited', status: 429, attempts: 1, retryable: true })
    expect(retries).toEqual([])
  })

  it('503 of a server that stops: goes to the next base URL at once', async () => {
    proxy.plan('/operations', refusal(503, '5', 'draining'))
    const { operations } = client({ baseUrls: [proxy.origin, server.origin] })
    expect(await operations.submit(order('moved'))).toMatchObject({ status: 'executed' })
    expect(retries).toMatchObject([{ delayMs: 0, error: { code: 'draining', retryAfterMs: 5_000 } }])
    expect(proxy.seen).toHaveLength(1)
  })
})

describe('an error', () => {
  const unknown = '01890a5d-ac96-774b-bcce-b302099a8057'

  it('400: is thrown, with what is wrong', async () => {
    const sent = client().operations.submit({ type: 'http.request', queue: '', payload: {} })
    await expect(sent).rejects.toMatchObject({
      ...{ code: 'invalid_request', status: 400, retryable: false, attempts: 1 },
      problem: { errors: expect.any(Array) },
    })
  })

  it('403: is thrown', async () => {
    const payload = { url: 'http://elsewhere.example/' }
    const sent = client().operations.submit({ type: 'http.request', queue: 'q', payload })
    await expect(sent).rejects.toMatchObject({ code: 'target_not_allowed', status: 403, attempts: 1 })
  })

  it('404: is thrown', async () => {
    const read = client().operations.get(unknown)
    await expect(read).rejects.toMatchObject({ code: 'not_found', status: 404, retryAfterMs: null, attempts: 1 })
  })

  it('409: is thrown', async () => {
    const { operationId } = await client().operations.submit(order('finished'))
    const again = client().operations.cancel(operationId)
    await expect(again).rejects.toMatchObject({ code: 'operation_finished', status: 409, attempts: 1 })
  })

  it('422: is thrown', async () => {
    const { operations } = client()
    await operations.submit(order('mine'), { idempotencyKey: 'k2' })
    const other = operations.submit(order('other'), { idempotencyKey: 'k2' })
    await expect(other).rejects.toMatchObject({ code: 'idempotency_mismatch', status: 422, attempts: 1 })
  })

  it('500: retried where that is safe', async () => {
    proxy.plan('/operations', { kind: 'answer', status: 500, body: '{}' })
    expect(await client().operations.submit(order('fault'))).toMatchObject({ status: 'executed' })
    proxy.plan('/pop/', { kind: 'answer', status: 500, body: '{}' })
    await expect(client().messages.pop('q', { autoAck: true })).rejects.toMatchObject({ status: 500, attempts: 1 })
  })

  it.each([502, 504])('%i of a proxy: retried where that is safe', async (status) => {
    proxy.plan('/operations', { kind: 'answer', status, body: '<html>' })
    expect(await client().operations.submit(order('gateway'))).toMatchObject({ status: 'executed' })
    expect(proxy.seen).toHaveLength(2)
  })
})

describe('no answer', () => {
  it('to a submit that was dropped before the server saw it: it is sent again', async () => {
    proxy.plan('/operations', { kind: 'drop', when: 'before' })
    expect(await client().operations.submit(order('unseen'))).toMatchObject({ status: 'executed', replayed: false })
    expect(await ran('unseen')).toBe(1)
  })

  it('to a submit that was done: it is sent again with its key, and done once', async () => {
    proxy.plan('/operations', { kind: 'drop', when: 'after' })
    expect(await client().operations.submit(order('done'))).toMatchObject({ status: 'executed', replayed: true })
    expect(new Set(keys()).size).toBe(1)
    expect(await ran('done')).toBe(1)
  })

  it('to the end (a truncated body): it is sent again', async () => {
    proxy.plan('/operations', { kind: 'truncate' })
    expect(await client().operations.submit(order('half'))).toMatchObject({ status: 'executed', replayed: true })
    expect(await ran('half')).toBe(1)
  })

  it('in time (a half-open connection): it is sent again', async () => {
    proxy.plan('/operations', { kind: 'silence' })
    const { operations } = client({ attemptTimeoutMs: 300 })
    expect(await operations.submit(order('silent'))).toMatchObject({ status: 'executed' })
    expect(retries[0]).toMatchObject({ error: { code: 'unreachable', status: null } })
  })

  it('yet, as the first one with its key is still at work (409): that one is waited for', async () => {
    const { operations } = client()
    const slow = order('slow', '?delay_ms=1500')
    const first = operations.submit(slow, { idempotencyKey: 'k3' })
    while ((await operations.list({ queue: 'slow' })).items.length === 0);
    expect(await operations.submit(slow, { idempotencyKey: 'k3' })).toMatchObject({
      status: 'executed',
      replayed: true,
    })
    expect(retries[0]?.error).toMatchObject({ code: 'idempotency_in_progress', status: 409 })
    expect(await first).toMatchObject({ replayed: false })
  })

  it('within the deadline: the last error is thrown, and the server is left alone', async () => {
    proxy.plan('/operations', { kind: 'slow', ms: 5_000 })
    const began = performance.now()
    const read = client().operations.list({}, { deadlineMs: 400 })
    await expect(read).rejects.toMatchObject({ code: 'unreachable', attempts: 1 })
    expect(performance.now() - began).toBeLessThan(4_500)
  })

  it('to an ack: it is sent again, and moves nothing twice', async () => {
    const { messages } = client()
    await messages.push('acked', [{ n: 1 }, { n: 2 }])
    const [first] = await messages.pop('acked')
    if (first === undefined) throw new Error('there is no message')
    proxy.plan('/ack', { kind: 'drop', when: 'after' })
    expect(await messages.ack(first)).toMatchObject([{ success: false, isUnknown: true }])
    expect(await messages.ack(first)).toMatchObject([{ success: false, isUnknown: false }])
    expect(await messages.pop('acked')).toMatchObject([{ data: { n: 2 } }])
  })

  it('to a pop with autoAck: it is thrown, and the next messages stay', async () => {
    const { messages } = client()
    await messages.push('auto', [{ n: 1 }, { n: 2 }])
    proxy.plan('/pop/', { kind: 'drop', when: 'after' })
    await expect(messages.pop('auto', { autoAck: true })).rejects.toMatchObject({ code: 'unreachable', attempts: 1 })
    expect(await messages.pop('auto', { autoAck: true })).toMatchObject([{ data: { n: 2 } }])
  })

  it('to a pop under a lease: it is sent again, and lost messages return with their lease', async () => {
    const { messages } = client()
    await messages.configure('leased', { options: { leaseTime: 1 } })
    await messages.push('leased', [{ n: 1 }])
    proxy.plan('/pop/', { kind: 'drop', when: 'after' })
    expect(await messages.pop('leased', { waitMs: 10_000 })).toMatchObject([{ data: { n: 1 }, retryCount: 1 }])
  })

  it('of the first base URL: the next one answers', async () => {
    const { operations } = client({ baseUrls: ['http://127.0.0.1:1', server.origin] })
    expect(await operations.submit(order('failover'))).toMatchObject({ status: 'executed' })
    expect(retries).toMatchObject([{ delayMs: 0, error: { code: 'unreachable' } }])
  })

  it('once the signal is aborted: its reason is thrown', async () => {
    proxy.plan('/operations', { kind: 'silence' })
    const left = new AbortController()
    const read = client().operations.list({}, { signal: left.signal })
    left.abort(new Error('enough'))
    await expect(read).rejects.toThrow('enough')
  })
})

describe('mostly refusals', () => {
  it('delay requests, and a request that is delayed for too long is `throttled`', async () => {
    proxy.plan('/operations', ...new Array(50).fill(refusal(503, '0')))
    const { operations } = client({ throttle: {}, retry: { attempts: 1 } })
    await expect(operations.list()).rejects.toMatchObject({ code: 'overloaded' })
    const codes: unknown[] = []
    for (let i = 0; i < 40 && !codes.includes('throttled'); i++) {
      // Too short for a pause: it is sent now, or not at all.
      await operations.list({}, { deadlineMs: 49 }).catch(({ code }) => codes.push(code))
    }
    expect(codes).toContain('throttled')
    expect(proxy.seen.length).toBeLessThanOrEqual(codes.length)
  })
})
