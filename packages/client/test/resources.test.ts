/** Each resource of the client against a real server. */
import { randomUUID } from 'node:crypto'
import { afterAll, beforeAll, describe, expect, it } from 'vitest'
import { type Client, createClient, type OperationEvent, type PoppedMessage } from '../src/index.js'
import { deferred } from './deferred.js'
import { type FaultProxy, startFaultProxy } from './fault-proxy.js'
import { type RunningServer, runningServer } from './running-server.js'

let server: RunningServer
let proxy: FaultProxy
let client: Client

beforeAll(async () => {
  server = await runningServer({ SPILLWAY_RETRY_BASE_MS: '50' })
  proxy = await startFaultProxy(server.origin)
  client = createClient({ baseUrl: proxy.origin })
})
afterAll(async () => {
  await proxy?.close()
  await server?.stop()
})

const order = (queue: string, query = '') => ({
  type: 'http.request',
  queue,
  payload: { url: `${server.origin}/demo/echo${query}`, body: { hello: queue } },
})

describe('operations', () => {
  it('are waited for, and cancelled behind another', async () => {
    const first = await client.operations.submit(order('lane', '?delay_ms=700'), { respondAsync: true })
    const second = await client.operations.submit(order('lane'))
    expect(second).toMatchObject({ status: 'queued', reason: 'maintaining_order' })
    expect(await client.operations.wait(second.operationId, { timeoutMs: 50 })).toMatchObject({ status: 'pending' })
    expect(await client.operations.cancel(second.operationId)).toMatchObject({ status: 'cancelled' })
    expect(await client.operations.wait(first.operationId)).toMatchObject({ status: 'completed' })
  })

  it('whose cancel succeeded but whose response was lost are reported as cancelled', async () => {
    await client.lanes.pause({ queue: 'lost-cancel' })
    const { operationId } = await client.operations.submit(order('lost-cancel'))
    proxy.plan('/cancel', { kind: 'drop', when: 'after' })
    expect(await client.operations.cancel(operationId)).toMatchObject({ status: 'cancelled' })
  })

  it('are followed to their end, over a dropped connection', async () => {
    await client.lanes.pause({ queue: 'followed' })
    const { operationId } = await client.operations.submit(order('followed'))
    proxy.plan('/stream', { kind: 'cut', behind: '\n\n' })
    const events: OperationEvent[] = []
    for await (const event of client.operations.follow(operationId)) {
      events.push(event)
      if (events.length === 1) await client.lanes.resume({ queue: 'followed' })
    }
    const statuses = events.map((event) => (event.type === 'status' ? event.operation.status : event.type))
    expect(statuses[0]).toBe('pending')
    expect(statuses.at(-1)).toBe('completed')
    // The second connection sends the status again. The client reports it once.
    expect(statuses.filter((status) => status === 'pending')).toHaveLength(1)
  })

  it('are seen in their lanes, with the reason why they wait', async () => {
    await client.lanes.pause({ queue: 'seen' })
    const { operationId } = await client.operations.submit(order('seen'))
    expect(await client.lanes.list({ queue: 'seen' })).toMatchObject({
      items: [{ depth: 1, paused: true, head: { id: operationId }, waiting_because: 'the queue is paused' }],
      next_cursor: null,
    })
    await client.lanes.resume({ queue: 'seen' })
    expect(await client.operations.wait(operationId)).toMatchObject({ status: 'completed' })
  })

  it('that failed are dead letters, which can be redriven and purged', async () => {
    const failed = await client.operations.submit(order('dead', '?fail=400'))
    const { items } = await client.deadLetters.list({ queue: 'dead' })
    expect(items).toMatchObject([{ id: failed.operationId, payload: { payload: { body: { hello: 'dead' } } } }])
    // One letter also says which code its handler gave, and shows its last error to operators.
    const { error_stack, code, ...letter } = (await client.deadLetters.get(failed.operationId)) ?? {}
    expect(letter).toEqual(items[0])
    expect({ error_stack, code }).toEqual({
      error_stack: expect.stringContaining('the target answered 400'),
      code: 'operation_failed',
    })
    expect(await client.deadLetters.redrive({ ids: [failed.operationId] })).toMatchObject({ moved: 1, skipped: 0 })
    expect(await client.operations.wait(failed.operationId)).toMatchObject({ status: 'failed' })
    expect(await client.deadLetters.purge({ queue: 'dead' })).toEqual({ purged: 1 })
  })
})

describe('petitions', () => {
  it('are submitted, watched, listed and withdrawn', async () => {
    const submitter_id = randomUUID()
    const receipt = await client.petitions.submit({ type: 'META', text: 'Hear me', submitter_id })
    const { petition_id } = receipt
    expect(await client.petitions.get(petition_id)).toMatchObject({ text: 'Hear me', state: 'RECEIVED', version: 1 })
    const { items, total } = await client.petitions.list({ state: 'RECEIVED', limit: 10 })
    expect([items.map((each) => each.petition_id), total]).toEqual([[petition_id], 1])
    const changed = client.petitions.status(petition_id, { version: 1, waitSeconds: 20 })
    await client.petitions.withdraw(petition_id, { requester_id: submitter_id })
    expect(await changed).toMatchObject({ state: 'ACKNOWLEDGED', fate_reason: 'WITHDRAWN', version: 2 })
  })
})

describe('routing', () => {
  const task = { tenant_id: 't', task: { type: 'translate', payload: { text: 'hello' } } }

  it('decides by a policy, and finds the decision again', async () => {
    const policy = {
      policy_id: 'mine',
      tenant_id: 't',
      providers: [{ provider_id: 'p', expected_latency_ms: 5, expected_cost: 1 }],
    }
    expect(await client.routing.policies.put(policy)).toMatchObject({ policy_id: 'mine', version: 1 })
    const request_id = randomUUID()
    const answer = await client.routing.decide({ ...task, request_id, policy_id: 'mine' })
    expect(answer).toMatchObject({ ok: true, decision: { provider_id: 'p' } })
    expect(await client.routing.decision(request_id)).toMatchObject({ decision: { provider_id: 'p' } })
    const [tried] = await client.routing.policies.dryRun([{ ...task, policy_id: 'mine' }])
    expect(tried).toMatchObject({ policy_id: 'mine', decision: { provider_id: 'p' } })
    await client.routing.policies.remove('mine', { tenantId: 't' })
    await expect(client.routing.policies.get('mine', { tenantId: 't' })).rejects.toMatchObject({ status: 404 })
  })

  it('takes a message, whose ticket becomes the decision when it is polled', async () => {
    expect(await client.routing.message(task)).toMatchObject({ status: 'queued' })
    expect(await client.routing.message(task, { queuedOperationBehavior: 'poll' })).toMatchObject({ ok: true })
  })
})

describe('messages', () => {
  it('are pushed to an address, taken and answered for', async () => {
    const pushed = await client.push('orders/eu', [{ id: 1 }, { payload: 2, transactionId: 'two' }])
    expect(pushed.messages).toMatchObject([{ status: 'queued' }, { status: 'queued', transaction_id: 'two' }])
    const taken = await client.messages.pop('orders/eu', { batch: 10 })
    expect(taken.map(({ data }) => data)).toEqual([{ id: 1 }, 2])
    const acks = taken.map(({ transactionId, partitionId, leaseId }) => ({ transactionId, partitionId, leaseId }))
    expect(await client.messages.ack(acks)).toMatchObject([{ success: true }, { success: true }])
    expect(await client.messages.pop('orders/eu')).toEqual([])
  })

  it('that have to wait are reported as queued and polled until they end', async () => {
    await client.lanes.pause({ queue: 'held' })
    // Makes the lane wait: what comes behind it has to.
    const first = await client.operations.submit(order('held'))
    const items = [
      { queue: 'held', payload: 1, transactionId: 'a' },
      { queue: 'free', payload: 2 },
      { queue: 'held', payload: 3, transactionId: 'a' },
    ]
    const queued = await client.messages.pushAll(items)
    expect(queued).toMatchObject({
      ...{ status: 'queued', operationId: expect.any(String), queuePosition: 1, estimatedWait: expect.any(String) },
      messages: [{ status: 'pending' }, { status: 'queued' }, { status: 'pending' }],
    })
    const polled = client.messages.pushAll(
      items.map((item) => ({ ...item, transactionId: `${item.transactionId}2` })),
      { queuedOperationBehavior: 'poll' },
    )
    await client.lanes.resume({ queue: 'held' })
    await client.operations.wait(first.operationId)
    expect(await polled).toMatchObject({
      status: 'executed',
      messages: [{ status: 'queued' }, { status: 'queued' }, { status: 'duplicate' }],
    })
  })

  it('are moved from one queue to another in one transaction', async () => {
    await client.push('from', [{ n: 1 }])
    const [taken] = await client.messages.pop('from')
    if (taken === undefined) throw new Error('there is no message')
    const { transactionId, partitionId, leaseId } = taken
    proxy.plan('/transaction', { kind: 'drop', when: 'after' })
    const done = await client.messages.transaction([
      { type: 'ack', transactionId, partitionId, leaseId },
      { type: 'push', items: [{ queue: 'to', payload: taken.data }] },
    ])
    expect(done).toMatchObject({ success: true })
    expect(await client.messages.pop('to', { batch: 10 })).toMatchObject([{ data: { n: 1 } }])
  })
})

describe('a consumer', () => {
  const partitions = ['a', 'b', 'c']
  const settledIn = async (queue: string, group?: string): Promise<PoppedMessage[]> =>
    client.messages.pop(queue, { batch: 100, ...(group !== undefined && { group }) })

  const items = (queue: string, count: number) =>
    Array.from({ length: count }, (_, n) => ({ queue, partition: partitions[n % 3] ?? '', payload: n }))

  it('keeps the order of each partition, through failures', async () => {
    await client.messages.configure('work', { options: { retryDelay: 0, retryLimit: 5 } })
    await client.messages.pushAll(items('work', 30))
    const done: Record<string, unknown[]> = { a: [], b: [], c: [] }
    const all = deferred()
    const consumer = client.messages.consume(
      'work',
      async ({ partition, data, retryCount }) => {
        if (Number(data) % 7 === 0 && retryCount === 0) throw new Error('not yet')
        done[partition]?.push(data)
        if (Object.values(done).flat().length === 30) all.resolve()
      },
      { concurrency: 3, batch: 4 },
    )
    await all.promise
    await consumer.stop()
    for (const [i, partition] of partitions.entries()) {
      expect(done[partition]).toEqual(Array.from({ length: 10 }, (_, n) => n * 3 + i))
    }
  })

  it('works on as many partitions at once as it may', async () => {
    await client.messages.pushAll(items('broad', 6))
    const running = new Set<string>()
    const both = deferred()
    let most = 0
    const consumer = client.messages.consume(
      'broad',
      async ({ partition }) => {
        running.add(partition)
        most = Math.max(most, running.size)
        if (running.size === 2) both.resolve()
        await both.promise
        running.delete(partition)
      },
      { concurrency: 2, batch: 1 },
    )
    await both.promise
    await consumer.stop()
    expect(most).toBe(2)
  })

  it('keeps its lease while the handler works', async () => {
    await client.messages.configure('long', { options: { leaseTime: 2 } })
    await client.push('long', ['once'])
    let deliveries = 0
    const handled = deferred()
    const consumer = client.messages.consume(
      'long',
      async () => {
        deliveries++
        await new Promise((resolve) => setTimeout(resolve, 2_600))
        handled.resolve()
      },
      { renewal: { seconds: 2, firstMs: 200 } },
    )
    await handled.promise
    await consumer.stop()
    expect(deliveries).toBe(1)
    expect(await settledIn('long')).toEqual([])
  })

  it("is notified when its lease is lost, and does not acknowledge others' messages", async () => {
    await client.messages.configure('taken', { options: { leaseTime: 1 } })
    await client.push('taken', ['again'])
    const lost = deferred()
    const consumer = client.messages.consume(
      'taken',
      (_, { signal }) =>
        new Promise<void>((resolve) => signal.addEventListener('abort', () => resolve(lost.resolve()))),
      { renewal: { seconds: 60, firstMs: 1_500 }, batch: 1 },
    )
    const stopped = lost.promise.then(() => consumer.stop())
    await stopped
    expect(await client.messages.pop('taken', { waitMs: 5_000 })).toMatchObject([{ data: 'again' }])
  })

  it('finishes and acknowledges what it has when it is stopped', async () => {
    await client.push('stopped', [1, 2, 3])
    const begun = deferred()
    const finish = deferred()
    const seen: unknown[] = []
    const consumer = client.messages.consume('stopped', async ({ data }) => {
      begun.resolve()
      await finish.promise
      seen.push(data)
    })
    await begun.promise
    const stopped = consumer.stop()
    finish.resolve()
    await stopped
    expect(seen).toEqual([1, 2, 3])
    expect(await settledIn('stopped')).toEqual([])
  })

  it('continues after its connection was dropped', async () => {
    const seen = deferred<unknown>()
    proxy.plan('/pop/queue/dropped', { kind: 'drop', when: 'before' })
    const consumer = client.messages.consume('dropped', ({ data }) => seen.resolve(data))
    await client.push('dropped', ['here'])
    expect(await seen.promise).toBe('here')
    await consumer.stop()
  })

  it('answers for a message that fails with a text that is none', async () => {
    await client.messages.configure('untold', { options: { retryDelay: 0, retryLimit: 1 } })
    await client.push('untold', ['first', 'bad', 'last'])
    const seen: unknown[] = []
    const errors: unknown[] = []
    const last = deferred()
    const consumer = client.messages.consume(
      'untold',
      ({ data }) => {
        seen.push(data)
        if (data === 'last') last.resolve()
        if (data === 'bad') throw new Error('parse error at \0 and \ud800')
      },
      { onError: (error) => errors.push(error) },
    )
    await last.promise
    await consumer.stop()
    expect(errors).toEqual([])
    expect(seen.filter((data) => data !== 'bad')).toEqual(['first', 'last'])
  })

  it('says nothing misleading of an ack whose answer was lost', async () => {
    const warned: string[] = []
    const logger = { debug: () => undefined, warn: (message: string) => warned.push(message) }
    const { messages } = createClient({ baseUrl: proxy.origin, logger })
    await messages.push('lost-ack', ['one'])
    proxy.plan('/ack', { kind: 'drop', when: 'after' })
    const handled = deferred()
    const consumer = messages.consume('lost-ack', () => handled.resolve())
    await handled.promise
    await consumer.stop()
    expect(warned).toEqual([])
    expect(await settledIn('lost-ack')).toEqual([])
  })

  it('ends with an error that does not pass', async () => {
    const consumer = client.messages.consume('q', () => undefined, { batch: 5_000 })
    await expect(consumer.finished).rejects.toMatchObject({ code: 'invalid_request', status: 400 })
  })
})
