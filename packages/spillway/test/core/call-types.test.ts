/** The types of definitions, submissions and answers, as a user's compiler sees them. Nothing runs: `npm run check` compiles it. */
import Type from 'typebox'
import * as v from 'valibot'
import { describe, expect, expectTypeOf, it } from 'vitest'
import { z } from 'zod'
import {
  type Answer,
  type Definition,
  FailOperation,
  type Intake,
  type SubmitOptions,
  type Tx,
} from '../../src/index.js'

type Done<Result> = Extract<Answer<Result>, { kind: 'done' }>
type Failed = Extract<Answer, { kind: 'failed' }>

/** Never called. */
const compiled = (_: (intake: Intake, tx: Tx) => Promise<void>): void => expect(_).toBeTypeOf('function')

describe('inferred from the schema', () => {
  it('TypeBox: what is submitted is what the handler gets', () =>
    compiled(async (intake) => {
      const schema = Type.Object({ item: Type.String(), count: Type.Optional(Type.Integer()) })
      const place = intake.define('place', {
        body: schema,
        run: (order) => {
          expectTypeOf(order).toEqualTypeOf<{ item: string; count?: number }>()
          return order.item.length
        },
      })
      expectTypeOf(place).toEqualTypeOf<Definition<{ item: string; count?: number }, number>>()
    }))

  it('zod and valibot: defaults and changed values differ between caller and handler', () =>
    compiled(async (intake) => {
      const ofZod = intake.define('zod', {
        body: z.object({ item: z.string(), count: z.number().default(1) }),
        run: (order) => {
          expectTypeOf(order).toEqualTypeOf<{ item: string; count: number }>()
          return order.count
        },
      })
      expectTypeOf(ofZod).toEqualTypeOf<Definition<{ item: string; count?: number | undefined }, number>>()
      const ofValibot = intake.define('valibot', {
        body: v.object({
          on: v.pipe(
            v.string(),
            v.transform((text) => new Date(text)),
          ),
        }),
        lane: (order) => ['days', order.on.toISOString()],
        run: async (order) => order.on.getTime(),
      })
      expectTypeOf(ofValibot).toEqualTypeOf<Definition<{ on: string }, number>>()
      await intake.submit(ofZod, { item: 'tea' })
      await intake.submit(ofValibot, { on: '2026-11-18' })
      // @ts-expect-error the caller gives a text
      await intake.submit(ofValibot, { on: new Date() })
    }))

  it('none: any value', () =>
    compiled(async (intake) => {
      const any = intake.define('any', { run: (body) => ({ got: body }) })
      expectTypeOf(any).toEqualTypeOf<Definition<unknown, { got: unknown }>>()
    }))
})

describe('answers', () => {
  it('have the result of the handler, and tell a failure by its code', () =>
    compiled(async (intake) => {
      const place = intake.define('place', { body: Type.String(), run: async (text) => ({ length: text.length }) })
      const answer = await intake.submit(place, 'tea')
      expectTypeOf(answer).toEqualTypeOf<Answer<{ length: number }>>()
      switch (answer.kind) {
        case 'done':
          expectTypeOf(answer).toEqualTypeOf<Done<{ length: number }>>()
          expectTypeOf(answer.result.length).toBeNumber()
          break
        case 'failed':
          expectTypeOf(answer).toEqualTypeOf<Failed>()
          expectTypeOf(answer.code).toBeString()
          expectTypeOf(answer.status).toBeNumber()
          expectTypeOf(answer.expected).toBeBoolean()
          break
        case 'queued':
          expectTypeOf(answer.operationId).toBeString()
          break
        case 'refused':
          expectTypeOf(answer.refusal.detail).toBeString()
          break
        default:
          expectTypeOf(answer).toBeNever()
      }
      const answers = await intake.submitMany(place, ['a', 'b'])
      expectTypeOf(answers).toEqualTypeOf<Answer<{ length: number }>[]>()
    }))

  it('a handler that returns nothing has no result to read', () =>
    compiled(async (intake) => {
      const silent = intake.define('silent', { run: () => undefined })
      expectTypeOf(await intake.submit(silent, 1)).toEqualTypeOf<Answer<undefined>>()
    }))
})

describe('options', () => {
  it('of one submission', () =>
    compiled(async (intake, tx) => {
      const place = intake.define('place', { body: Type.Object({ n: Type.Integer() }), run: () => 1 })
      const options: SubmitOptions = { delay: '10s', priority: 1, lane: ['orders', 'ann'], timeout: 500, maxRetries: 0 }
      await intake.submit(place, { n: 1 }, { ...options, waitMs: 5, signal: AbortSignal.timeout(1) })
      await intake.submit(place, { n: 1 }, { runAt: new Date(), idempotencyKey: 'k', identity: 'ann' })
      await intake.enqueue(place, { n: 1 }, { tx, delay: '1h' })
      // @ts-expect-error a text is no Date
      await intake.submit(place, { n: 1 }, { runAt: '2030-01-01' })
      // @ts-expect-error the transaction is missing
      await intake.enqueue(place, { n: 1 }, {})
      // @ts-expect-error nobody waits in a transaction
      await intake.enqueue(place, { n: 1 }, { tx, waitMs: 5 })
    }))

  it('of many: a value, or a function of the body', () =>
    compiled(async (intake, tx) => {
      const place = intake.define('place', { body: Type.Object({ n: Type.Integer() }), run: () => 1 })
      await intake.submitMany(place, [{ n: 1 }], {
        priority: 3,
        idempotencyKey: (order, index) => {
          expectTypeOf(order).toEqualTypeOf<{ n: number }>()
          expectTypeOf(index).toBeNumber()
          return `${order.n}`
        },
        lane: ({ n }) => (n > 1 ? ['large', String(n)] : undefined),
        runAt: () => new Date(),
      })
      await intake.enqueueMany(place, [{ n: 1 }], { tx, identity: ({ n }) => String(n) })
      // @ts-expect-error a body that does not fit
      await intake.submitMany(place, [{ n: 'one' }])
      // @ts-expect-error no priority
      await intake.submitMany(place, [{ n: 1 }], { priority: () => 'high' })
      // @ts-expect-error nobody waits for the runs
      await intake.submitMany(place, [{ n: 1 }], { waitMs: 5 })
      // @ts-expect-error the transaction is missing
      await intake.enqueueMany(place, [{ n: 1 }], { priority: 1 })
    }))

  it('of a failure, and of the progress', () =>
    compiled(async (intake) => {
      intake.define('place', {
        run: (_, ctx) => {
          ctx.progress(0.5, 'half')
          ctx.progress(1)
          // @ts-expect-error the note is a text
          ctx.progress(1, 2)
          throw new FailOperation('no', { status: 402, code: 'card_declined', result: 1, deadLetter: true })
        },
      })
      // @ts-expect-error the status is a number
      void new FailOperation('no', { status: '402' })
    }))
})
