/** The conformance suite of the bindings: the same requests over every one of them; the answers must be the same. */
import { request } from 'node:http'
import Type from 'typebox'
import { afterAll, afterEach, beforeAll, describe, expect, it } from 'vitest'
import { connections, type DefineOptions, type Definition, FailOperation, halt, rate } from '../../src/index.js'
import type { Intake } from '../../src/intake/intake.js'
import { type Api, type Binding, bindings, chunked, json, neverBusy, serve } from '../bindings-fixture.js'
import { type Bench, bench, eventually, signal } from '../pipeline-fixture.js'

const Order = Type.Object({ item: Type.String() })
/** Any of DefineOptions; `define` cannot infer the types of a part. */
type Options = object
const tea = { item: 'tea' }
const traceId = '0af7651916cd43dd8448eb211c80319c'
const problemJson = 'application/problem+json'

let b: Bench
let intake: Intake
const opened: Api[] = []
beforeAll(async () => {
  b = await bench()
  // So long that only the client's leaving ends a wait.
  intake = await b.intake({ ...neverBusy, directWaitMs: 60_000 })
})
afterEach(() => {
  for (const api of opened.splice(0)) api.close()
})
afterAll(() => b.close())

let made = 0
const customer = (): string => `customer-${++made}`

function define(options: Options = {}, on = intake): Definition {
  return on.define(`orders-${++made}`, {
    body: Order,
    identity: ({ headers }) => headers['x-customer'] ?? 'nobody',
    run: ({ item }: { item: string }) => ({ shipped: item }),
    ...options,
  } as DefineOptions<typeof Order, unknown>)
}

async function mounted(binding: Binding, options: Options = {}, on = intake): Promise<Api> {
  const api = await serve(binding, { intake: on, order: define(options, on) })
  opened.push(api)
  return api
}

/** In the next turn of the event loop: a sender must not keep the server from its turn. */
const later = <Value>(value: Value): Promise<Value> => new Promise((resolve) => setImmediate(resolve, value))

const bodyOf = async (response: Response) => (await response.json()) as Record<string, unknown>

async function problemOf(response: Response): Promise<Record<string, unknown>> {
  expect(response.headers.get('content-type')).toBe(problemJson)
  const problem = await bodyOf(response)
  expect(problem).toMatchObject({ status: response.status, instance: '/orders' })
  expect(response.headers.get('x-request-id')).toBe(problem.trace_id)
  return problem
}

describe.each(bindings)('$name', (binding) => {
  it('runs an order: 201, with the trace of the request', async () => {
    const { call } = await mounted(binding)
    const response = await call('/orders?x=1', json(tea, { traceparent: `00-${traceId}-b7ad6b7169203331-01` }))
    expect(response.status).toBe(201)
    expect(response.headers.get('content-type')).toBe('application/json; charset=utf-8')
    expect(response.headers.get('x-request-id')).toBe(traceId)
    const { operationId, ...rest } = await bodyOf(response)
    expect(rest).toEqual({ status: 'executed', result: { shipped: 'tea' } })
    const plain = await call('/orders', json(tea))
    expect(plain.headers.get('x-request-id')).toMatch(/^[0-9a-f]{32}$/)
    expect(operationId).not.toBe((await bodyOf(plain)).operationId)
  })

  it('runs nothing for a GET, which a crawler may send', async () => {
    let ran = 0
    const { call } = await mounted(binding, { body: undefined, run: () => ran++ })
    for (const method of ['GET', 'HEAD', 'OPTIONS']) {
      expect((await call('/orders', { method })).status).not.toBe(201)
    }
    expect(ran).toBe(0)
  })

  it('takes a chunked body', async () => {
    const { call } = await mounted(binding)
    const response = await call('/orders', chunked(JSON.stringify(tea)))
    expect(response.status).toBe(201)
    expect(await bodyOf(response)).toMatchObject({ result: { shipped: 'tea' } })
  })

  it('takes no bytes as no body, whatever the content type', async () => {
    const { call } = await mounted(binding, { body: undefined, run: (body: unknown) => body ?? 'nothing' })
    const response = await call('/orders', json(''))
    expect(response.status).toBe(201)
    expect(await bodyOf(response)).toMatchObject({ result: 'nothing' })
  })

  it('queues with Prefer: respond-async, and waits with wait=N', async () => {
    const { call } = await mounted(binding)
    const queued = await call('/orders', json(tea, { prefer: 'respond-async' }))
    expect(queued.status).toBe(202)
    expect(queued.headers.get('preference-applied')).toBe('respond-async')
    const { operationId, ...rest } = await bodyOf(queued)
    expect(rest).toMatchObject({ status: 'queued', reason: 'requested' })
    expect(queued.headers.get('location')).toBe(`/api/v1/operations/${operationId}`)
    const waited = await call('/orders', json(tea, { prefer: 'respond-async, wait=30' }))
    expect(waited.status).toBe(201)
    expect(waited.headers.get('preference-applied')).toContain('wait=30')
    expect(await bodyOf(waited)).toMatchObject({ result: { shipped: 'tea' } })
  })

  it('429 beyond a rate: for that identity only, with its headers on both answers', async () => {
    const { call } = await mounted(binding, { gates: [rate({ limit: 1, per: '1h', name: 'hour' })] })
    const [ann, bob] = [customer(), customer()]
    const first = await call('/orders', json(tea, { 'x-customer': ann }))
    expect(first.status).toBe(201)
    expect(first.headers.get('ratelimit-policy')).toBe('"hour";q=1;w=3600')
    expect(first.headers.get('ratelimit')).toMatch(/^"hour";r=0;t=\d+$/)
    expect(first.headers.get('x-ratelimit-remaining')).toBe('0')
    const second = await call('/orders', json(tea, { 'x-customer': ann }))
    expect(second.status).toBe(429)
    expect(second.headers.get('ratelimit-policy')).toBe('"hour";q=1;w=3600')
    expect(second.headers.get('x-ratelimit-limit')).toBe('1')
    const problem = await problemOf(second)
    expect(problem.code).toBe('rate_limited')
    expect(second.headers.get('retry-after')).toBe(String(problem.retry_after_seconds))
    expect((await call('/orders', json(tea, { 'x-customer': bob }))).status).toBe(201)
  })

  it('503 with Retry-After while halted, before a byte of the body is needed', async () => {
    const scope = customer()
    const { call } = await mounted(binding, { gates: [halt({ scope })] })
    await intake.halt('drill', scope)
    const release = signal()
    async function* slow(): AsyncGenerator<string> {
      yield '{"item":'
      await release.promise
      yield '"tea"}'
    }
    // express.json() reads the body before the intake sees the request.
    const body = binding.parsesItself ? json(tea) : chunked(slow())
    const refused = await call('/orders', body)
    expect(refused.status).toBe(503)
    const problem = await problemOf(refused)
    expect(problem.code).toBe('halted')
    expect(refused.headers.get('retry-after')).toBe(String(problem.retry_after_seconds))
    release.fire()
  })

  it('400 for a body that does not fit, and for one that is not JSON', async () => {
    const { call } = await mounted(binding)
    const wrong = await call('/orders', json({ item: 1 }))
    expect(wrong.status).toBe(400)
    expect(await problemOf(wrong)).toMatchObject({ code: 'invalid_request', errors: [{ path: '/item' }] })
    const missing = await call('/orders', json(''))
    expect(missing.status).toBe(400)
    expect(await problemOf(missing)).toMatchObject({ code: 'invalid_request' })
    const malformed = await call('/orders', json('{"item":'))
    expect(malformed.status).toBe(400)
    if (binding.parsesItself) return
    expect(await problemOf(malformed)).toMatchObject({ code: 'invalid_request', errors: [{ path: '' }] })
  })

  it('415 for another media type', async () => {
    const { call } = await mounted(binding)
    const form = await call('/orders', json('item=tea', { 'content-type': 'application/x-www-form-urlencoded' }))
    expect(form.status).toBe(415)
    expect(await problemOf(form)).toMatchObject({ code: 'unsupported_media_type' })
  })

  it('413 for a body over the limit, with a length and without, and not read to its end', async () => {
    const { call } = await mounted(binding)
    const large = await call('/orders', json({ item: 'x'.repeat(1_100_000) }))
    expect(large.status).toBe(413)
    if (!binding.parsesItself) expect(await problemOf(large)).toMatchObject({ code: 'body_too_large' })
    else await large.text()
    const piece = 'x'.repeat(65_536)
    let isWhole = false
    async function* longer(): AsyncGenerator<string> {
      yield '{"item":"'
      for (let n = 0; n < 1_024; n++) yield await later(piece)
      isWhole = true
    }
    const leaving = new AbortController()
    const refused = await call('/orders', { ...chunked(longer()), signal: leaving.signal })
    expect(refused.status).toBe(413)
    // body-parser reads it to its end, and discards it.
    expect(isWhole).toBe(binding.parsesItself === true)
    leaving.abort()
  })

  it('Idempotency-Key: replayed, 422 for another body, 409 in progress, 400 when it is too long', async () => {
    const begun = signal()
    const gate = signal()
    const { call } = await mounted(binding, {
      run: async ({ item }: { item: string }) => {
        if (item !== 'slow') return item
        begun.fire()
        await gate.promise
        return item
      },
    })
    const keyed = (value: unknown, key: string) => call('/orders', json(value, { 'idempotency-key': key }))
    const first = await keyed(tea, 'k1')
    const again = await keyed(tea, 'k1')
    expect(again.status).toBe(201)
    expect(first.headers.get('idempotent-replayed')).toBeNull()
    expect(again.headers.get('idempotent-replayed')).toBe('true')
    expect(await bodyOf(again)).toEqual(await bodyOf(first))
    const mismatch = await keyed({ item: 'milk' }, 'k1')
    expect(mismatch.status).toBe(422)
    expect(await problemOf(mismatch)).toMatchObject({ code: 'idempotency_mismatch' })
    const slow = keyed({ item: 'slow' }, 'k2')
    await begun.promise
    const meanwhile = await keyed({ item: 'slow' }, 'k2').finally(gate.fire)
    expect(meanwhile.status).toBe(409)
    expect(await problemOf(meanwhile)).toMatchObject({ code: 'idempotency_in_progress' })
    expect((await slow).status).toBe(201)
    expect((await keyed(tea, 'k'.repeat(256))).status).toBe(400)
  })

  it('answers as `respond` says', async () => {
    const { call } = await mounted(binding, {
      maxRetries: 0,
      run: ({ item }: { item: string }) => item,
      respond: () => ({ status: 204, headers: { 'x-own': 'yes' }, body: undefined }),
    })
    const own = await call('/orders', json(tea))
    expect(own.status).toBe(204)
    expect(own.headers.get('x-own')).toBe('yes')
  })

  it('a failure for good is a problem: as its handler says, else 500; also when it is replayed', async () => {
    const { call } = await mounted(binding, {
      maxRetries: 0,
      run: ({ item }: { item: string }) => {
        if (item === 'plain') throw new FailOperation('no such item')
        if (item === 'card') {
          throw new FailOperation('card declined', { status: 402, code: 'card_declined', result: { tries: 1 } })
        }
        throw new Error('connect ECONNREFUSED 10.0.0.7:5432')
      },
    })
    const failed = async (item: string, headers = {}) => {
      const response = await call('/orders', json({ item }, headers))
      expect(response.headers.get('x-should-retry')).toBe('false')
      expect(response.headers.get('retry-after')).toBeNull()
      return { response, problem: await problemOf(response) }
    }
    const card = await failed('card', { 'idempotency-key': 'k' })
    expect(card.response.status).toBe(402)
    const declined = { code: 'card_declined', title: 'Operation Failed', detail: 'card declined', result: { tries: 1 } }
    expect(card.problem).toMatchObject({ ...declined, operationId: expect.any(String) })
    const again = await failed('card', { 'idempotency-key': 'k' })
    expect(again.response.headers.get('idempotent-replayed')).toBe('true')
    expect(again.problem).toMatchObject({ ...declined, operationId: card.problem.operationId, status: 402 })
    const waited = await failed('card', { prefer: 'respond-async, wait=30' })
    expect(waited.problem).toMatchObject({ ...declined, status: 402 })
    const plain = await failed('plain')
    expect(plain.problem).toMatchObject({ status: 500, code: 'operation_failed', detail: 'no such item' })
    const unexpected = await failed('error')
    expect(unexpected.problem).toMatchObject({ status: 500, code: 'operation_failed' })
    expect(JSON.stringify(unexpected.problem)).not.toContain('ECONNREFUSED')
  })

  it('frees the permit of a client that leaves while its order runs', async () => {
    const begun = signal()
    const gate = signal()
    const pool = customer()
    const { call } = await mounted(binding, {
      gates: [connections({ perIdentity: 1, total: 1, pool })],
      run: async () => {
        begun.fire()
        await gate.promise
      },
    })
    const leaving = new AbortController()
    const left = call('/orders', { ...json(tea), signal: leaving.signal }).catch(() => 'left')
    await begun.promise
    expect((await call('/orders', json(tea))).status).toBeGreaterThanOrEqual(429)
    leaving.abort()
    await eventually(async () => {
      const other = await call('/orders', json(tea, { prefer: 'respond-async' }))
      return other.status === 202 || undefined
    }, 'the permit to be free').finally(gate.fire)
    await left
    await eventually(() => intake.permitsOf(pool).held === 0 || undefined, 'no permit to be held')
  })

  it('frees the permit of a client that leaves during its body, and runs nothing', async () => {
    const pool = customer()
    let ran = 0
    const { call } = await mounted(binding, {
      gates: [connections({ perIdentity: 1, total: 1, pool })],
      run: () => {
        ran++
      },
    })
    const leaving = new AbortController()
    const never = signal()
    async function* half(): AsyncGenerator<string> {
      yield '{"item":'
      await never.promise
    }
    const left = call('/orders', { ...chunked(half()), signal: leaving.signal }).catch(() => 'left')
    const held = (): number => intake.permitsOf(pool).held
    // express.json() reads the body first, so no permit is taken.
    if (!binding.parsesItself) await eventually(() => held() === 1 || undefined, 'the permit to be taken')
    leaving.abort()
    never.fire()
    await left
    await eventually(() => held() === 0 || undefined, 'no permit to be held')
    expect(ran).toBe(0)
    expect((await call('/orders', json(tea))).status).toBe(201)
  })
})

describe.each(bindings.filter(({ hasSockets }) => hasSockets))('$name, on a socket', (binding) => {
  it('takes Expect: 100-continue', async () => {
    const { port } = await mounted(binding)
    const body = JSON.stringify(tea)
    const status = await new Promise((resolve, reject) => {
      const outgoing = request({
        ...{ host: '127.0.0.1', port, path: '/orders', method: 'POST', agent: false },
        headers: { 'content-type': 'application/json', 'content-length': body.length, expect: '100-continue' },
      })
      outgoing.once('error', reject)
      outgoing.once('continue', () => outgoing.end(body))
      outgoing.once('response', (incoming) => resolve(incoming.resume().statusCode))
    })
    expect(status).toBe(201)
  })

  it('503 while it drains', async () => {
    const other = await b.intake()
    const { call } = await mounted(binding, {}, other)
    other.drain()
    const refused = await call('/orders', json(tea))
    expect(refused.status).toBe(503)
    expect(await problemOf(refused)).toMatchObject({ code: 'draining' })
    expect(Number(refused.headers.get('retry-after'))).toBeGreaterThanOrEqual(1)
  })
})

describe.each(bindings.filter(({ hasNoAddress }) => hasNoAddress !== true))('$name, without an identity', (binding) => {
  it("takes the client's address for it", async () => {
    const seen: string[] = []
    const { call } = await mounted(binding, {
      identity: undefined,
      run: (_: unknown, context: { identity: string }) => void seen.push(context.identity),
    })
    expect((await call('/orders', json(tea))).status).toBe(201)
    expect(seen).toEqual([expect.stringMatching(/^(::ffff:)?127\.0\.0\.1$/)])
  })
})
