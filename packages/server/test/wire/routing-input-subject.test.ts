/** Messages that a stranger publishes straight to the subject: each is answered or dead-lettered whole, once. */
import { randomBytes, randomUUID } from 'node:crypto'
import { afterAll, beforeAll, describe, expect, it } from 'vitest'
import { freshDatabase, type TestDatabase } from '../../../spillway/test/setup/database.js'
import { type NatsServer, startNats } from '../../../spillway/test/setup/nats.js'
import {
  bytesOf,
  createdPolicy,
  deadLetters,
  deadLettersPath,
  decided,
  decidePath,
  decisionForm,
  died,
  expectRefused,
  policiesPath,
  policy,
  routeTask,
  type Stranger,
  stranger,
  taskOfBytes,
  unhurried,
  without,
} from '../routing-input-calls.js'
import { call, endAll, get, post, type ServerProcess, sample, startServer } from '../server-process.js'

const bodyLimit = 2_048
let database: TestDatabase
let nats: NatsServer
let server: ServerProcess
let outside: Stranger

beforeAll(async () => {
  database = await freshDatabase()
  nats = await startNats()
  server = await startServer({
    ...unhurried,
    DATABASE_URL: database.url,
    NATS_URL: nats.url,
    SPILLWAY_BODY_LIMIT_BYTES: String(bodyLimit),
  })
  outside = await stranger(nats.url)
})

afterAll(async () => {
  await outside.close()
  await endAll()
  await nats.stop()
  await database.drop()
})

/** By what the router says of it. None of them can be read as a task. */
const invalid: readonly (readonly [name: string, code: string, make: () => Uint8Array])[] = [
  ['garbage', 'SCHEMA_VALIDATION_FAILED', () => Buffer.concat([Buffer.from([0xff, 0x00, 0xfe]), randomBytes(64)])],
  ['cut off JSON', 'SCHEMA_VALIDATION_FAILED', () => bytesOf(`{"version":"1","x":"${randomUUID()}"`)],
  ['more than the limit', 'PAYLOAD_TOO_LARGE', () => bytesOf(taskOfBytes(bodyLimit + 1))],
  ['another version', 'VERSION_UNSUPPORTED', () => bytesOf(routeTask({ version: '2' }))],
  ['no tenant', 'SCHEMA_VALIDATION_FAILED', () => bytesOf(without(routeTask(), 'tenant_id'))],
  ['a blank tenant', 'CORRELATION_FIELDS_INVALID', () => bytesOf(routeTask({ tenant_id: ' ' }))],
  ['a request id that is none', 'CORRELATION_FIELDS_INVALID', () => bytesOf(routeTask({ request_id: 'first' }))],
]

/** These can, and are not decided. */
const undecided: readonly (readonly [
  name: string,
  code: string,
  make: () => Record<string, unknown>,
  headers: () => Record<string, string>,
])[] = [
  ['a policy that is not there', 'POLICY_NOT_FOUND', () => routeTask({ policy_id: 'nowhere' }), () => ({})],
  ['a deadline that has passed', 'DEADLINE_EXPIRED', () => routeTask(), () => ({ 'Spillway-Deadline': '1' })],
  [
    'a deadline that has passed, as a date',
    'DEADLINE_EXPIRED',
    () => routeTask(),
    () => ({ 'Spillway-Deadline': new Date(Date.now() - 1_000).toISOString() }),
  ],
]

/** Handed out once, and not kept: it will not come again. */
async function expectNeverAgain(before: number): Promise<void> {
  await outside.settled()
  expect((await outside.deliveries()) - before).toBe(1)
}

describe('without somebody to answer', () => {
  it.each(invalid)('%s becomes a complete dead letter with its reason', async (_, code, make) => {
    const before = await outside.deliveries()
    const data = make()
    await outside.publish(data)
    expect(await died(server, data)).toMatchObject({ reason: code, deliveries: 1, detail: expect.stringMatching(/./) })
    await expectNeverAgain(before)
  })

  it('nothing is dead-lettered', async () => {
    const before = await outside.deliveries()
    await outside.publish(new Uint8Array())
    expect(await died(server, new Uint8Array())).toMatchObject({ reason: 'PAYLOAD_TOO_SMALL', data_base64: '' })
    await expectNeverAgain(before)
  })

  it.each(undecided)('%s becomes a complete dead letter with its reason', async (_, code, make, headers) => {
    const before = await outside.deliveries()
    const data = bytesOf(make())
    await outside.publish(data, headers())
    expect(await died(server, data)).toMatchObject({ reason: code, deliveries: 1 })
    await expectNeverAgain(before)
  })

  it('a task in order is decided, and can be read', async () => {
    const task = routeTask()
    await outside.publish(bytesOf(task))
    expect((await decided(server, task.request_id)).decision).toMatchObject(decisionForm)
    await outside.settled()
  })
})

describe('with an inbox to answer to', () => {
  it.each(invalid)('%s is answered, and dead-lettered too', async (_, code, make) => {
    const before = await outside.deliveries()
    const data = make()
    expect(await outside.ask(data)).toMatchObject({ ok: false, error: { code, message: expect.stringMatching(/./) } })
    expect((await died(server, data)).reason).toBe(code)
    await expectNeverAgain(before)
  })

  it.each(undecided)('%s is answered and not dead-lettered', async (_, code, make, headers) => {
    const before = await outside.deliveries()
    const task = make()
    const answer = await outside.ask(bytesOf(task), headers())
    expect(answer).toMatchObject({ ok: false, error: { code }, context: { request_id: task.request_id } })
    await expectNeverAgain(before)
    const bytes = Buffer.from(bytesOf(task)).toString('base64')
    expect((await deadLetters(server)).filter((letter) => letter.data_base64 === bytes)).toEqual([])
  })

  it('nothing is answered', async () => {
    expect(await outside.ask(new Uint8Array())).toMatchObject({ ok: false, error: { code: 'PAYLOAD_TOO_SMALL' } })
  })

  it('the answer names the request of a task of another version', async () => {
    const task = routeTask({ version: '9', trace_id: 'cd'.repeat(16) })
    const { context } = await outside.ask(bytesOf(task))
    expect(context).toEqual({ request_id: task.request_id, trace_id: 'cd'.repeat(16) })
  })

  it('a task in order is answered with the decision', async () => {
    const task = routeTask()
    const answer = await outside.ask(bytesOf(task))
    expect(answer).toMatchObject({ ok: true, decision: decisionForm, context: { request_id: task.request_id } })
  })

  it('a deadline that is still to come changes nothing', async () => {
    const answer = await outside.ask(bytesOf(routeTask()), { 'Spillway-Deadline': `${Date.now() + 60_000}` })
    expect(answer.ok).toBe(true)
  })

  it('a deadline that is none is no deadline', async () => {
    const answer = await outside.ask(bytesOf(routeTask()), { 'Spillway-Deadline': 'soon' })
    expect(answer.ok).toBe(true)
  })

  it('the trace of the header is the trace of the answer', async () => {
    const traceparent = `00-${'ef'.repeat(16)}-${'12'.repeat(8)}-01`
    expect((await outside.ask(bytesOf(routeTask()), { traceparent })).context).toMatchObject({
      trace_id: 'ef'.repeat(16),
    })
  })

  it.each([{}, { traceparent: 'garbage' }, { traceparent: `00-${'0'.repeat(32)}-${'12'.repeat(8)}-01` }])(
    'a task without a trace that can be read gets one (%j)',
    async (headers) => {
      expect((await outside.ask(bytesOf(routeTask()), headers)).context).toMatchObject({
        trace_id: expect.stringMatching(/^(?!0{32})[\da-f]{32}$/),
      })
    },
  )

  it('a key that was used for another task is a violation', async () => {
    const task = routeTask({ idempotency_key: 'twice' })
    await outside.ask(bytesOf(task))
    const other = { ...task, task: { type: 'image', payload: 1 } }
    expect(await outside.ask(bytesOf(other))).toMatchObject({ ok: false, error: { code: 'IDEMPOTENCY_VIOLATION' } })
  })
})

describe('with an answer address that is no inbox', () => {
  it('nothing is written to it', async () => {
    const place = `orders.${randomUUID()}`
    const heard: string[] = []
    outside.nc.subscribe(place, { callback: (_, message) => void heard.push(message.string()) })
    await outside.publish(bytesOf(routeTask()), { 'Spillway-Reply-To': place })
    // Answers leave in the order of their messages: this one is behind it.
    await outside.ask(bytesOf(routeTask()))
    await outside.settled()
    await outside.nc.flush()
    expect(heard).toEqual([])
  })

  it.each(['orders.created', '', '_INBOX.*'])('an undecidable task is dead-lettered (%j)', async (place) => {
    const data = bytesOf(routeTask({ policy_id: 'nowhere' }))
    await outside.publish(data, { 'Spillway-Reply-To': place })
    await outside.settled()
    expect((await died(server, data, 3_000)).reason).toBe('POLICY_NOT_FOUND')
  })
})

describe('dead letters', () => {
  it('keep the headers of the message', async () => {
    const data = bytesOf(routeTask({ version: '3' }))
    await outside.publish(data, { 'X-Source': 'billing', traceparent: 'nonsense' })
    expect((await died(server, data)).headers).toMatchObject({ 'X-Source': 'billing', traceparent: 'nonsense' })
  })

  it('are redriven once the missing part exists', async () => {
    const policyId = `late-${randomUUID()}`
    const task = routeTask({ policy_id: policyId })
    const data = bytesOf(task)
    await outside.publish(data)
    const { id } = await died(server, data)
    await createdPolicy(server, { policy_id: policyId })
    const answer = await post(server, `${deadLettersPath}/redrive`, { ids: [id] })
    expect(answer.body).toEqual({ moved: 1, skipped: 0 })
    expect((await decided(server, task.request_id)).decision).toMatchObject({
      provider_id: expect.stringMatching(/^(swift|cheap)$/),
    })
    expect((await deadLetters(server)).map((letter) => letter.id)).not.toContain(id)
  })

  it('become complete dead letters again if nothing has changed', async () => {
    const data = bytesOf(routeTask({ policy_id: 'still-nowhere' }))
    await outside.publish(data)
    const { id } = await died(server, data)
    await post(server, `${deadLettersPath}/redrive`, { ids: [id] })
    await outside.settled()
    const again = await died(server, data)
    expect(again.id).not.toBe(id)
    expect(again.reason).toBe('POLICY_NOT_FOUND')
  })

  it('that are late are not late when they are redriven', async () => {
    const task = routeTask()
    await outside.publish(bytesOf(task), { 'Spillway-Deadline': '1' })
    const { id } = await died(server, bytesOf(task))
    await post(server, `${deadLettersPath}/redrive`, { ids: [id] })
    expect((await decided(server, task.request_id)).decision).toMatchObject(decisionForm)
  })

  it('are removed for good', async () => {
    const data = randomBytes(32)
    await outside.publish(data)
    const { id } = await died(server, data)
    const answer = await call(server, 'DELETE', deadLettersPath, { body: { ids: [id, '999999'] } })
    expect(answer.body).toEqual({ removed: 1 })
    expect((await deadLetters(server)).map((letter) => letter.id)).not.toContain(id)
  })

  it('that are not there are skipped', async () => {
    const answer = await post(server, `${deadLettersPath}/redrive`, { ids: ['999998', '999999'] })
    expect(answer.body).toEqual({ moved: 0, skipped: 2 })
  })

  it('are listed without long values; a single one is complete', async () => {
    const long = randomBytes(4_097)
    const fits = randomBytes(4_096)
    await outside.publish(long, { 'x-long': 'h'.repeat(5_000) })
    await outside.publish(fits)
    const { id, headers } = await died(server, long)
    expect(headers['x-long'] ?? headers['X-Long']).toHaveLength(5_000)
    await died(server, fits)
    const { items } = (await get(server, `${deadLettersPath}?limit=200`)).body
    expect(items.find((letter) => letter.id === id)).toMatchObject({
      ...{ data_base64: null, data_bytes: 4_097, headers: null, headers_bytes: expect.any(Number), truncated: true },
    })
    expect(items.some(({ data_base64 }) => data_base64 === fits.toString('base64'))).toBe(true)
    for (const none of ['x', '0', '999999']) {
      expectRefused(await get(server, `${deadLettersPath}/${none}`), 404, 'not_found')
    }
  })

  it('are listed page by page, each once', async () => {
    for (let n = 0; n < 5; n++) await outside.publish(randomBytes(16))
    await outside.settled()
    const all = (await deadLetters(server)).map(({ id }) => id)
    const paged: string[] = []
    for (let cursor: string | null = null; ; ) {
      const { body } = await get(server, `${deadLettersPath}?limit=3${cursor === null ? '' : `&cursor=${cursor}`}`)
      paged.push(...body.items.map(({ id }) => id))
      cursor = body.next_cursor
      if (cursor === null) break
    }
    expect(paged).toEqual(all)
  })

  it.each([
    ['an id that is no number', { ids: ['x'] }],
    ['no ids', { ids: [] }],
    ['an unknown member', { ids: ['1'], all: true }],
    ['a list', ['1']],
  ])('redrive refuses %s', async (_, body) => {
    const answer = await post(server, `${deadLettersPath}/redrive`, body)
    expectRefused(answer, 400, 'invalid_request', 'SCHEMA_VALIDATION_FAILED')
  })

  it.each(['limit=0', 'limit=201', 'limit=x', 'cursor=x', 'page=2'])('the list refuses %s', async (query) => {
    const answer = await get(server, `${deadLettersPath}?${query}`)
    expectRefused(answer, 400, 'invalid_request', 'SCHEMA_VALIDATION_FAILED')
  })

  it('are counted by reason', async () => {
    const reason = 'VERSION_UNSUPPORTED'
    const count = async () =>
      sample((await get(server, '/metrics')).text, 'router_intake_dead_letters_total', { reason })
    const before = (await count()) ?? 0
    const data = bytesOf(routeTask({ version: '4' }))
    await outside.publish(data)
    await died(server, data)
    await outside.settled()
    expect(await count()).toBe(before + 1)
  })
})

it('a flood of garbage among good ones costs none of the good ones', async () => {
  const good = Array.from({ length: 40 }, () => routeTask())
  const bad = Array.from({ length: 40 }, () => randomBytes(40))
  await Promise.all(good.flatMap((task, n) => [outside.publish(bytesOf(task)), outside.publish(bad[n] ?? '')]))
  await outside.settled()
  for (const task of good) expect((await decided(server, task.request_id)).ok).toBe(true)
  const dead = new Set((await deadLetters(server)).map(({ data_base64 }) => data_base64))
  expect(bad.filter((data) => !dead.has(data.toString('base64')))).toEqual([])
})

it('the server has neither fallen nor complained of a fault of its own', async () => {
  await outside.ask(randomBytes(32))
  const answer = await post(server, policiesPath, policy())
  expect(answer.status).toBe(201)
  expect((await get(server, `${decidePath}/${randomUUID()}`)).status).toBe(404)
  expect(server.logs().filter(({ level }) => level === 'error' || level === 'fatal')).toEqual([])
})
