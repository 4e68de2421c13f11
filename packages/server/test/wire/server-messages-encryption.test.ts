/** Encrypted queues: nothing of a payload is readable at rest, and a server that cannot seal or open refuses. */
import { randomBytes, randomUUID } from 'node:crypto'
import { afterAll, beforeAll, beforeEach, describe, expect, it } from 'vitest'
import {
  ack,
  acked,
  configure,
  dataOf,
  drained,
  later,
  type PopOptions,
  type PushItem,
  pauseLane,
  pop,
  push,
  pushed,
  pushResults,
  resumeLane,
  take,
  transaction,
} from '../message-calls.js'
import { expectProblem, uuidForm } from '../petition-calls.js'
import { at, type Fleet, startFleet } from '../petitions-fleet.js'
import { get, runProgram, type ServerProcess, until } from '../server-process.js'

const key = randomBytes(32).toString('hex')
const keyed = { SPILLWAY_ENCRYPTION_KEY: key, SPILLWAY_LOG_LEVEL: 'debug' }
let fleet: Fleet
/** With the key, and without. */
let holder: ServerProcess
let stranger: ServerProcess

beforeAll(async () => {
  fleet = await startFleet({ instances: 0, env: { SPILLWAY_RETRY_BASE_MS: '200', SPILLWAY_RETRY_MAX_MS: '400' } })
  ;[holder, stranger] = await Promise.all([fleet.start(keyed), fleet.start({ SPILLWAY_ROLES: 'gateway' })])
})
afterAll(() => fleet.close())

/** A word that stands nowhere else. */
let secret: string
let queue: string

beforeEach(async () => {
  secret = `secret-${randomUUID()}`
  queue = randomUUID()
  expect((await configure(holder, queue, { encryptionEnabled: true, retryDelay: 0 })).status).toBe(201)
})

/** In which tables this is to be read. */
async function tablesWith(text: string): Promise<string[]> {
  const tables = await fleet.sql<{ name: string }>(
    "SELECT c.relname AS name FROM pg_class c WHERE c.relnamespace = 'spillway'::regnamespace AND c.relkind = 'r' ORDER BY 1",
  )
  expect(tables.map(({ name }) => name)).toEqual(
    expect.arrayContaining(['mq_messages', 'mq_dead', 'ops', 'dead_letters', 'history_rest', 'idempotency']),
  )
  const found: string[] = []
  for (const { name } of tables) {
    const rows = await fleet.sql(`SELECT FROM spillway.${name} t WHERE position($1 IN t::text) > 0`, [text])
    if (rows.length > 0) found.push(name)
  }
  return found
}

const item = (payload: unknown, more: Partial<PushItem> = {}): PushItem => ({ queue, payload, ...more })
const stored = () =>
  fleet.sql<{ id: string; sealed: boolean; payload: string }>(
    `SELECT m.id, m.sealed, m.payload FROM spillway.mq_messages m JOIN spillway.mq_partitions p ON p.id = m.partition
     JOIN spillway.mq_queues q ON q.id = p.queue WHERE q.name = $1 ORDER BY p.name, m.seq`,
    [queue],
  )
const dead = () =>
  fleet.sql<{ id: string; sealed: boolean; transaction_id: string; error: string }>(
    'SELECT id, sealed, transaction_id, error FROM spillway.mq_dead WHERE queue = $1',
    [queue],
  )

describe('at rest', () => {
  it('the look into the tables finds plain payloads', async () => {
    await pushed(holder, [{ queue: randomUUID(), payload: secret }])
    expect(await tablesWith(secret)).toEqual(['mq_messages'])
  })

  it('a message that was stored at once', async () => {
    await pushed(holder, [item({ deep: [secret] })], { 'idempotency-key': randomUUID() })
    expect(await stored()).toMatchObject([{ sealed: true }])
    expect(await tablesWith(secret)).toEqual([])
    expect(dataOf(await take(holder, queue))).toEqual([{ deep: [secret] }])
  })

  it('a message that waits in the operation queue, and after it was stored from there', async () => {
    await pauseLane(holder, queue)
    const answer = await push(holder, [item(secret)], { 'idempotency-key': randomUUID() })
    expect([answer.status, answer.body.reason]).toEqual([202, 'maintaining_order'])
    expect(await fleet.sql('SELECT FROM spillway.ops WHERE id = $1', [answer.body.operationId])).toHaveLength(1)
    expect(await tablesWith(secret)).toEqual([])
    // The ticket does not contain it either.
    expect((await get(holder, `/api/v1/operations/${answer.body.operationId}`)).text).not.toContain(secret)
    await resumeLane(holder, queue)
    await drained(holder, answer)
    expect(await tablesWith(secret)).toEqual([])
    expect(dataOf(await take(holder, queue))).toEqual([secret])
  })

  it('a message of a transaction', async () => {
    const answer = await transaction(holder, [{ type: 'push', items: [item(secret)] }])
    expect(answer.body.success).toBe(true)
    expect(await tablesWith(secret)).toEqual([])
    expect(dataOf(await take(holder, queue))).toEqual([secret])
  })

  it('a dead letter and its replay', async () => {
    await configure(holder, queue, { retryLimit: 0, deadLetterQueue: true })
    await pushed(holder, [item(secret)])
    const [message] = await take(holder, queue)
    if (message === undefined) throw new Error('it was pushed')
    expect(await ack(holder, message, { status: 'failed' })).toMatchObject({ success: true, dlq: true })
    const [letter] = await dead()
    expect(letter).toMatchObject({ sealed: true, transaction_id: message.transactionId })
    expect(await tablesWith(secret)).toEqual([])
    await fleet.sql('SELECT spillway.mq_replay($1)', [letter?.id])
    expect(dataOf(await take(holder, queue))).toEqual([secret])
  })

  it('a push that could not be stored, among the dead letters of operations', async () => {
    await fleet.sql(`CREATE FUNCTION public.refuse() RETURNS trigger LANGUAGE plpgsql AS $$ BEGIN
      RAISE EXCEPTION 'not this one' USING ERRCODE = '23514'; END $$`)
    await fleet.sql(`CREATE TRIGGER refuse BEFORE INSERT ON spillway.mq_messages FOR EACH ROW
      WHEN (NEW.transaction_id = 'broken') EXECUTE FUNCTION public.refuse()`)
    try {
      const answer = await push(holder, [item(secret, { transactionId: 'broken' })], later)
      await until('it is a dead letter', async () => {
        const found = await fleet.sql('SELECT FROM spillway.dead_letters WHERE id = $1', [answer.body.operationId])
        return found.length === 1
      })
      expect(await tablesWith(secret)).toEqual([])
      const letters = await get(holder, `/api/v1/dead-letters?queue=${queue}`)
      expect([letters.status, letters.text.includes(secret)]).toEqual([200, false])
    } finally {
      await fleet.sql('DROP FUNCTION public.refuse() CASCADE')
    }
  })
})

it.each([
  { payload: null },
  { payload: '' },
  { payload: 'text\u2028 \u001e \u{1f600}' },
  { payload: { a: [{ b: 1e-300 }] } },
  { payload: 'x'.repeat(300_000) },
])('whatever it is, it comes out as it went in', async ({ payload }) => {
  await pushed(holder, [item(payload)])
  await drained(holder, await push(holder, [item(payload)], later))
  expect(dataOf(await take(holder, queue, { batch: 2 }))).toEqual([payload, payload])
})

it('the same payload is never sealed to the same text', async () => {
  await pushed(
    holder,
    Array.from({ length: 20 }, () => item('same')),
  )
  expect(new Set((await stored()).map(({ payload }) => payload)).size).toBe(20)
})

describe('a server without the key', () => {
  it('refuses to make an encrypted queue, and to make one encrypted', async () => {
    const plain = randomUUID()
    await configure(stranger, plain)
    for (const name of [plain, randomUUID()]) {
      const answer = await configure(stranger, name, { encryptionEnabled: true, retryLimit: 9 })
      expectProblem(answer, 400, 'invalid_request')
      expect(answer.body.errors).toMatchObject([{ path: '/options/encryptionEnabled' }])
    }
    const [row] = await fleet.sql('SELECT retry_limit, encryption_enabled FROM spillway.mq_queues WHERE name = $1', [
      plain,
    ])
    expect(row).toEqual({ retry_limit: 3, encryption_enabled: false })
  })

  it.each([{}, later])('refuses each item of the push, and stores nothing (%j)', async (headers) => {
    const other = randomUUID()
    const answer = await push(stranger, [item(secret), { queue: other, payload: secret }], headers)
    expect(answer.status).toBe(201)
    for (const result of pushResults(answer)) {
      expect([result.message_id, result.transaction_id]).toEqual([1, 2].map(() => expect.stringMatching(uuidForm)))
    }
    expect(pushResults(answer)).toMatchObject([
      { index: 0, status: 'failed', code: 'encryption_unavailable', error: expect.stringMatching(/no key/) },
      {
        index: 1,
        status: 'failed',
        code: 'encryption_unavailable',
        error: expect.stringMatching(/Nothing was stored/),
      },
    ])
    expect(await tablesWith(secret)).toEqual([])
    expect(await tablesWith(other)).toEqual([])
  })

  it('takes a transaction back that pushes to such a queue', async () => {
    await pushed(stranger, [{ queue: `plain-${queue}`, payload: 1 }])
    const [message] = await take(stranger, `plain-${queue}`)
    const { transactionId, partitionId } = message ?? {}
    const answer = await transaction(stranger, [
      { type: 'ack', transactionId, partitionId },
      { type: 'push', items: [item(secret)] },
    ])
    expect(answer.body).toMatchObject({ success: false, error: expect.stringMatching(/no key/) })
    expect(await tablesWith(secret)).toEqual([])
    if (message !== undefined) expect(await ack(stranger, message)).toMatchObject({ success: true })
  })

  it.each<PopOptions>([{}, { autoAck: true }, { wait: true, timeout: 1_000 }, { consumerGroup: 'g' }])(
    'pops 503 (%j), and one with the key gets the messages at once, as if nobody had asked',
    async (options) => {
      await pushed(holder, [item('a'), item('b')])
      const answer = await pop(stranger, queue, { batch: 2, ...options })
      expectProblem(answer, 503, 'store_unavailable')
      expect(answer.body.error).toEqual(expect.stringMatching(/no key/))
      expect(await take(holder, queue, { batch: 2, ...options })).toMatchObject([
        { data: 'a', retryCount: 0 },
        { data: 'b', retryCount: 0 },
      ])
      expect(await dead()).toEqual([])
    },
  )

  it('continues for queues without encryption', async () => {
    const plain = randomUUID()
    await pushed(stranger, [{ queue: plain, payload: 'plain' }])
    expect(dataOf(await take(stranger, plain))).toEqual(['plain'])
  })
})

describe('a row that was changed', () => {
  const change = {
    'one bit of it': (payload: string) => {
      const bytes = Buffer.from(payload, 'base64')
      bytes[14] = (bytes[14] ?? 0) ^ 1
      return bytes.toString('base64')
    },
    'cut short': (payload: string) => payload.slice(0, 20),
    empty: () => '',
    'no base64': () => '{"not": "sealed"}',
  }

  const tamper = async (id: string, to: string) =>
    fleet.sql('UPDATE spillway.mq_messages SET payload = $2 WHERE id = $1', [id, to])

  it.each(Object.keys(change) as (keyof typeof change)[])(
    '%s: a dead letter, and the others are delivered',
    async (how) => {
      await pushed(
        holder,
        ['a', 'b', 'c'].map((name) => item(name, { transactionId: name })),
      )
      const row = at(await stored(), 1)
      await tamper(row.id, change[how](row.payload))
      const found = await take(holder, queue, { batch: 3 })
      expect(dataOf(found)).toEqual(['a', 'c'])
      expect(await dead()).toMatchObject([{ transaction_id: 'b', error: expect.stringMatching(/decrypted/) }])
      await acked(holder, found)
      await pushed(holder, [item('d')])
      expect(dataOf(await take(holder, queue, { batch: 3 }))).toEqual(['d'])
    },
  )

  it.each<PopOptions>([{}, { autoAck: true }, { wait: true, timeout: 5_000 }])(
    'at the head and alone (%j): a dead letter, and the next one is delivered',
    async (options) => {
      await pushed(
        holder,
        ['a', 'b'].map((name) => item(name, { transactionId: name })),
      )
      await tamper(at(await stored(), 0).id, 'AAAA')
      await until('the next one', async () => {
        const found = await take(holder, queue, options)
        if (found.length > 0) expect(dataOf(found)).toEqual(['b'])
        return found.length > 0
      })
      expect(await dead()).toMatchObject([{ transaction_id: 'a' }])
    },
  )

  it('moved to another partition: it does not open there', async () => {
    for (const partition of ['p', 'q']) await pushed(holder, [item(partition, { partition })])
    const [p, q] = await stored()
    await tamper(p?.id ?? '', q?.payload ?? '')
    expect(dataOf(await take(holder, queue, { batch: 2, partitions: 2 }))).toEqual(['q'])
    expect(await dead()).toHaveLength(1)
  })

  it('exchanged with another of its partition: neither opens', async () => {
    await pushed(holder, [item('a'), item('b')])
    const [a, b] = await stored()
    await tamper(a?.id ?? '', b?.payload ?? '')
    await tamper(b?.id ?? '', a?.payload ?? '')
    expect(dataOf(await take(holder, queue, { batch: 2 }))).toEqual([])
    expect(await dead()).toHaveLength(2)
  })
})

describe('an instance that does not know yet that the queue is encrypted', () => {
  /** Behind the backs of all instances; each of them knows of the queue already. */
  beforeEach(async () => {
    queue = randomUUID()
    for (const server of [holder, stranger]) await pushed(server, [item('before')])
    await fleet.sql('UPDATE spillway.mq_queues SET encryption_enabled = true WHERE name = $1', [queue])
  })
  const sealedOf = async () => (await stored()).map(({ sealed }) => sealed)

  it('with the key: the message is stored, sealed', async () => {
    const results = await pushed(holder, [item(secret), { queue: `other-${queue}`, payload: 1 }])
    expect(results.map(({ status, index }) => [index, status])).toEqual([
      [0, 'queued'],
      [1, 'queued'],
    ])
    expect(await sealedOf()).toEqual([false, false, true])
    expect(await tablesWith(secret)).toEqual([])
    expect(dataOf(await take(holder, queue, { batch: 3 }))).toEqual(['before', 'before', secret])
  })

  it('without the key: the message is refused', async () => {
    expect(await pushed(stranger, [item(secret)])).toMatchObject([
      { status: 'failed', code: expect.stringMatching(/^encryption_/) },
    ])
    expect(await sealedOf()).toEqual([false, false])
    expect(await tablesWith(secret)).toEqual([])
  })

  it('pushes that it queued meanwhile are not lost, and are stored encrypted', async () => {
    const answer = await push(holder, [item(secret)], later)
    expect(answer.status).toBe(202)
    await drained(holder, answer)
    expect(await sealedOf()).toEqual([false, false, true])
    expect(await tablesWith(secret)).toEqual([])
  })
})

it('pushes that wait when a queue becomes encrypted are not lost', async () => {
  queue = randomUUID()
  await pauseLane(holder, queue)
  const answer = await push(holder, [item('accepted')])
  expect(answer.status).toBe(202)
  await configure(holder, queue, { encryptionEnabled: true })
  await resumeLane(holder, queue)
  await drained(holder, answer)
  expect(dataOf(await take(holder, queue))).toEqual(['accepted'])
})

describe('the key', () => {
  it('is in no log and no list of settings', async () => {
    await pushed(holder, [item(secret)])
    await take(holder, queue)
    const shown = [`${holder.stdout()}${holder.stderr()}`]
    for (const args of [['config'], ['config', '--json']]) {
      const { code, stdout, stderr } = await runProgram(keyed, { args })
      expect(code).toBe(0)
      expect(stdout).toContain('SPILLWAY_ENCRYPTION_KEY')
      shown.push(stdout + stderr)
    }
    for (const text of shown) {
      expect(text.length).toBeGreaterThan(0)
      for (const form of [key, key.toUpperCase(), Buffer.from(key, 'hex').toString('base64'), key.slice(0, 16)]) {
        expect(text).not.toContain(form)
      }
    }
    expect(shown[0]).not.toContain(secret)
  })

  it.each(['', 'short', 'g'.repeat(64), `${key}00`, key.slice(2), ` ${key.slice(1)}`])(
    'that is none stops the start, and is not shown (%#)',
    async (given) => {
      const { code, stdout, stderr } = await runProgram(
        { DATABASE_URL: fleet.url, SPILLWAY_PORT: '0', SPILLWAY_ENCRYPTION_KEY: given },
        { args: ['serve'] },
      )
      expect(code).not.toBe(0)
      expect(stderr).toMatch(/SPILLWAY_ENCRYPTION_KEY.*64 hexadecimal digits/s)
      if (given.length > 20) expect(stdout + stderr).not.toContain(given.trim().slice(0, 20))
    },
  )
})
