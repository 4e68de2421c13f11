/**
 * A program written for Queen MQ: this client sends what its public JavaScript client sends and reads of the answers what
 * that reads, and nothing else. It knows neither our members nor our statuses.
 */
import { randomUUID } from 'node:crypto'
import { afterAll, beforeAll, describe, expect, it } from 'vitest'
import { pauseLane, resumeLane } from '../message-calls.js'
import { type Fleet, startFleet } from '../petitions-fleet.js'
import { until } from '../server-process.js'

type Members = Record<string, unknown>
/** What programs take out of a message. */
interface QueenMessage {
  id: string
  transactionId: string
  partitionId: string
  partition: string
  leaseId: string
  consumerGroup: string
  data: unknown
  createdAt: string
}
interface Result extends Members {
  success: boolean
  error?: string
}
interface Place {
  queue?: string
  partition?: string
  group?: string
  namespace?: string
  task?: string
  batch?: number
  wait?: boolean
  timeoutMillis?: number
  subscriptionMode?: string
}
interface Consuming extends Place {
  /** Ends after so many messages. */
  limit: number
  each?: boolean
  renewLeaseMillis?: number
}

/** What is sent with every new queue, whether it was asked for or not. */
const queueDefaults = {
  ...{ leaseTime: 300, retryLimit: 3, priority: 0, delayedProcessing: 0, windowBuffer: 0, maxSize: 10_000 },
  ...{ retentionSeconds: 0, completedRetentionSeconds: 0, encryptionEnabled: false },
}

class QueenClient {
  readonly #origin: () => string
  renewals = 0

  constructor(origin: () => string) {
    this.#origin = origin
  }

  async request(method: string, path: string, body?: unknown): Promise<Members | null> {
    const answer = await fetch(`${this.#origin()}/api/v1${path}`, {
      method,
      // Also where there is no body.
      headers: { 'Content-Type': 'application/json' },
      ...(body ? { body: JSON.stringify(body) } : {}),
    })
    if (answer.status === 204) return null
    const text = await answer.text()
    if (!answer.ok) {
      const { error } = parsed(text) ?? {}
      throw Object.assign(new Error((error as string) ?? `HTTP ${answer.status}: ${text}`), { status: answer.status })
    }
    expect(answer.headers.get('content-type')).toContain('application/json')
    return parsed(text)
  }

  async create(queue: string, config: Members = {}, more: Members = {}): Promise<Members> {
    const options = { ...queueDefaults, ...config }
    const result = await this.request('POST', '/configure', { queue, namespace: null, task: null, options, ...more })
    if (result?.error) throw new Error(result.error as string)
    return result ?? {}
  }

  async push(queue: string, payloads: readonly unknown[], partition = 'Default', transactionIds: string[] = []) {
    const items = payloads.map((payload, i) => ({
      ...{ queue, partition, payload },
      transactionId: transactionIds[i] ?? randomUUID(),
    }))
    const results = await this.request('POST', '/push', { items })
    if (!Array.isArray(results)) {
      if (results?.error) throw new Error(results.error as string)
      return []
    }
    const failed = results.find(({ status }: Members) => status === 'failed')
    if (failed !== undefined) throw new Error(failed.error || 'Push failed')
    return results as { status: string }[]
  }

  /** Names are not encoded; the partition "Default" is not named. */
  async pop({ queue, partition, group, batch = 1, wait = true, timeoutMillis = 30_000, ...rest }: Place) {
    const at = partition !== undefined && partition !== 'Default' ? `/partition/${partition}` : ''
    const pairs = { batch, wait, timeout: timeoutMillis, ...(group !== undefined && { consumerGroup: group }), ...rest }
    const texts = Object.entries(pairs).map(([name, value]): [string, string] => [name, String(value)])
    const query = new URLSearchParams(texts)
    const answer = await this.request('GET', `/pop${queue === undefined ? '' : `/queue/${queue}`}${at}?${query}`)
    return ((answer?.messages ?? []) as (QueenMessage | null)[]).filter((message) => message !== null)
  }

  async ack(message: QueenMessage | QueenMessage[], status: boolean | string, group?: string): Promise<Result> {
    const ackStatus = typeof status === 'string' ? status : status ? 'completed' : 'failed'
    const of = ({ transactionId, partitionId, leaseId }: QueenMessage) => ({
      ...{ transactionId, partitionId, status: ackStatus, error: null },
      ...(leaseId && { leaseId }),
    })
    const consumerGroup = group ?? null
    try {
      const answer = Array.isArray(message)
        ? await this.request('POST', '/ack/batch', { acknowledgments: message.map(of), consumerGroup })
        : await this.request('POST', '/ack', { ...of(message), consumerGroup })
      if (answer?.error) return { success: false, error: answer.error as string }
      return { success: true, ...answer }
    } catch (error) {
      return { success: false, error: (error as Error).message }
    }
  }

  async renew({ leaseId }: QueenMessage): Promise<{ leaseId: string; success: boolean; newExpiresAt?: unknown }> {
    try {
      const answer = await this.request('POST', `/lease/${leaseId}/extend`, {})
      this.renewals++
      return { leaseId, success: true, newExpiresAt: answer?.leaseId ? answer.newExpiresAt : answer?.lease_expires_at }
    } catch {
      return { leaseId, success: false }
    }
  }

  async transaction(operations: readonly Members[], leases: readonly string[]): Promise<Members> {
    const result = await this.request('POST', '/transaction', { operations, requiredLeases: [...new Set(leases)] })
    if (!result?.success) throw new Error((result?.error as string) || 'Transaction failed')
    return result
  }

  async dlq(queue: string, consumerGroup?: string): Promise<{ messages: Members[]; total: number }> {
    const query = new URLSearchParams({ queue, limit: '100', offset: '0', ...(consumerGroup && { consumerGroup }) })
    return (await this.request('GET', `/dlq?${query}`)) as { messages: Members[]; total: number }
  }

  /** Pops, hands over and answers, until so many were handed over. */
  async consume(how: Consuming, handle: (messages: QueenMessage[]) => unknown): Promise<void> {
    const { limit, each = false, renewLeaseMillis, ...place } = how
    for (let handled = 0; handled < limit; ) {
      const messages = await this.pop(place)
      handled += messages.length
      const renewing =
        renewLeaseMillis === undefined
          ? undefined
          : setInterval(() => void Promise.all(messages.map((message) => this.renew(message))), renewLeaseMillis)
      try {
        for (const some of each ? messages.map((message) => [message]) : [messages]) {
          if (some.length === 0) continue
          const isFine = await (async () => handle(some))().then(
            () => true,
            () => false,
          )
          const [first] = some
          await this.ack(each && first !== undefined ? first : some, isFine, place.group)
        }
      } finally {
        clearInterval(renewing)
      }
    }
  }
}

const parsed = (text: string): Members | null => {
  try {
    return JSON.parse(text) as Members
  } catch {
    return null
  }
}

let fleet: Fleet
let queen: QueenClient
let shiftSeconds = 0

beforeAll(async () => {
  fleet = await startFleet({ instances: 2 })
  // As behind a load balancer.
  queen = new QueenClient(() => fleet.next().origin)
})
afterAll(() => fleet.close())

const forward = async (seconds: number) => {
  shiftSeconds += seconds
  await fleet.sql(`CREATE OR REPLACE FUNCTION spillway.clock() RETURNS timestamptz LANGUAGE sql VOLATILE AS
    $$ SELECT clock_timestamp() + interval '${shiftSeconds} seconds' $$`)
}
const dataOf = (messages: readonly QueenMessage[]) => messages.map(({ data }) => data)
const one = (messages: readonly QueenMessage[]): QueenMessage => {
  const [message] = messages
  if (message === undefined || messages.length > 1) throw new Error(`there are ${messages.length}`)
  return message
}

it('a queue, from its making to an empty one', async () => {
  const queue = `orders.${randomUUID()}`
  expect((await queen.create(queue)).configured).toBe(true)
  const results = await queen.push(queue, [{ id: 1 }, { id: 2 }, null])
  expect(results.map(({ status }) => status)).toEqual(['queued', 'queued', 'queued'])
  const messages = await queen.pop({ queue, batch: 10, timeoutMillis: 1_000 })
  expect(messages).toMatchObject([
    { data: { id: 1 }, partition: 'Default', consumerGroup: '__QUEUE_MODE__' },
    { data: { id: 2 } },
    { data: null },
  ])
  for (const { createdAt } of messages) expect(Number.isNaN(Date.parse(createdAt))).toBe(false)
  expect(new Set(messages.map(({ leaseId }) => leaseId)).size).toBe(1)
  const acked = await queen.ack(messages, true)
  expect(acked).toMatchObject({ success: true, 0: { success: true }, 1: { success: true }, 2: { success: true } })
  expect(await queen.pop({ queue, wait: false })).toEqual([])
})

describe('push', () => {
  it('a duplicate is reported at its position and does not throw', async () => {
    const queue = randomUUID()
    await queen.push(queue, ['a'], 'p', ['same'])
    const results = await queen.push(queue, ['b', 'a'], 'p', ['other', 'same'])
    expect(results.map(({ status }) => status)).toEqual(['queued', 'duplicate'])
  })

  it('an invalid value throws, with the reason', async () => {
    const queue = randomUUID()
    await queen.create(queue, { maxSize: 1 })
    await expect(queen.push(queue, ['a', 'b'])).rejects.toThrow(/maxSize/)
  })

  it('having to wait is no error', async () => {
    const queue = randomUUID()
    await pauseLane(fleet.next(), queue)
    await expect(queen.push(queue, ['a', 'b'])).resolves.toEqual([])
    await resumeLane(fleet.next(), queue)
    const first = one(await queen.pop({ queue, timeoutMillis: 10_000 }))
    expect(first.data).toBe('a')
  })

  it.each([
    { why: 'no items', body: { items: [] } },
    { why: 'no queue', body: { items: [{ payload: 1 }] } },
    { why: 'a transactionId that is none', body: { items: [{ queue: 'q', payload: 1, transactionId: 5 }] } },
  ])('$why: an error whose message can be read', async ({ body }) => {
    const fault = await queen.request('POST', '/push', body).catch((error: unknown) => error)
    expect(fault).toMatchObject({ status: 400, message: expect.stringMatching(/^(?!HTTP )\w+/) })
  })
})

describe('pop', () => {
  it('"Default" is any partition, a named one is that one, and its name is not encoded', async () => {
    const queue = `with space ${randomUUID()}`
    await queen.push(queue, ['named'], 'für ümläüt & ☂')
    const message = one(await queen.pop({ queue, partition: 'Default', timeoutMillis: 5_000 }))
    expect([message.data, message.partition]).toEqual(['named', 'für ümläüt & ☂'])
    await queen.ack(message, true)
    await queen.push(queue, ['again'], 'für ümläüt & ☂')
    const same = await queen.pop({ queue, partition: 'für ümläüt & ☂', timeoutMillis: 5_000 })
    expect(dataOf(same)).toEqual(['again'])
  })

  it('by namespace and task', async () => {
    const [queue, namespace, task] = [randomUUID(), randomUUID(), randomUUID()]
    await queen.create(queue, {}, { namespace, task })
    await queen.push(queue, ['found'])
    expect(dataOf(await queen.pop({ namespace, task, timeoutMillis: 5_000 }))).toEqual(['found'])
  })

  it('waits for later pushes, and ends empty without one', async () => {
    const queue = randomUUID()
    expect(await queen.pop({ queue, timeoutMillis: 50 })).toEqual([])
    const waiting = queen.pop({ queue, timeoutMillis: 20_000 })
    await queen.push(queue, ['late'])
    expect(dataOf(await waiting)).toEqual(['late'])
  })
})

describe('consume', () => {
  it('each group sees everything in order, also with several workers; a group for new messages sees only those', async () => {
    const queue = randomUUID()
    await queen.push(queue, [0, 1, 2])
    expect(await queen.pop({ queue, group: 'new', subscriptionMode: 'new', wait: false })).toEqual([])
    await queen.push(queue, [3, 4, 5])
    const seen: Record<string, unknown[]> = { a: [], b: [], new: [] }
    const read = (group: string, limit: number, more: Partial<Consuming> = {}) =>
      queen.consume({ queue, group, limit, timeoutMillis: 5_000, ...more }, (messages) => {
        seen[group]?.push(...dataOf(messages))
      })
    await Promise.all([
      read('a', 3, { batch: 1 }),
      read('a', 3, { batch: 1 }),
      read('b', 6, { batch: 4, each: true }),
      read('new', 3, { batch: 10, subscriptionMode: 'new' }),
    ])
    expect(seen).toEqual({ a: [0, 1, 2, 3, 4, 5], b: [0, 1, 2, 3, 4, 5], new: [3, 4, 5] })
  })

  it('a handler that takes longer than the lease keeps its messages by renewing', async () => {
    const queue = randomUUID()
    await queen.create(queue, { leaseTime: 20 })
    await queen.push(queue, ['long', 'next'])
    const handled: unknown[] = []
    await queen.consume({ queue, limit: 2, renewLeaseMillis: 20 }, async (messages) => {
      handled.push(...dataOf(messages))
      if (handled.length > 1) return
      for (let round = 0; round < 3; round++) {
        await forward(15)
        const before = queen.renewals
        // Two: the first may have been under way.
        await until('it is renewed', () => queen.renewals > before + 1)
        expect(await queen.pop({ queue, wait: false })).toEqual([])
      }
    })
    expect(handled).toEqual(['long', 'next'])
    expect(await queen.pop({ queue, wait: false })).toEqual([])
  })

  it('renew returns when the lease ends, and fails when it has ended', async () => {
    const queue = randomUUID()
    await queen.create(queue, { leaseTime: 20 })
    await queen.push(queue, ['a'])
    const message = one(await queen.pop({ queue }))
    const renewed = await queen.renew(message)
    expect(renewed.success).toBe(true)
    const inSeconds = (Date.parse(String(renewed.newExpiresAt)) - Date.now()) / 1_000 - shiftSeconds
    expect(inSeconds).toBeGreaterThan(10)
    await forward(400)
    expect((await queen.renew(message)).success).toBe(false)
    expect(await queen.ack(message, true)).toMatchObject({ success: false, error: expect.stringMatching(/lease/) })
  })

  it('one by one, after a failure: the others of the batch are settled, and the failed one is redelivered', async () => {
    const queue = randomUUID()
    await queen.create(queue, { retryDelay: 0 })
    await queen.push(queue, [0, 1, 2])
    const seen: unknown[] = []
    await queen.consume({ queue, batch: 3, limit: 4, each: true }, ([message]) => {
      seen.push(message?.data)
      if (seen.length === 2) throw new Error('once')
    })
    expect(seen).toEqual([0, 1, 2, 1])
    expect(await queen.pop({ queue, wait: false })).toEqual([])
  })
})

it('a handler that always fails: retryLimit and one deliveries, then a dead letter of its group alone', async () => {
  const queue = randomUUID()
  await queen.create(queue, { retryLimit: 2, retryDelay: 0, dlqAfterMaxRetries: true })
  await queen.push(queue, [{ poison: true }, 'fine'])
  const seen: unknown[] = []
  await queen.consume({ queue, group: 'g', limit: 4 }, ([message]) => {
    seen.push(message?.data)
    if (message?.data !== 'fine') throw new Error('no')
  })
  expect(seen).toEqual([{ poison: true }, { poison: true }, { poison: true }, 'fine'])
  const { messages, total } = await queen.dlq(queue, 'g')
  expect([total, messages.length]).toEqual([1, 1])
  expect(messages[0]).toMatchObject({ data: { poison: true }, errorMessage: null, consumerGroup: 'g' })
  expect(await queen.dlq(queue, 'other')).toMatchObject({ messages: [], total: 0 })
})

describe('transaction', () => {
  const ackOf = ({ transactionId, partitionId }: QueenMessage) => ({
    ...{ type: 'ack', transactionId, partitionId, status: 'completed' },
  })
  const pushOf = (queue: string, payload: unknown) => ({ type: 'push', items: [{ queue, payload }] })

  it('messages taken here are put there', async () => {
    const [from, to] = [randomUUID(), randomUUID()]
    await queen.push(from, ['in'])
    const message = one(await queen.pop({ queue: from }))
    const result = await queen.transaction([ackOf(message), pushOf(to, 'out')], [message.leaseId])
    expect(result.success).toBe(true)
    expect(dataOf(await queen.pop({ queue: to }))).toEqual(['out'])
    expect(await queen.pop({ queue: from, wait: false })).toEqual([])
  })

  it('one part fails: it throws, and nothing was done', async () => {
    const [from, to] = [randomUUID(), randomUUID()]
    await queen.push(from, ['in'])
    const message = one(await queen.pop({ queue: from }))
    const unknown = { ...message, transactionId: randomUUID() }
    const operations = [pushOf(to, 'out'), ackOf(message), ackOf(unknown)]
    await expect(queen.transaction(operations, [message.leaseId])).rejects.toThrow(/not found/)
    expect(await queen.pop({ queue: to, wait: false })).toEqual([])
    expect(await queen.ack(message, true)).toMatchObject({ success: true })
  })
})
