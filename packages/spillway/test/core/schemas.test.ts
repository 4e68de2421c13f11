/** Bodies with schemas of other libraries, through every way in. */
import Type from 'typebox'
import * as v from 'valibot'
import { afterEach, beforeEach, describe, expect, expectTypeOf, it } from 'vitest'
import { z } from 'zod'
import type { Definition } from '../../src/index.js'
import { type Bench, bench } from '../pipeline-fixture.js'

let b: Bench
beforeEach(async () => {
  b = await bench()
})
afterEach(() => b.close())

const ZodOrder = z.object({ item: z.string().min(2), count: z.number().default(1), on: z.coerce.date() })
const ValibotOrder = v.object({
  item: v.pipe(v.string(), v.minLength(2)),
  count: v.optional(v.number(), 1),
  on: v.pipe(
    v.string(),
    v.transform((text) => new Date(text)),
  ),
})

describe.each([
  ['zod', ZodOrder],
  ['valibot', ValibotOrder],
])('a schema of %s', (_, schema) => {
  const order = { item: 'tea', on: '2026-11-18T00:00:00.000Z' }

  it('gives the handler its value, now and from the queue', async () => {
    const intake = await b.intake()
    const seen: unknown[] = []
    const place = intake.define('place', {
      body: schema,
      run: (body) => {
        seen.push(body)
        return body.count
      },
    })
    expect(await intake.submit(place, order as never)).toMatchObject({ kind: 'done', result: 1 })
    const queued = await intake.submit(place, order as never, { respondAsync: true })
    if (queued.kind !== 'queued') throw new Error(`expected queued, not ${queued.kind}`)
    expect(await b.finished(queued.operationId)).toMatchObject({ status: 'completed', result: 1 })
    const enqueued = await intake.transaction((tx) => intake.enqueue(place, order as never, { tx }))
    if (enqueued.kind !== 'queued') throw new Error(`expected queued, not ${enqueued.kind}`)
    await b.finished(enqueued.operationId)
    const value = { item: 'tea', count: 1, on: new Date(order.on) }
    expect(seen).toEqual([value, value, value])
  })

  it('refuses a body that does not fit, over HTTP and in calls, with the place of the fault', async () => {
    const intake = await b.intake()
    const place = intake.define('place', { body: schema, run: () => 1 })
    const wrong = { item: 'x', on: order.on }
    const errors = [{ path: '/item', message: expect.any(String) }]
    const refused = { kind: 'refused', refusal: { code: 'invalid_request', errors } }
    expect(await intake.submit(place, wrong as never)).toMatchObject(refused)
    expect(await intake.transaction((tx) => intake.enqueue(place, wrong as never, { tx }))).toMatchObject(refused)
    const answer = await intake.fetch(place)(
      new Request('http://localhost/orders', {
        method: 'POST',
        headers: { 'content-type': 'application/json' },
        body: JSON.stringify(wrong),
      }),
      { clientAddress: '127.0.0.1' },
    )
    expect([answer.status, await answer.json()]).toMatchObject([400, { code: 'invalid_request', errors }])
  })

  it('decides about lanes, with its value', async () => {
    const intake = await b.intake()
    const place = intake.define('place', {
      body: schema,
      lane: (body) => ['orders', `${body.on.getUTCFullYear()}`],
      run: (_body, { partition }) => partition,
    })
    expect(await intake.submit(place, order as never)).toMatchObject({ kind: 'done', result: '2026' })
  })
})

it('a schema that checks with promises', async () => {
  const intake = await b.intake()
  const even = z.number().refine(async (n) => n % 2 === 0, 'must be even')
  const count = intake.define('count', { body: even, run: (n) => n })
  expect(await intake.submit(count, 2)).toMatchObject({ kind: 'done', result: 2 })
  expect(await intake.submit(count, 3)).toMatchObject({ refusal: { errors: [{ path: '', message: 'must be even' }] } })
})

it('a stored body that a newer schema refuses fails for good, and says why', async () => {
  const gateway = await b.intake({ role: 'direct' })
  const old = gateway.define('place', { body: z.object({ n: z.number() }), run: () => 1 })
  const answer = await gateway.submit(old, { n: 1 }, { respondAsync: true })
  if (answer.kind !== 'queued') throw new Error(`expected queued, not ${answer.kind}`)
  const worker = await b.intake()
  worker.define('place', { body: z.object({ n: z.string() }), run: () => 1 })
  expect(await b.finished(answer.operationId)).toMatchObject({
    status: 'failed',
    error: expect.stringContaining('the stored body does not fit the schema of this release: /n '),
  })
})

it('what a text cannot hold is refused when it is submitted, not when it runs', async () => {
  const intake = await b.intake()
  const place = intake.define('place', { body: z.object({ on: z.date() }), run: () => 1 })
  expect(await intake.submit(place, { on: new Date() })).toMatchObject({
    refusal: { code: 'invalid_request', errors: [{ path: '/on' }] },
  })
})

it('types: the caller gives the input, the handler gets the output, the answer has the result', async () => {
  const intake = await b.intake()
  const place = intake.define('place', { body: ZodOrder, run: (body) => body.on.getTime() })
  expectTypeOf(place).toEqualTypeOf<Definition<z.input<typeof ZodOrder>, number>>()
  const typed = intake.define('typed', { body: Type.Object({ n: Type.Number() }), run: ({ n }) => String(n) })
  expectTypeOf(typed).toEqualTypeOf<Definition<{ n: number }, string>>()
  const answer = await intake.submit(typed, { n: 4 })
  if (answer.kind === 'done') expectTypeOf(answer.result).toEqualTypeOf<string>()
  expect(answer).toMatchObject({ result: '4' })
  // @ts-expect-error: n is a number
  expect(await intake.submit(typed, { n: '4' })).toMatchObject({ kind: 'refused' })
})

it('failures are logged with their stack, attempt by attempt', async () => {
  const intake = await b.intake()
  const failing = intake.define('failing', {
    maxRetries: 1,
    run: () => {
      throw new TypeError('no stock')
    },
  })
  const answer = await intake.submit(failing, 1, { respondAsync: true })
  if (answer.kind !== 'queued') throw new Error(`expected queued, not ${answer.kind}`)
  await b.finished(answer.operationId)
  const about = b.logged.filter(({ fields }) => fields.operation === answer.operationId)
  expect(about).toMatchObject([
    { level: 'warn', message: 'attempt failed', fields: { type: 'failing', attempt: 1, maxAttempts: 2 } },
    { level: 'error', message: 'operation failed for good; it is a dead letter now', fields: { attempt: 2 } },
  ])
  for (const { fields } of about) expect((fields.err as Error).stack).toContain('schemas.test.ts')
})
