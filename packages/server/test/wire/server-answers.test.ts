/** POST /api/v1/operations: done, queued or not now, as the caller sees it. */
import { afterAll, afterEach, beforeAll, describe, expect, it } from 'vitest'
import { freshDatabase, type TestDatabase } from '../../../spillway/test/setup/database.js'
import {
  type Body,
  endAll,
  finishes,
  get,
  latch,
  operation,
  post,
  type ServerProcess,
  startServer,
  startTarget,
  submit,
  type Target,
  until,
} from '../server-process.js'

const uuid = /^[0-9a-f]{8}-[0-9a-f]{4}-7[0-9a-f]{3}-[89ab][0-9a-f]{3}-[0-9a-f]{12}$/

let database: TestDatabase
let server: ServerProcess
let target: Target
let gate = latch()

beforeAll(async () => {
  database = await freshDatabase()
  target = await startTarget(async ({ path }, response) => {
    const status = Number(/status=(\d+)/.exec(path)?.[1] ?? 200)
    if (path.startsWith('/held')) await gate.opened
    if (path.startsWith('/redirect')) response.setHeader('location', decodeURIComponent(path.split('to=')[1] ?? ''))
    if (path.startsWith('/large')) return void response.end('x'.repeat(100_000))
    response.writeHead(status, { 'content-type': 'application/json' }).end(JSON.stringify({ path }))
  })
  server = await startServer({
    DATABASE_URL: database.url,
    SPILLWAY_FORWARD_ALLOW: target.origin,
    SPILLWAY_DIRECT_WAIT_MS: '300',
    SPILLWAY_RETRY_BASE_MS: '50',
  })
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

describe('ran now', () => {
  it('is answered 201 with what the target said', async () => {
    const { status, body } = await submit(server, `${target.origin}/now`, { queue: 'now', payload: { body: { a: 1 } } })
    expect(status).toBe(201)
    expect(body).toMatchObject({
      status: 'executed',
      operationId: expect.stringMatching(uuid),
      result: { status: 200, headers: { 'content-type': 'application/json' }, body: { path: '/now' } },
    })
    const [made] = target.calls.filter((c) => c.path === '/now')
    expect(made).toMatchObject({ method: 'POST', body: '{"a":1}' })
    expect(made?.headers['idempotency-key']).toBe(body.operationId)
    expect(await operation(server, body.operationId)).toMatchObject({
      id: body.operationId,
      operation_type: 'http.request',
      queue: 'now',
      partition: 'Default',
      priority: 5,
      status: 'completed',
      attempt: 1,
      max_attempts: 4,
      retry_count: 0,
      error_message: null,
      queuePosition: null,
      result: { status: 200 },
    })
  })

  it('that failed for good is answered 201 failed, and is a dead letter', async () => {
    const { status, body } = await submit(server, `${target.origin}/gone?status=410`, { queue: 'gone' })
    expect(status).toBe(201)
    expect(body).toMatchObject({ status: 'failed', result: { status: 410 } })
    expect(body.error_message).toContain('410')
    const letters = (await get(server, '/api/v1/dead-letters?queue=gone')).body.items
    expect(letters.map((l) => l.id)).toEqual([body.operationId])
    expect(letters[0]).toMatchObject({ status: 'failed', attempt: 1, payload: expect.anything() })
    expect(target.calls.filter((c) => c.path.startsWith('/gone'))).toHaveLength(1)
  })

  it('keeps at most 64 KiB of an answer and says so', async () => {
    const { body } = await submit(server, `${target.origin}/large`, { queue: 'large' })
    expect(body.result.truncated).toBe(true)
    expect(String(body.result.body)).toHaveLength(65_536)
  })

  it('uses method, headers and body as given', async () => {
    await submit(server, `${target.origin}/put`, {
      queue: 'put',
      payload: { method: 'PUT', headers: { 'X-Mine': 'yes', 'content-type': 'text/plain' }, body: 'plain' },
    })
    const [made] = target.calls.filter((c) => c.path === '/put')
    expect(made).toMatchObject({ method: 'PUT', body: 'plain' })
    expect(made?.headers['x-mine']).toBe('yes')
  })
})

describe('202', () => {
  const queued = (reason: string) => ({
    status: 'queued',
    operationId: expect.stringMatching(uuid),
    queuePosition: expect.any(Number),
    estimatedWaitSeconds: expect.any(Number),
    estimatedWait: expect.stringMatching(/^\d+s$/),
    reason,
  })

  it('requested: Prefer: respond-async', async () => {
    const { status, headers, body } = await submit(
      server,
      `${target.origin}/async`,
      { queue: 'async' },
      { prefer: 'respond-async' },
    )
    expect(status).toBe(202)
    expect(body).toEqual(queued('requested'))
    expect(headers.get('location')).toBe(`/api/v1/operations/${body.operationId}`)
    expect(headers.get('preference-applied')).toBe('respond-async')
    expect(body.queuePosition).toBe(0)
    expect(await finishes(server, body.operationId)).toMatchObject({ status: 'completed', result: { status: 200 } })
  })

  it('an estimate counts the delay of the work ahead of it', async () => {
    const wait = async (more = {}) =>
      (await submit(server, `${target.origin}/late`, { queue: 'late', ...more })).body.estimatedWaitSeconds
    expect(await wait({ delay_seconds: 40 })).toBeGreaterThan(39)
    for (const behind of [await wait(), await wait({ delay_seconds: 5 })]) {
      expect(behind).toBeGreaterThan(30)
      expect(behind).toBeLessThan(60)
    }
    expect(await wait({ delay_seconds: 100 })).toBeGreaterThan(99)
  })

  it('requested: a delay, which is kept', async () => {
    const { status, body } = await submit(server, `${target.origin}/delayed`, { queue: 'delayed', delay_seconds: 0.6 })
    expect(status).toBe(202)
    expect(body).toMatchObject({ reason: 'requested' })
    expect(body.estimatedWaitSeconds).toBeGreaterThanOrEqual(0.5)
    expect(body.estimatedWaitSeconds).toBeLessThan(1.5)
    const done = await finishes(server, body.operationId)
    expect(done.latency_seconds).toBeGreaterThanOrEqual(0.6)
    expect(done.latency_seconds).toBeLessThan(3)
  })

  it('still_running: the run outlasts SPILLWAY_DIRECT_WAIT_MS and continues', async () => {
    const answer = await submit(server, `${target.origin}/held`, { queue: 'held' })
    expect(answer.status).toBe(202)
    expect(answer.body).toMatchObject({ reason: 'still_running', queuePosition: 0 })
    expect(answer.ms).toBeGreaterThan(250)
    expect(answer.ms).toBeLessThan(1_500)
    expect(await operation(server, answer.body.operationId)).toMatchObject({ status: 'processing', attempt: 1 })
    gate.open()
    expect(await finishes(server, answer.body.operationId)).toMatchObject({ status: 'completed', attempt: 1 })
    expect(target.calls.filter((c) => c.headers['idempotency-key'] === answer.body.operationId)).toHaveLength(1)
  })

  it('retrying: the first attempt failed in a way that is retried', async () => {
    const { status, body } = await submit(server, `${target.origin}/flaky?status=503`, {
      queue: 'flaky',
      max_retries: 2,
    })
    expect(status).toBe(202)
    expect(body).toMatchObject({ reason: 'retrying', queuePosition: 0 })
    const done = await finishes(server, body.operationId)
    expect(done).toMatchObject({ status: 'failed', attempt: 3, max_attempts: 3, retry_count: 2 })
    expect(done.error_message).toContain('503')
    expect(target.calls.filter((c) => c.headers['idempotency-key'] === body.operationId)).toHaveLength(3)
  })

  it('maintaining_order: something is before it, and 0 is next', async () => {
    const first = await submit(server, `${target.origin}/held?1`, { queue: 'order' })
    expect(first.body.reason).toBe('still_running')
    const places: Body[] = []
    for (const n of [2, 3, 4]) {
      const { status, body } = await submit(server, `${target.origin}/after?${n}`, { queue: 'order' })
      expect(status).toBe(202)
      expect(body).toEqual(queued('maintaining_order'))
      places.push(body)
    }
    expect(places.map((b) => b.queuePosition)).toEqual([0, 1, 2].map((n) => n + (places[0]?.queuePosition ?? 0)))
    const other = await submit(server, `${target.origin}/other`, { queue: 'order', partition: 'another' })
    expect(other.status).toBe(201)
    gate.open()
    for (const { operationId } of places) await finishes(server, operationId)
    const order = target.calls.filter((c) => /^\/(held\?1|after\?)/.test(c.path)).map((c) => c.path)
    expect(order).toEqual(['/held?1', '/after?2', '/after?3', '/after?4'])
  })

  it('queuePosition counts the operations before it: next in its lane is 0', async () => {
    await post(server, '/api/v1/lanes/pause', { queue: 'places' })
    const ids = []
    for (let n = 0; n < 3; n++) {
      const { body } = await submit(server, `${target.origin}/places`, { queue: 'places' })
      expect(body.queuePosition).toBe(n)
      ids.push(body.operationId)
    }
    for (const [n, id] of ids.entries()) expect((await operation(server, id)).queuePosition).toBe(n)
    await post(server, '/api/v1/lanes/resume', { queue: 'places' })
    for (const id of ids) expect((await finishes(server, id)).status).toBe('completed')
  })
})

describe('Prefer: wait', () => {
  it('waits for a queued one and answers with its result', async () => {
    const { status, headers, body } = await submit(
      server,
      `${target.origin}/waited`,
      { queue: 'waited', delay_seconds: 0.3 },
      { prefer: 'wait=10' },
    )
    expect(status).toBe(201)
    expect(body).toMatchObject({ status: 'executed', result: { status: 200 } })
    expect(headers.get('preference-applied')).toBe('wait=10')
  })

  it('waits too when the run itself outlasts the direct wait', async () => {
    const asked = submit(server, `${target.origin}/held?w`, { queue: 'held-w' }, { prefer: 'wait=10' })
    await until('the target is called', () => target.calls.some((c) => c.path === '/held?w'))
    const opener = setTimeout(() => gate.open(), 700)
    const { status, body } = await asked
    clearTimeout(opener)
    expect(status).toBe(201)
    expect(body).toMatchObject({ status: 'executed' })
  })

  it('waits too for one that is retried', async () => {
    const { status, body } = await submit(
      server,
      `${target.origin}/flaky-w?status=500`,
      { queue: 'flaky-w', max_retries: 1 },
      { prefer: 'wait=10' },
    )
    expect(status).toBe(201)
    expect(body).toMatchObject({ status: 'failed', result: { status: 500 } })
  })

  it('answers 202 when the time is over', async () => {
    const answer = await submit(
      server,
      `${target.origin}/late`,
      { queue: 'late', delay_seconds: 30 },
      { prefer: 'wait=1' },
    )
    expect(answer.status).toBe(202)
    expect(answer.headers.get('preference-applied')).toBe('wait=1')
    expect(answer.ms).toBeGreaterThan(900)
    expect(answer.ms).toBeLessThan(3_000)
  })

  it('combines with respond-async', async () => {
    const { status, headers } = await submit(
      server,
      `${target.origin}/both`,
      { queue: 'both' },
      { prefer: 'respond-async, wait=5' },
    )
    expect(status).toBe(201)
    expect(headers.get('preference-applied')).toContain('wait=5')
  })
})

describe('refused', () => {
  it.each([
    ['an origin that is not listed', 'http://127.0.0.1:1/'],
    ['the server itself, once a list is given', 'SELF'],
    ['another scheme', 'https://127.0.0.1/'],
  ])('target_not_allowed: %s', async (_, url) => {
    const { status, body } = await submit(server, url === 'SELF' ? `${server.origin}/demo/echo` : url)
    expect(status).toBe(403)
    expect(body).toMatchObject({ code: 'target_not_allowed', status: 403, instance: '/api/v1/operations' })
  })

  it('a redirect elsewhere is not followed', async () => {
    const elsewhere = await startTarget()
    const { status, body } = await submit(
      server,
      `${target.origin}/redirect?status=307&to=${encodeURIComponent(elsewhere.origin)}`,
      { queue: 'redirect' },
    )
    expect(status).toBe(201)
    expect(body).toMatchObject({ status: 'failed' })
    expect(elsewhere.calls).toHaveLength(0)
    await elsewhere.close()
  })

  it('a redirect on the same origin is followed', async () => {
    const { body } = await submit(server, `${target.origin}/redirect?status=307&to=/landed`, { queue: 'redirect' })
    expect(body).toMatchObject({ status: 'executed', result: { body: { path: '/landed' } } })
  })

  it.each([
    ['no type', { type: undefined }],
    ['an unknown type', { type: 'no.such' }],
    ['no queue', { queue: undefined }],
    ['an empty queue', { queue: '' }],
    ['a queue of 256 characters', { queue: 'x'.repeat(256) }],
    ['a priority of 0', { priority: 0 }],
    ['a priority of 11', { priority: 11 }],
    ['a priority of 1.5', { priority: 1.5 }],
    ['a priority in text', { priority: '5' }],
    ['a negative delay', { delay_seconds: -1 }],
    ['no time', { timeout_seconds: 0 }],
    ['negative retries', { max_retries: -1 }],
    ['an unknown member', { nonsense: true }],
    ['a partition of null', { partition: null }],
    ['a header of ours', { payload: { headers: { 'Idempotency-Key': 'x' } } }],
    ['a header that splits', { payload: { headers: { 'x-a': 'a\r\nx-b: b' } } }],
    ['an unknown method', { payload: { method: 'BREW' } }],
    ['a body with GET', { payload: { method: 'GET', body: 1 } }],
  ])('400: %s', async (_, order) => {
    const { status, headers, body } = await submit(server, `${target.origin}/never`, { queue: 'never', ...order })
    expect(status).toBe(400)
    expect(headers.get('content-type')).toContain('application/problem+json')
    expect(body.code).toBe('invalid_request')
    expect(body.errors.length).toBeGreaterThan(0)
    expect(target.calls.filter((c) => c.path === '/never')).toHaveLength(0)
  })

  it.each(['not a url', '/relative', 'ftp://127.0.0.1/', 'http://user:pw@127.0.0.1/', ''])(
    '400: url %s',
    async (url) => {
      const { status, body } = await submit(server, url)
      expect(status).toBe(400)
      expect(body.errors[0]?.path).toBe('/payload/url')
    },
  )
})

describe('retries', () => {
  it('honours Retry-After, and keeps the lane waiting for its head', async () => {
    let tries = 0
    const busy = await startTarget((received, response) => {
      if (received.path === '/busy' && ++tries === 1) return void response.writeHead(429, { 'retry-after': '1' }).end()
      response.writeHead(200).end()
    })
    const own = await startServer({
      DATABASE_URL: database.url,
      SPILLWAY_FORWARD_ALLOW: busy.origin,
      SPILLWAY_RETRY_BASE_MS: '1',
      SPILLWAY_DB_SCHEMA: 'busy',
    })
    const first = await submit(own, `${busy.origin}/busy`, { queue: 'ra' })
    expect(first.body).toMatchObject({ reason: 'retrying' })
    expect(first.body.estimatedWaitSeconds).toBeGreaterThanOrEqual(0.9)
    const second = await submit(own, `${busy.origin}/behind`, { queue: 'ra' })
    expect(second.body.reason).toBe('maintaining_order')
    await finishes(own, second.body.operationId)
    expect(busy.calls.map((c) => c.path)).toEqual(['/busy', '/busy', '/behind'])
    const [one, two] = busy.calls
    expect((two?.at ?? 0) - (one?.at ?? 0)).toBeGreaterThanOrEqual(990)
    expect(await own.stop()).toEqual({ code: 0, signal: null })
    await busy.close()
  })

  it('backs off with full jitter below a doubling ceiling', async () => {
    const { body } = await submit(server, `${target.origin}/back?status=500`, { queue: 'back', max_retries: 3 })
    await finishes(server, body.operationId)
    const at = target.calls.filter((c) => c.path.startsWith('/back')).map((c) => c.at)
    expect(at).toHaveLength(4)
    // Ceilings of 50, 100 and 200 ms, and the time that a claim takes on a busy machine.
    for (const [n, ceiling] of [50, 100, 200].entries()) {
      expect((at[n + 1] ?? 0) - (at[n] ?? 0)).toBeLessThan(ceiling + 1_500)
    }
  })

  it('408 is retried, a network fault is, and a timeout counts as an attempt', async () => {
    const slow = await submit(server, `${target.origin}/held?t`, {
      queue: 'slow',
      timeout_seconds: 0.2,
      max_retries: 0,
    })
    expect(slow.body).toMatchObject({ status: 'failed' })
    const four08 = await submit(server, `${target.origin}/408?status=408`, { queue: '408', max_retries: 1 })
    expect(four08.body.reason).toBe('retrying')
    expect(await finishes(server, four08.body.operationId)).toMatchObject({ status: 'failed', attempt: 2 })
  })

  it('a dead letter does not block its lane', async () => {
    const dead = await submit(server, `${target.origin}/dead?status=400`, { queue: 'goes-on' })
    expect(dead.body.status).toBe('failed')
    expect((await submit(server, `${target.origin}/alive`, { queue: 'goes-on' })).status).toBe(201)
  })
})
