/** Pushes and acks in one transaction: all of it, or nothing. */
import { randomUUID } from 'node:crypto'
import { afterAll, beforeAll, expect, it } from 'vitest'
import { freshDatabase, type TestDatabase } from '../../../spillway/test/setup/database.js'
import {
  acked,
  ackOf,
  calm,
  configure,
  dataOf,
  drained,
  type Message,
  type MessageTables,
  openMessageTables,
  pauseLane,
  push,
  pushed,
  resumeLane,
  take,
  takeAll,
  takeSome,
  transaction,
} from '../message-calls.js'
import { uuidForm } from '../petition-calls.js'
import { type Answer, endAll, type ServerProcess, startServer, until } from '../server-process.js'

let database: TestDatabase
let servers: [ServerProcess, ServerProcess]
let server: ServerProcess
let tables: MessageTables

beforeAll(async () => {
  database = await freshDatabase()
  const env = { DATABASE_URL: database.url, ...calm }
  servers = [await startServer(env), await startServer(env)]
  server = servers[0]
  tables = openMessageTables(database.url)
})
afterAll(async () => {
  await tables.close()
  await endAll()
  await database.drop()
})

const ackStep = (message: Message, more: Record<string, unknown> = {}) => ({ type: 'ack', ...ackOf(message, more) })
const pushStep = (...items: Record<string, unknown>[]) => ({ type: 'push', items })

/** A queue with one message that is delivered, and one behind it. */
async function delivered(partition = 'Default'): Promise<{ queue: string; message: Message }> {
  const queue = randomUUID()
  await pushed(
    server,
    [0, 1].map((payload) => ({ queue, partition, payload })),
  )
  const [message] = await take(server, queue)
  if (message === undefined) throw new Error('nothing was delivered')
  return { queue, message }
}

/** Nothing of it was done, and the message can still be answered for. */
async function expectUndone(answer: Answer, from: { queue: string; message: Message }, to: string): Promise<void> {
  expect([answer.status, answer.body.success], answer.text).toEqual([200, false])
  expect(answer.body.error).toEqual(expect.stringMatching(/./))
  expect(await take(server, to)).toEqual([])
  expect(await take(server, from.queue)).toEqual([])
  await acked(server, [from.message])
  expect(dataOf(await take(server, from.queue))).toEqual([1])
}

it('pushes and acks are one unit: results in the order of the operations', async () => {
  const { queue, message } = await delivered()
  const to = randomUUID()
  const answer = await transaction(
    server,
    [
      pushStep({ queue: to, payload: 'a', transactionId: 'one' }, { queue: to, partition: 'p', payload: 'b' }),
      ackStep(message),
      pushStep({ queue: to, payload: 'c' }),
    ],
    { requiredLeases: [message.leaseId] },
  )
  expect(answer.status, answer.text).toBe(200)
  expect(answer.body).toMatchObject({ success: true, transactionId: expect.stringMatching(uuidForm) })
  expect(answer.body.results).toMatchObject([
    { index: 0, type: 'push', success: true, transactionId: 'one', messageId: expect.any(String) },
    { index: 1, type: 'push', success: true, partitionId: expect.any(String) },
    { index: 2, type: 'ack', success: true, transactionId: message.transactionId, error: null, dlq: false },
    { index: 3, type: 'push', success: true },
  ])
  expect(dataOf(await take(server, queue))).toEqual([1])
  expect(dataOf(await takeAll(server, to, 3)).sort()).toEqual(['a', 'b', 'c'])
})

it('an ack for an unknown message takes the pushes back', async () => {
  const from = await delivered()
  const to = randomUUID()
  const steps = [pushStep({ queue: to, payload: 0 }), ackStep(from.message, { transactionId: 'nobody' })]
  const answer = await transaction(server, steps)
  expect(answer.body.results).toMatchObject([
    { type: 'push', success: false, status: 'failed', code: 'rolled_back', error: expect.any(String) },
    { type: 'ack', success: false, error: expect.stringMatching(/not found/) },
  ])
  await expectUndone(answer, from, to)
})

it('one unknown message takes the other acks back', async () => {
  const from = await delivered()
  const to = randomUUID()
  const steps = [ackStep(from.message), pushStep({ queue: to, payload: 0 }), ackStep(from.message, { partitionId: to })]
  const answer = await transaction(server, steps)
  expect((answer.body.results as { success: boolean }[]).map(({ success }) => success)).toEqual([false, false, false])
  await expectUndone(answer, from, to)
})

it('an ack with another’s lease takes everything back', async () => {
  const from = await delivered()
  const to = randomUUID()
  const steps = [pushStep({ queue: to, payload: 0 }), ackStep(from.message, { leaseId: randomUUID() })]
  await expectUndone(await transaction(server, steps), from, to)
})

it.each(['made up', 'no uuid'])('a required lease that is %s takes everything back', async (kind) => {
  const from = await delivered()
  const to = randomUUID()
  const requiredLeases = [from.message.leaseId, kind === 'made up' ? randomUUID() : 'no lease']
  const answer = await transaction(server, [ackStep(from.message), pushStep({ queue: to, payload: 0 })], {
    requiredLeases,
  })
  await expectUndone(answer, from, to)
})

it('a lost required lease rolls the pushes back, and the message stays with its current consumer', async () => {
  const queue = randomUUID()
  const to = randomUUID()
  await configure(server, queue, { leaseTime: 1 })
  await pushed(server, [{ queue, payload: 0 }])
  const [late] = await take(server, queue)
  const [now] = await takeSome(server, queue)
  if (late === undefined || now === undefined) throw new Error('nothing was delivered')
  const { leaseId, ...rest } = ackStep(late)
  // As Queen's client does: the lease stands beside the operations, not in the ack.
  const answer = await transaction(server, [pushStep({ queue: to, payload: 0 }), rest], { requiredLeases: [leaseId] })
  expect(answer.body.success, answer.text).toBe(false)
  expect(await take(server, to)).toEqual([])
  await acked(server, [now])
})

it('a push that the queue has no room for takes the acks back', async () => {
  const from = await delivered()
  const to = randomUUID()
  await configure(server, to, { maxSize: 1 })
  const steps = [ackStep(from.message), pushStep({ queue: to, payload: 0 }, { queue: to, payload: 1 })]
  await expectUndone(await transaction(server, steps), from, to)
})

it('a push whose lane has to wait is accepted by the same commit, and keeps its place', async () => {
  const { queue, message } = await delivered()
  const to = randomUUID()
  await pauseLane(server, to)
  const before = await push(server, [{ queue: to, payload: 'before' }])
  const answer = await transaction(server, [pushStep({ queue: to, payload: 'within' }), ackStep(message)])
  expect(answer.body.success, answer.text).toBe(true)
  expect(answer.body.results).toMatchObject([
    { type: 'push', success: true, status: 'pending' },
    { type: 'ack', success: true },
  ])
  await push(server, [{ queue: to, payload: 'behind' }])
  expect(dataOf(await take(server, queue))).toEqual([1])
  await resumeLane(server, to)
  await drained(server, before)
  expect(dataOf(await takeAll(server, to, 3))).toEqual(['before', 'within', 'behind'])
})

it('a transaction that is taken back leaves nothing in the operation queue, nor a queue or partition', async () => {
  const { message } = await delivered()
  const to = randomUUID()
  await pauseLane(server, to)
  const before = await tables.counts()
  const steps = [pushStep({ queue: to, payload: 0 }), ackStep(message, { transactionId: 'nobody' })]
  expect((await transaction(server, steps)).body.success).toBe(false)
  expect(await tables.counts()).toEqual(before)
  expect(await tables.query('SELECT 1 FROM mq_queues WHERE name = $1', [to])).toEqual([])
  await resumeLane(server, to)
})

it.each(['completed', 'dlq'])(
  'the same Idempotency-Key: done once, and the answer is replayed word for word (%s)',
  async (status) => {
    const { queue, message } = await delivered()
    const to = randomUUID()
    const steps = [pushStep({ queue: to, payload: 'once' }), ackStep(message, { status })]
    const key = { 'idempotency-key': randomUUID() }
    const first = await transaction(server, steps, {}, key)
    const again = await transaction(servers[1], steps, {}, key)
    expect(first.body.success, first.text).toBe(true)
    expect(again.body).toEqual(first.body)
    expect(again.headers.get('idempotent-replayed')).toBe('true')
    expect(dataOf(await takeAll(server, to, 1))).toEqual(['once'])
    expect(dataOf(await take(server, queue))).toEqual([1])
  },
)

it('two transactions over crossed partitions both succeed', async () => {
  const queue = randomUUID()
  const rounds = 12
  for (let round = 0; round < rounds; round++) {
    const partitions = [`a${round}`, `b${round}`] as const
    await pushed(
      server,
      partitions.map((partition) => ({ queue, partition, payload: 'in' })),
    )
    const [one] = await take(server, queue, { partition: partitions[0] })
    const [two] = await take(server, queue, { partition: partitions[1] })
    if (one === undefined || two === undefined) throw new Error('nothing was delivered')
    // Each pushes to the partition that the other acks in.
    const answers = await Promise.all([
      transaction(servers[0], [pushStep({ queue, partition: partitions[1], payload: 'out' }), ackStep(one)]),
      transaction(servers[1], [pushStep({ queue, partition: partitions[0], payload: 'out' }), ackStep(two)]),
    ])
    for (const answer of answers) expect([answer.status, answer.body.success], answer.text).toEqual([200, true])
  }
  expect(dataOf(await takeAll(server, queue, 2 * rounds))).toEqual(Array.from({ length: 2 * rounds }, () => 'out'))
}, 60_000)

it('a chain of queues under crashes: every message comes through once', async () => {
  const [from, to] = [randomUUID(), randomUUID()]
  await configure(server, from, { leaseTime: 1, retryLimit: 100 })
  const count = 60
  const partitions = 6
  await pushed(
    server,
    Array.from({ length: count }, (_, n) => ({ queue: from, partition: `p${n % partitions}`, payload: n })),
  )
  const doomed = await startServer({ DATABASE_URL: database.url, ...calm })
  let moved = 0
  const mover = async (here: ServerProcess): Promise<void> => {
    while (moved < count) {
      const batch = await take(here, from, { batch: 3 })
      if (batch.length === 0) {
        await until('there is more, or it is done', async () => moved >= count || (await due(from)) > 0)
        continue
      }
      const items = batch.map(({ partition, data }) => ({ queue: to, partition, payload: data }))
      const done = await transaction(here, [pushStep(...items), ...batch.map((message) => ackStep(message))])
      if (done.body.success === true) moved += batch.length
    }
  }
  // What a killed server had answered for cannot be known; its messages come again when their lease ends.
  const lost = Promise.all([mover(doomed), mover(doomed)]).catch(() => undefined)
  const movers = Promise.all([mover(server), mover(servers[1])])
  await until('some are moved', () => moved > 10)
  await doomed.kill()
  const left = until('all are moved', async () => {
    const [row] = await tables.query<{ n: number }>(
      'SELECT count(*)::int AS n FROM mq_messages m JOIN mq_partitions p ON p.id = m.partition JOIN mq_queues q ON q.id = p.queue WHERE q.name = $1',
      [to],
    )
    if ((row?.n ?? 0) >= count) moved = count
    return moved >= count
  })
  await Promise.all([left, movers, lost])
  const seen = await takeAll(server, to, count)
  for (let p = 0; p < partitions; p++) {
    const own = seen.filter(({ partition }) => partition === `p${p}`)
    expect(dataOf(own)).toEqual(Array.from({ length: count / partitions }, (_, n) => n * partitions + p))
  }
}, 60_000)

async function due(queue: string): Promise<number> {
  const [row] = await tables.query<{ n: number }>(
    `SELECT (SELECT count(*) FROM mq_ready r WHERE r.grp = g.id)::int + (SELECT count(*) FROM mq_leases l WHERE l.grp = g.id AND l.until <= clock())::int AS n
     FROM mq_groups g JOIN mq_queues q ON q.id = g.queue WHERE q.name = $1`,
    [queue],
  )
  return row?.n ?? 0
}
