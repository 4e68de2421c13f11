import { describe, expect, expectTypeOf, it } from 'vitest'
import { clientOn } from '../client.js'
import type { Clock } from '../clock.js'
import type { Done, Failed, Jsonified, Refused, Ticket } from '../index.js'

interface Asked {
  url: string
  method: string
  key: string | null
  prefer: string | null
  body: unknown
}

/** Type-only, as a service exports it. */
interface Place {
  readonly type: string
  readonly _types?: { body: { item: string }; result: { shipped: string; at: Date; note?: string } }
}

/** A server that gives the answers in turn and repeats the last; null: it does not answer. Pauses pass at once. */
function answering(...answers: ((() => Response) | null)[]) {
  const asked: Asked[] = []
  let now = 0
  const clock: Clock = {
    now: () => now,
    wallMs: () => now,
    random: () => 0,
    sleep: async (ms) => {
      now += ms
    },
  }
  const client = clientOn(
    {
      baseUrl: 'http://spillway.test/base',
      throttle: false,
      fetch: async (url, init) => {
        const headers = new Headers(init?.headers)
        const [key, prefer] = [headers.get('idempotency-key'), headers.get('prefer')]
        const body: unknown = typeof init?.body === 'string' ? JSON.parse(init.body) : undefined
        asked.push({ url: String(url).split('?')[0] ?? '', method: init?.method ?? '', key, prefer, body })
        const answer = answers[Math.min(asked.length, answers.length) - 1]
        if (answer == null) throw new TypeError('fetch failed')
        return answer()
      },
    },
    clock,
  )
  return { place: client.route<Place>('POST /orders'), client, asked, spent: () => now }
}

const json =
  (body: unknown, status = 201, headers: Record<string, string> = {}) =>
  () =>
    new Response(JSON.stringify(body), { status, headers: { 'content-type': 'application/json', ...headers } })
const problem = (code: string, status: number, more: object = {}, headers: Record<string, string> = {}) =>
  json({ code, status, title: 'A title', detail: 'Because.', ...more }, status, headers)
const queuedBody = {
  status: 'queued',
  operationId: 'one',
  queuePosition: 2,
  estimatedWaitSeconds: 3,
  reason: 'requested',
}
const queued = (headers: Record<string, string> = {}) => json(queuedBody, 202, headers)
const view = (status: string, more: object = {}) =>
  json({ id: 'one', status, processed_at: status === 'pending' ? null : 'now', error_message: null, ...more }, 200)
const tea = { item: 'tea' }

describe('submit', () => {
  it('gives the result of a run, typed as JSON brings it', async () => {
    const { place, asked } = answering(
      json({ status: 'executed', operationId: 'one', result: { shipped: 'tea', at: '2026-01-01T00:00:00.000Z' } }),
    )
    const answer = await place.submit(tea)
    expect(answer).toEqual({
      ...{ kind: 'done', operationId: 'one', replayed: false },
      result: { shipped: 'tea', at: '2026-01-01T00:00:00.000Z' },
    })
    expect(asked).toMatchObject([{ url: 'http://spillway.test/base/orders', method: 'POST', body: tea, prefer: null }])
    expect(asked[0]?.key).toMatch(/^[0-9a-f-]{36}$/)
    type Shipped = { shipped: string; at: string; note?: string }
    expectTypeOf(answer).toEqualTypeOf<Done<Shipped> | Failed | Ticket<Shipped> | Refused>()
    // @ts-expect-error the body is another one
    void (() => place.submit({ item: 7 }))
  })

  it('takes what respond makes of it, and answers without a body', async () => {
    const { client } = answering(json({ id: 7 }), () => new Response(null, { status: 204 }), json(['a']))
    const route = client.route<Place, { id: number } | null | string[]>('PUT /orders/7')
    const own = await route.submit(tea)
    expect(own).toEqual({ kind: 'done', operationId: null, result: { id: 7 }, replayed: false })
    if (own.kind === 'done') expectTypeOf(own.result).toEqualTypeOf<{ id: number } | null | string[]>()
    expect(await route.submit(tea)).toMatchObject({ kind: 'done', result: null })
    expect(await route.submit(tea)).toMatchObject({ kind: 'done', result: ['a'] })
  })

  it('retries a refusal after its Retry-After, with the same key', async () => {
    const { place, asked, spent } = answering(
      problem('overloaded', 503, {}, { 'retry-after': '7' }),
      json({ status: 'executed', operationId: 'one', result: null }, 201, { 'idempotent-replayed': 'true' }),
    )
    expect(await place.submit(tea)).toMatchObject({ kind: 'done', replayed: true })
    expect(asked).toHaveLength(2)
    expect(asked[1]?.key).toBe(asked[0]?.key)
    expect(spent()).toBeGreaterThanOrEqual(7_000)
  })

  it('gives the refusal when it lasts longer than the deadline, or is final', async () => {
    const busy = answering(problem('rate_limited', 429, {}, { 'retry-after': '20' }))
    const refused = await busy.place.submit(tea, { deadlineMs: 5_000 })
    expect(refused).toMatchObject({
      kind: 'refused',
      code: 'rate_limited',
      error: { retryAfterMs: 20_000, status: 429 },
    })
    expect(busy.asked).toHaveLength(1)
    const errors = [{ path: '/item', message: 'must be a text' }]
    const { place, asked } = answering(problem('invalid_request', 400, { errors }))
    expect(await place.submit(tea)).toMatchObject({
      kind: 'refused',
      code: 'invalid_request',
      error: { problem: { errors } },
    })
    expect(asked).toHaveLength(1)
  })

  it('rejects when it is unknown whether it was accepted, also if the last answer is a refusal', async () => {
    const { place } = answering(null, problem('overloaded', 503, {}, { 'retry-after': '1' }))
    await expect(place.submit(tea, { deadlineMs: 10_000 })).rejects.toMatchObject({
      code: 'overloaded',
      isUnknown: true,
    })
    await expect(answering(null).place.submit(tea)).rejects.toMatchObject({ code: 'unreachable', isUnknown: true })
    const page = answering(() => new Response('<html>', { status: 200 }))
    await expect(page.place.submit(tea)).rejects.toMatchObject({ code: 'unexpected' })
  })

  it.each([
    ['its own status and code', problem('card_declined', 402, { operationId: 'one', result: { left: 3 } })],
    ['500', problem('card_declined', 500, { operationId: 'one', result: { left: 3 } }, { 'x-should-retry': 'false' })],
  ])('gives the failure of an operation with %s, and does not repeat it', async (_, answer) => {
    const { place, asked } = answering(answer)
    expect(await place.submit(tea)).toEqual({
      ...{ kind: 'failed', operationId: 'one', code: 'card_declined', message: 'Because.' },
      ...{ result: { left: 3 }, replayed: false },
    })
    expect(asked).toHaveLength(1)
  })

  it('gives a failure that comes as a 201', async () => {
    const { place } = answering(json({ status: 'failed', operationId: 'one', error_message: 'no', result: 1 }))
    expect(await place.submit(tea)).toMatchObject({
      kind: 'failed',
      code: 'operation_failed',
      message: 'no',
      result: 1,
    })
  })

  it.each(['/orders', 'GET /orders', 'POST orders', 'POST  /orders', ''])('%j names no route', (name) => {
    expect(() => answering().client.route(name)).toThrow("a route is named like 'POST /orders'")
  })

  it('rejects with the reason of its signal', async () => {
    const { place } = answering(json({}))
    await expect(place.submit(tea, { signal: AbortSignal.abort(new Error('enough')) })).rejects.toThrow('enough')
  })
})

describe('a ticket', () => {
  it('is waited for, and cancelled', async () => {
    const { place, asked } = answering(queued(), view('completed', { result: { shipped: 'tea' } }), view('cancelled'))
    const ticket = await place.submit(tea, { respondAsync: true })
    if (ticket.kind !== 'queued') throw new Error(ticket.kind)
    expect(ticket).toMatchObject({ operationId: 'one', queuePosition: 2, estimatedWaitSeconds: 3, replayed: false })
    expect(await ticket.wait()).toMatchObject({ kind: 'done', operationId: 'one', result: { shipped: 'tea' } })
    expect(await ticket.cancel()).toMatchObject({ status: 'cancelled' })
    expect(asked.map(({ method, url, prefer }) => [method, url, prefer])).toEqual([
      ['POST', 'http://spillway.test/base/orders', 'respond-async'],
      ['GET', 'http://spillway.test/base/api/v1/operations/one', null],
      ['POST', 'http://spillway.test/base/api/v1/operations/one/cancel', null],
    ])
  })

  it('is the answer of a wait whose time is up; a failed one says why', async () => {
    const { place } = answering(queued(), view('pending'), view('failed', { error_message: 'out of stock' }))
    const ticket = await place.submit(tea)
    if (ticket.kind !== 'queued') throw new Error(ticket.kind)
    expect(await ticket.wait({ timeoutMs: 0 })).toBe(ticket)
    expect(await ticket.wait()).toMatchObject({ kind: 'failed', code: 'operation_failed', message: 'out of stock' })
  })

  it('is waited for by submit itself if it is asked to poll', async () => {
    const { place } = answering(queued(), view('completed', { result: { shipped: 'tea' } }))
    expect(await place.submit(tea, { queuedOperationBehavior: 'poll' })).toMatchObject({ kind: 'done' })
  })

  it.each([
    ['below the prefix of the base', '/base/shop/api/v1/operations/one', '/base/shop/api/v1/operations/one'],
    ['without the prefix that a proxy took off', '/shop/api/v1/operations/one', '/base/shop/api/v1/operations/one'],
    ['as a whole address', 'http://spillway.test/base/tickets/one', '/base/tickets/one'],
    ['at another origin, which must not get the token', 'http://else.test/tickets/one', '/base/api/v1/operations/one'],
    ['as no address', 'http://', '/base/api/v1/operations/one'],
  ])('is found where Location says: %s', async (_, location, path) => {
    const { place, asked } = answering(queued({ location }), view('completed'))
    const ticket = await place.submit(tea)
    if (ticket.kind === 'queued') await ticket.wait()
    expect(asked[1]?.url).toBe(`http://spillway.test${path}`)
  })
})

it('types are those after JSON', () => {
  expectTypeOf<Jsonified<{ a: Date; b?: number; c: (string | null)[]; d: { e: boolean } }>>().toEqualTypeOf<{
    a: string
    b?: number
    c: (string | null)[]
    d: { e: boolean }
  }>()
  expectTypeOf<Jsonified<unknown>>().toBeUnknown()
  expectTypeOf<Jsonified<[Date, 'x']>>().toEqualTypeOf<[string, 'x']>()
})
