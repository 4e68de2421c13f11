/** Every option of a queue does what it says: two real servers on one database, whose clock is in the test's hand. */
import { randomUUID } from 'node:crypto'
import { afterAll, beforeAll, describe, expect, it, vi } from 'vitest'
import { laneOf } from '../../../spillway/src/core/ids.js'
import {
  ack,
  acked,
  configure,
  dataOf,
  extend,
  type Message,
  type PopOptions,
  pauseLane,
  push,
  pushed,
  pushResults,
  resumeLane,
  take,
} from '../message-calls.js'
import { at, type Fleet, startFleet } from '../petitions-fleet.js'
import { call, finishes, get, post } from '../server-process.js'

let fleet: Fleet
let shiftSeconds = 0

beforeAll(async () => {
  fleet = await startFleet({ instances: 2, env: { SPILLWAY_RETRY_BASE_MS: '10', SPILLWAY_RETRY_MAX_MS: '20' } })
})
afterAll(() => fleet.close())

/** So much later it is for all SQL; each test has queues of its own, so that none of them minds. */
async function forward(seconds: number): Promise<void> {
  shiftSeconds += seconds
  await fleet.sql(`CREATE OR REPLACE FUNCTION spillway.clock() RETURNS timestamptz LANGUAGE sql VOLATILE AS
    $$ SELECT clock_timestamp() + interval '${shiftSeconds} seconds' $$`)
}

/** A queue of its own with these options, configured on one instance while the test uses both. */
async function queueWith(options: Record<string, unknown>, more: Record<string, unknown> = {}): Promise<string> {
  const queue = randomUUID()
  const answer = await configure(fleet.next(), queue, options, more)
  expect(answer.status, answer.text).toBe(201)
  expect(answer.body.options).toMatchObject(options)
  return queue
}

const store = (queue: string, payloads: readonly unknown[], partition = 'Default') =>
  pushed(
    fleet.next(),
    payloads.map((payload) => ({ queue, partition, payload })),
  )
const taken = (queue: string | null, options: PopOptions = {}) => take(fleet.next(), queue, { batch: 10, ...options })
const sweep = () => fleet.sql('SELECT spillway.mq_sweep(1000, NULL, 1000)')
const logOf = async (queue: string) =>
  (
    await fleet.sql<{ payload: string }>(
      `SELECT m.payload FROM spillway.mq_messages m JOIN spillway.mq_partitions p ON p.id = m.partition
       JOIN spillway.mq_queues q ON q.id = p.queue WHERE q.name = $1 ORDER BY p.name, m.seq`,
      [queue],
    )
  ).map(({ payload }) => JSON.parse(payload) as unknown)
const deadRecords = (queue: string) =>
  fleet.sql<{ payload: string; error: string | null; is_letter: boolean; retry_count: number }>(
    'SELECT payload::json AS payload, error, is_letter, retry_count FROM spillway.mq_dead WHERE queue = $1 ORDER BY moved_at',
    [queue],
  )
/** What a sweep leaves; servers sweep by themselves, too, and one leaves to the other what that has at hand. */
const sweptTo = <T>(look: () => Promise<T[]>, expected: T[]) =>
  vi.waitFor(async () => {
    await sweep()
    expect(await look()).toEqual(expected)
  })
/** The only one of them. */
const one = async (messages: Promise<Message[]>): Promise<Message> => {
  const list = await messages
  expect(list).toHaveLength(1)
  return at(list, 0)
}

describe('leaseTime', () => {
  it('no other consumer gets the partition before it is over; then it is redelivered, and the late ack changes nothing', async () => {
    const queue = await queueWith({ leaseTime: 20 })
    await store(queue, ['a', 'b'])
    const first = await one(taken(queue, { batch: 1 }))
    await forward(18)
    expect(await taken(queue)).toEqual([])
    await forward(2)
    expect(await ack(fleet.next(), first)).toMatchObject({ success: false })
    expect(await taken(queue)).toMatchObject([
      { data: 'a', retryCount: 1 },
      { data: 'b', retryCount: 0 },
    ])
  })

  it('an extension that names no time is as long', async () => {
    const queue = await queueWith({ leaseTime: 20 })
    await store(queue, ['a'])
    const { leaseId } = await one(taken(queue))
    await forward(15)
    expect((await extend(fleet.next(), leaseId)).status).toBe(200)
    await forward(15)
    expect(await taken(queue)).toEqual([])
    await forward(5)
    expect(dataOf(await taken(queue))).toEqual(['a'])
  })
})

describe('retryLimit', () => {
  it.each([0, 2])('%i: delivered once more often than that, then the next one comes', async (retryLimit) => {
    const queue = await queueWith({ retryLimit, retryDelay: 0 })
    await store(queue, ['bad', 'good'])
    for (let retryCount = 0; retryCount <= retryLimit; retryCount++) {
      const message = await one(taken(queue, { batch: 1 }))
      expect(message).toMatchObject({ data: 'bad', retryCount })
      await ack(fleet.next(), message, { status: 'failed', error: `no ${retryCount}` })
    }
    expect(dataOf(await taken(queue))).toEqual(['good'])
    expect(await deadRecords(queue)).toMatchObject([{ payload: 'bad', error: `no ${retryLimit}` }])
  })

  it('an expired lease counts as a failed delivery; a returned message does not', async () => {
    const queue = await queueWith({ retryLimit: 1, leaseTime: 10 })
    await store(queue, ['bad', 'good'])
    for (let n = 0; n < 3; n++) await ack(fleet.next(), await one(taken(queue, { batch: 1 })), { status: 'retry' })
    for (const retryCount of [0, 1]) {
      expect(await one(taken(queue, { batch: 1 }))).toMatchObject({ data: 'bad', retryCount })
      await forward(10)
    }
    expect(dataOf(await taken(queue))).toEqual(['good'])
    expect(await deadRecords(queue)).toMatchObject([{ payload: 'bad', error: 'The lease expired 2 times.' }])
  })
})

it('retryDelay: what failed waits so long, with all behind it; other partitions do not', async () => {
  const queue = await queueWith({ retryDelay: 30_000 })
  await store(queue, ['a', 'b'], 'p')
  await ack(fleet.next(), await one(taken(queue, { batch: 1, partition: 'p' })), { status: 'failed' })
  await store(queue, ['c'], 'other')
  expect(dataOf(await taken(queue, { partitions: 10 }))).toEqual(['c'])
  await forward(28)
  expect(await taken(queue, { partition: 'p' })).toEqual([])
  await forward(2)
  expect(dataOf(await taken(queue, { partition: 'p' }))).toEqual(['a', 'b'])
})

describe('maxSize', () => {
  it('200 pushes at once on two instances: exactly maxSize are stored, the others get an error', async () => {
    const maxSize = 50
    const queue = await queueWith({ maxSize })
    const answers = await Promise.all(
      Array.from({ length: 200 }, (_, n) => push(fleet.next(), [{ queue, partition: `p${n % 20}`, payload: n }])),
    )
    for (const answer of answers) expect([201, 202], answer.text).toContain(answer.status)
    for (const { status, body } of answers) if (status === 202) await finishes(fleet.next(), body.operationId)
    const log = await logOf(queue)
    expect(log).toHaveLength(maxSize)
    for (const [n, { code, status }] of answers.flatMap(pushResults).entries()) {
      if (status !== 'pending') expect([n, code ?? status]).toEqual([n, log.includes(n) ? 'queued' : 'queue_full'])
    }
    const some = await taken(queue, { batch: 10, partitions: 10 })
    await acked(fleet.next(), some)
    const more = await store(queue, Array(12).fill('more'))
    expect(more.filter(({ status }) => status === 'queued')).toHaveLength(some.length)
    expect(more.at(-1)).toMatchObject({ status: 'failed', code: 'queue_full', error: expect.stringMatching(/maxSize/) })
  })

  it.each([true, false])('a message deleted alone makes room at once (with a group: %s)', async (withGroup) => {
    const queue = await queueWith({ maxSize: 3 })
    if (withGroup) await taken(queue, { consumerGroup: 'g' })
    const results = await store(queue, ['a', 'b', 'c'])
    const counts = async () => {
      const { body } = await get(fleet.next(), `/api/v1/resources/queues/${queue}`)
      return body.totals
    }
    for (const [place, left] of [
      [1, 2],
      [0, 1],
      [2, 0],
    ] as const) {
      const url = `/api/v1/messages/${laneOf([queue, 'Default']).id}/${results[place]?.transaction_id}`
      expect((await call(fleet.next(), 'DELETE', url)).status).toBe(200)
      expect(await counts()).toMatchObject({ total: left, pending: left })
    }
    const more = await store(queue, ['d', 'e', 'f', 'g'])
    expect(more.map(({ status }) => status)).toEqual(['queued', 'queued', 'queued', 'failed'])
    expect(dataOf(await taken(queue, { consumerGroup: 'g', batch: 10 }))).toEqual(['d', 'e', 'f'])
  })

  it('holds for queued pushes: they become dead letters, others continue, and a redrive stores them once there is room', async () => {
    const queue = await queueWith({ maxSize: 1 })
    const other = randomUUID()
    for (const name of [queue, other]) await pauseLane(fleet.next(), name)
    const send = async (name: string, payload: string): Promise<string> => {
      const { status, body } = await push(fleet.next(), [{ queue: name, payload }])
      expect(status).toBe(202)
      return body.operationId
    }
    const ids = [await send(queue, 'a'), await send(queue, 'b'), await send(other, 'c')]
    for (const name of [queue, other]) await resumeLane(fleet.next(), name)
    const ends = await Promise.all(ids.map((id) => finishes(fleet.next(), id)))
    expect(ends.map(({ status }) => status)).toEqual(['completed', 'failed', 'completed'])
    expect(ends[1]?.error_message).toContain('queue_full')
    expect([await logOf(queue), await logOf(other)]).toEqual([['a'], ['c']])
    expect(dataOf(await taken(queue, { autoAck: true }))).toEqual(['a'])
    await post(fleet.next(), '/api/v1/dead-letters/redrive', { ids: [ids[1]] })
    expect((await finishes(fleet.next(), ids[1] ?? '')).status).toBe('completed')
    expect(dataOf(await taken(queue))).toEqual(['b'])
  })
})

it.each([
  { by: { namespace: 'orders' }, expected: ['high', 'default', 'low'] },
  { by: { task: 'mail' }, expected: ['elsewhere', 'high', 'low'] },
  { by: { namespace: 'orders', task: 'mail' }, expected: ['high', 'low'] },
])('priority: a pop by $by takes from the queue with the higher one first', async ({ by, expected }) => {
  const [namespace, task] = [randomUUID(), randomUUID()]
  const other = randomUUID()
  for (const [name, priority, of] of [
    ['low', -1, { namespace, task }],
    ['high', 5, { namespace, task }],
    ['default', 0, { namespace, task: other }],
    ['elsewhere', 9, { namespace: other, task }],
  ] as const) {
    await store(await queueWith({ priority }, of), [name])
  }
  const from = { ...('namespace' in by && { namespace }), ...('task' in by && { task }) }
  const seen: unknown[] = []
  for (let n = 0; n <= expected.length; n++) {
    // The queue of the first ones is leased by then.
    seen.push(...dataOf(await taken(null, from)))
  }
  expect(seen).toEqual(expected)
})

describe('delayedProcessing', () => {
  it('each message is as old as that when it is delivered', async () => {
    const queue = await queueWith({ delayedProcessing: 20 })
    await store(queue, ['first'])
    await forward(12)
    await store(queue, ['second'])
    expect(await taken(queue)).toEqual([])
    await forward(8)
    const found = await taken(queue)
    expect(dataOf(found)).toEqual(['first'])
    await acked(fleet.next(), found)
    expect(await taken(queue)).toEqual([])
    await forward(12)
    expect(dataOf(await taken(queue))).toEqual(['second'])
  })

  it('a waiting consumer gets it as soon as it is due', async () => {
    const queue = await queueWith({ delayedProcessing: 1 })
    await taken(queue)
    const began = performance.now()
    const waiting = taken(queue, { wait: true, timeout: 10_000 })
    await store(queue, ['due'])
    const stored = performance.now()
    expect(dataOf(await waiting)).toEqual(['due'])
    expect(performance.now() - began).toBeGreaterThanOrEqual(995)
    // The look-around of those who wait comes once a second.
    expect(performance.now() - stored).toBeLessThan(5_000)
  })
})

it('windowBuffer: a partition is quiet for as long before anything of it is delivered', async () => {
  const queue = await queueWith({ windowBuffer: 20 })
  await store(queue, ['a'], 'p')
  await forward(15)
  await store(queue, ['b'], 'p')
  await store(queue, ['c'], 'q')
  // The first is old enough; its partition is not.
  await forward(15)
  expect(await taken(queue)).toEqual([])
  await store(queue, ['d'], 'q')
  await forward(5)
  const found = await taken(queue, { partitions: 10 })
  expect(dataOf(found)).toEqual(['a', 'b'])
  await acked(fleet.next(), found)
  await forward(15)
  expect(dataOf(await taken(queue))).toEqual(['c', 'd'])
})

describe('retention', () => {
  it('retentionEnabled false: nothing is removed, whatever else is set', async () => {
    const queue = await queueWith({ retentionSeconds: 10, completedRetentionSeconds: 10 })
    await store(queue, ['a', 'b'])
    await taken(queue, { autoAck: true, batch: 1 })
    for (let n = 0; n < 3; n++) {
      await forward(11)
      await sweep()
    }
    expect(await logOf(queue)).toEqual(['a', 'b'])
  })

  it('retentionSeconds: messages not consumed in that time are removed, and consumers continue after them', async () => {
    const queue = await queueWith({ retentionEnabled: true, retentionSeconds: 30 })
    const kept = await queueWith({ retentionEnabled: true })
    for (const name of [queue, kept]) await store(name, ['old'])
    expect(await taken(queue, { consumerGroup: 'slow', partition: 'none' })).toEqual([])
    await forward(20)
    await store(queue, ['young'])
    await sweep()
    expect(await logOf(queue)).toEqual(['old', 'young'])
    await forward(11)
    await sweptTo(() => logOf(queue), ['young'])
    expect(await logOf(kept)).toEqual(['old'])
    for (const consumerGroup of ['slow', 'late']) {
      expect(dataOf(await taken(queue, { consumerGroup, autoAck: true }))).toEqual(['young'])
    }
  })

  it('completedRetentionSeconds: what every group has taken goes after that time, and not what one has still to take', async () => {
    const queue = await queueWith({ retentionEnabled: true, completedRetentionSeconds: 30 })
    const items = ['a', 'b'].map((name) => ({ queue, payload: name, transactionId: name }))
    await pushed(fleet.next(), items)
    for (const consumerGroup of ['quick', 'slow']) await taken(queue, { consumerGroup, autoAck: true, batch: 1 })
    await taken(queue, { consumerGroup: 'quick', autoAck: true })
    await sweep()
    await forward(28)
    await sweep()
    expect(await logOf(queue)).toEqual(['a', 'b'])
    expect((await pushed(fleet.next(), items)).map(({ status }) => status)).toEqual(['duplicate', 'duplicate'])
    await forward(3)
    await sweptTo(() => logOf(queue), ['b'])
    expect(dataOf(await taken(queue, { consumerGroup: 'slow' }))).toEqual(['b'])
  })

  it('completedRetentionSeconds 0: what every group has taken goes with the next sweep', async () => {
    const queue = await queueWith({ retentionEnabled: true })
    await store(queue, ['a', 'b'])
    await taken(queue, { autoAck: true, batch: 1 })
    await sweptTo(() => logOf(queue), ['b'])
  })
})

describe('maxWaitTimeSeconds', () => {
  it('messages that waited longer expire with a record; younger or leased ones do not', async () => {
    const queue = await queueWith({ maxWaitTimeSeconds: 30, deadLetterQueue: true })
    await store(queue, ['old'], 'p')
    await store(queue, ['leased'], 'q')
    await taken(queue, { partition: 'p', batch: 1, subscriptionMode: 'all', consumerGroup: 'reader', autoAck: true })
    const leased = await one(taken(queue, { partition: 'q', consumerGroup: 'g' }))
    await forward(20)
    await store(queue, ['young'], 'p')
    await forward(11)
    const records = async () => (await deadRecords(queue)).map((r) => `${r.payload}, ${r.is_letter}, ${r.error}`).sort()
    const why = 'true, It waited longer than maxWaitTimeSeconds.'
    await sweptTo(records, [`leased, ${why}`, `old, ${why}`])
    expect(await ack(fleet.next(), leased)).toMatchObject({ success: true })
    expect(dataOf(await taken(queue, { consumerGroup: 'g' }))).toEqual(['young'])
    expect(dataOf(await taken(queue, { consumerGroup: 'reader' }))).toEqual(['young'])
  })

  it('a pop hands out nothing that waited longer, also to a group that begins only then', async () => {
    const queue = await queueWith({ maxWaitTimeSeconds: 30, deadLetterQueue: true })
    await taken(queue, { consumerGroup: 'early' })
    await store(queue, ['old', 'older'], 'p')
    await store(queue, ['old'], 'q')
    await forward(31)
    await store(queue, ['young'], 'p')
    for (const consumerGroup of ['early', 'late']) {
      expect(dataOf(await taken(queue, { consumerGroup, batch: 10, partitions: 10 }))).toEqual(['young'])
      expect(dataOf(await taken(queue, { consumerGroup, batch: 10, partitions: 10 }))).toEqual([])
    }
    const records = (await deadRecords(queue)).map(({ payload, is_letter }) => `${payload}, ${is_letter}`)
    expect(records.sort()).toEqual([...Array(4).fill('old, true'), ...Array(2).fill('older, true')])
  })

  it('a pop finds young messages behind any number of old ones', async () => {
    const queue = await queueWith({ maxWaitTimeSeconds: 30 })
    const many = Array.from({ length: 1_000 }, (_, n) => n)
    for (const partition of ['p', 'p', 'p', 'q']) await store(queue, many, partition)
    await forward(31)
    await store(queue, ['young'], 'p')
    expect(dataOf(await taken(queue, { batch: 10 }))).toEqual(['young'])
    expect(await deadRecords(queue)).toHaveLength(4_000)
  })

  it('0: for ever', async () => {
    const queue = await queueWith({})
    await store(queue, ['patient'])
    await taken(queue, { consumerGroup: 'g', partition: 'none' })
    await forward(1_000)
    await sweep()
    expect(dataOf(await taken(queue, { consumerGroup: 'g' }))).toEqual(['patient'])
  })
})

it.each([
  { options: {}, isLetter: false },
  { options: { deadLetterQueue: true }, isLetter: true },
  { options: { dlqAfterMaxRetries: true }, isLetter: true },
])('$options: what used up its retries is a dead letter: $isLetter', async ({ options, isLetter }) => {
  const queue = await queueWith({ retryLimit: 0, ...options })
  await store(queue, ['bad', 'asked'])
  const [bad, asked] = await taken(queue)
  if (bad === undefined || asked === undefined) throw new Error('two were pushed')
  expect((await ack(fleet.next(), bad, { status: 'failed', error: 'why' })).dlq).toBe(isLetter)
  // The status dlq makes a dead letter in every queue.
  expect((await ack(fleet.next(), asked, { status: 'dlq', error: 'said so' })).dlq).toBe(true)
  const records = await deadRecords(queue)
  expect(records.map(({ payload, error, is_letter }) => [payload, error, is_letter]).sort()).toEqual([
    ['asked', 'said so', true],
    ['bad', 'why', isLetter],
  ])
})

describe('configure again', () => {
  it('only given options change, also for existing messages, on every instance', async () => {
    const queue = randomUUID()
    await store(queue, ['a', 'b', 'c'])
    await configure(at(fleet.servers, 0), queue, { retryLimit: 0, leaseTime: 10 })
    const answer = await configure(at(fleet.servers, 1), queue, { leaseTime: 40, maxSize: null })
    expect(answer.body.options).toMatchObject({ retryLimit: 0, leaseTime: 40, maxSize: 0 })
    await ack(fleet.next(), await one(taken(queue, { batch: 1 })), { status: 'failed' })
    expect(await one(taken(queue, { batch: 1 }))).toMatchObject({ data: 'b' })
    await forward(39)
    expect(await taken(queue)).toEqual([])
    await forward(1)
    expect(dataOf(await taken(queue))).toEqual(['c'])
  })

  it.each([
    ...['leaseTime', 'retryLimit', 'retryDelay', 'maxSize', 'priority', 'delayedProcessing', 'windowBuffer'],
    ...['retentionSeconds', 'completedRetentionSeconds', 'maxWaitTimeSeconds'],
  ])('%s: a value that is not such a number is refused, and nothing changes', async (name) => {
    const queue = await queueWith({ retryLimit: 7 })
    const least = name === 'priority' ? -1e6 : name === 'leaseTime' ? 1 : 0
    for (const value of [least - 1, 1e12, 1.5, '5', true, [], {}]) {
      const answer = await configure(fleet.next(), queue, { retryLimit: 1, [name]: value })
      expect([answer.status, answer.body.code], `${value}`).toEqual([400, 'invalid_request'])
      expect(answer.body.errors.map(({ path }) => path)).toContain(`/options/${name}`)
    }
    expect((await configure(fleet.next(), queue)).body.options).toMatchObject({ retryLimit: 7 })
  })

  it.each(['retentionEnabled', 'deadLetterQueue', 'dlqAfterMaxRetries', 'encryptionEnabled'])(
    '%s: a value that is not a boolean is refused, and no queue is created',
    async (name) => {
      const queue = randomUUID()
      for (const value of [1, 'true', [], {}]) {
        expect((await configure(fleet.next(), queue, { [name]: value })).status, `${value}`).toBe(400)
      }
      expect(await fleet.sql('SELECT FROM spillway.mq_queues WHERE name = $1', [queue])).toEqual([])
    },
  )
})
