/** Idempotency-Key: one effect per key, identity and route, at any concurrency. */
import { afterAll, afterEach, beforeAll, describe, expect, it } from 'vitest'
import { freshDatabase, type TestDatabase } from '../../../spillway/test/setup/database.js'
import {
  endAll,
  finishes,
  latch,
  type ServerProcess,
  startServer,
  startTarget,
  submit,
  type Target,
  until,
} from '../server-process.js'

let database: TestDatabase
let server: ServerProcess
let other: ServerProcess
let target: Target
let gate = latch()
let keys = 0

beforeAll(async () => {
  database = await freshDatabase()
  target = await startTarget(async ({ path }, response) => {
    if (path.startsWith('/held')) await gate.opened
    const status = Number(/status=(\d+)/.exec(path)?.[1] ?? 200)
    response.writeHead(status, { 'content-type': 'application/json' }).end(JSON.stringify({ n: target.calls.length }))
  })
  const env = {
    DATABASE_URL: database.url,
    SPILLWAY_FORWARD_ALLOW: target.origin,
    SPILLWAY_DIRECT_WAIT_MS: '300',
    SPILLWAY_RETRY_BASE_MS: '20',
  }
  ;[server, other] = await Promise.all([startServer(env), startServer(env)])
})

afterEach(() => {
  gate.open()
  gate = latch()
})

afterAll(async () => {
  await endAll()
  await target.close()
  await database.drop()
})

const newKey = () => ({ 'idempotency-key': `key-${keys++}` })
const callsTo = (path: string) => target.calls.filter((c) => c.path === path)

describe('the same key and body', () => {
  it('gives the stored answer again, from any instance', async () => {
    const key = newKey()
    const first = await submit(server, `${target.origin}/same`, { queue: 'same' }, key)
    expect(first.status).toBe(201)
    expect(first.headers.get('idempotent-replayed')).toBeNull()
    for (const instance of [server, other]) {
      const again = await submit(instance, `${target.origin}/same`, { queue: 'same' }, key)
      expect(again.status).toBe(201)
      expect(again.body).toEqual(first.body)
      expect(again.headers.get('idempotent-replayed')).toBe('true')
    }
    expect(callsTo('/same')).toHaveLength(1)
  })

  it('gives a stored failure again', async () => {
    const key = newKey()
    const first = await submit(server, `${target.origin}/f?status=404`, { queue: 'f' }, key)
    const again = await submit(server, `${target.origin}/f?status=404`, { queue: 'f' }, key)
    expect(first.body.status).toBe('failed')
    expect(again.status).toBe(201)
    expect(again.body).toEqual(first.body)
    expect(again.headers.get('idempotent-replayed')).toBe('true')
  })

  it('gives a 202 again, with the same ticket', async () => {
    const key = { ...newKey(), prefer: 'respond-async' }
    const first = await submit(server, `${target.origin}/q`, { queue: 'q202', delay_seconds: 30 }, key)
    const again = await submit(server, `${target.origin}/q`, { queue: 'q202', delay_seconds: 30 }, key)
    expect(again.status).toBe(202)
    expect(again.body.operationId).toBe(first.body.operationId)
    expect(again.headers.get('location')).toBe(first.headers.get('location'))
    expect(again.headers.get('idempotent-replayed')).toBe('true')
  })

  it('is 409 while the first is still in progress, and the ticket once that was given', async () => {
    const key = newKey()
    const first = submit(server, `${target.origin}/held?p`, { queue: 'progress' }, key)
    await until('it runs', () => callsTo('/held?p').length === 1)
    const during = await submit(other, `${target.origin}/held?p`, { queue: 'progress' }, key)
    expect(during.status).toBe(409)
    expect(during.body.code).toBe('idempotency_in_progress')
    const ticket = await first
    expect(ticket.body.reason).toBe('still_running')
    const after = await submit(other, `${target.origin}/held?p`, { queue: 'progress' }, key)
    expect(after.status).toBe(202)
    expect(after.body.operationId).toBe(ticket.body.operationId)
    gate.open()
    await finishes(server, ticket.body.operationId)
    const done = await submit(server, `${target.origin}/held?p`, { queue: 'progress' }, key)
    expect(done.body.operationId).toBe(ticket.body.operationId)
    expect(done.headers.get('idempotent-replayed')).toBe('true')
    expect(callsTo('/held?p')).toHaveLength(1)
  })

  it('is the same text: spaces and the order of members make another body', async () => {
    const key = newKey()
    const text = (body: string) =>
      fetch(`${server.origin}/api/v1/operations`, {
        method: 'POST',
        headers: { 'content-type': 'application/json', ...key },
        body,
      })
    const one = await text(`{"type":"http.request","queue":"m","payload":{"url":"${target.origin}/m"}}`)
    expect(one.status).toBe(201)
    const spaced = await text(`{ "type":"http.request", "queue":"m", "payload":{"url":"${target.origin}/m"} }`)
    expect(spaced.status).toBe(422)
    const turned = await text(`{"queue":"m","type":"http.request","payload":{"url":"${target.origin}/m"}}`)
    expect(turned.status).toBe(422)
    const same = await text(`{"type":"http.request","queue":"m","payload":{"url":"${target.origin}/m"}}`)
    expect([same.status, same.headers.get('idempotent-replayed')]).toEqual([201, 'true'])
  })

  it('has one effect at any concurrency, over two instances', async () => {
    const key = newKey()
    const answers = await Promise.all(
      Array.from({ length: 40 }, (_, n) =>
        submit(n % 2 === 0 ? server : other, `${target.origin}/herd`, { queue: 'herd' }, key),
      ),
    )
    // On a busy machine the first one may be queued.
    const fresh = answers.filter((a) => a.status < 300 && a.headers.get('idempotent-replayed') === null)
    expect(fresh).toHaveLength(1)
    for (const answer of answers) {
      expect([201, 202, 409]).toContain(answer.status)
      if (answer.status !== 409) expect(answer.body.operationId).toBe(fresh[0]?.body.operationId)
    }
    expect(callsTo('/herd')).toHaveLength(1)
  })
})

it('the same key and another body is 422, and does nothing', async () => {
  const key = newKey()
  await submit(server, `${target.origin}/one`, { queue: 'other-body' }, key)
  const mismatch = await submit(server, `${target.origin}/two`, { queue: 'other-body' }, key)
  expect(mismatch.status).toBe(422)
  expect(mismatch.body.code).toBe('idempotency_mismatch')
  expect(callsTo('/two')).toHaveLength(0)
})

it('is scoped to the identity', async () => {
  const key = newKey()
  const ann = await submit(server, `${target.origin}/scoped`, { queue: 'scope' }, { ...key, 'x-user-id': 'ann' })
  const bob = await submit(server, `${target.origin}/scoped`, { queue: 'scope' }, { ...key, 'x-user-id': 'bob' })
  expect(bob.status).toBe(201)
  expect(bob.body.operationId).not.toBe(ann.body.operationId)
  expect(bob.headers.get('idempotent-replayed')).toBeNull()
})

it('a request that was refused as invalid leaves the key free', async () => {
  const key = newKey()
  expect((await submit(server, 'nonsense', { queue: 'free' }, key)).status).toBe(400)
  expect((await submit(server, 'http://127.0.0.1:1/', { queue: 'free' }, key)).status).toBe(403)
  expect((await submit(server, `${target.origin}/free`, { queue: 'free' }, key)).status).toBe(201)
})

it.each([
  ['1 character', 'k', 201],
  ['255 characters', 'k'.repeat(255), 201],
  ['256 characters', 'k'.repeat(256), 400],
  ['none', '', 400],
])('a key of %s', async (_, key, status) => {
  const answer = await submit(server, `${target.origin}/length`, { queue: 'length' }, { 'idempotency-key': key })
  expect(answer.status).toBe(status)
})

it('a refusal is not stored', async () => {
  const full = await startServer({
    DATABASE_URL: database.url,
    SPILLWAY_FORWARD_ALLOW: target.origin,
    SPILLWAY_DB_SCHEMA: 'full',
    SPILLWAY_OPERATIONS_MAX: '2',
  })
  const [one, two] = await Promise.all(
    [1, 2].map((n) => submit(full, `${target.origin}/full`, { queue: `full${n}`, delay_seconds: 60 })),
  )
  const key = newKey()
  const refused = await until('the queue is full', async () => {
    const answer = await submit(full, `${target.origin}/refused`, { queue: 'full3', delay_seconds: 1 }, key)
    return answer.status === 503 && answer
  })
  expect(refused.body.code).toBe('queue_full')
  expect(Number(refused.headers.get('retry-after'))).toBeGreaterThanOrEqual(1)
  for (const answer of [one, two]) {
    await fetch(`${full.origin}/api/v1/operations/${answer?.body.operationId}/cancel`, { method: 'POST' })
  }
  const accepted = await until('there is place again', async () => {
    const answer = await submit(full, `${target.origin}/refused`, { queue: 'full3', delay_seconds: 1 }, key)
    return answer.status < 300 && answer
  })
  expect(accepted.headers.get('idempotent-replayed')).toBeNull()
})
