/** A key compares the body as it came, by whatever binding; a handler gets the text beside the parsed body. */
import Fastify, { type FastifyInstance } from 'fastify'
import { pino } from 'pino'
import Type from 'typebox'
import { afterEach, beforeEach, describe, expect, it } from 'vitest'
import type { Intake } from '../../../spillway/src/intake/intake.js'
import { type Bench, bench } from '../../../spillway/test/pipeline-fixture.js'
import { buildApp } from '../../src/app.js'
import { createAuthenticator } from '../../src/auth/auth.js'

const Body = Type.Object({ n: Type.Any(), by: Type.Optional(Type.String()) }, { additionalProperties: false })
const near = '{"n":9007199254740992}'
const odd = '{ "n":9007199254740993,"n":[-0, 1.10, 1E2, {"b":1,"a":1,"a":2}]\n}'

let b: Bench
let intake: Intake
let seen: { body: unknown; text: string }[]
let app: FastifyInstance | undefined

beforeEach(async () => {
  b = await bench()
  intake = await b.intake()
  seen = []
})
afterEach(async () => {
  await app?.close()
  app = undefined
  await b.close()
})

const define = () =>
  intake.define('carried', {
    body: Body,
    run: (body, _, text) => {
      seen.push({ body, text })
      return {}
    },
  })

type Send = (text: string, headers?: Record<string, string>) => Promise<Response>

async function listening(): Promise<Send> {
  const origin = await app?.listen({ host: '127.0.0.1', port: 0 })
  return (body, headers = {}) =>
    fetch(`${origin}/n`, { method: 'POST', headers: { 'content-type': 'application/json', ...headers }, body })
}

const bindings: [string, () => Send | Promise<Send>][] = [
  [
    'fetch',
    () => {
      const handler = intake.fetch(define())
      return (body, headers = {}) =>
        handler(
          new Request('http://localhost/n', {
            method: 'POST',
            headers: { 'content-type': 'application/json', ...headers },
            body,
          }),
          { clientAddress: '127.0.0.1' },
        )
    },
  ],
  [
    'the server’s own Fastify',
    () => {
      const built = buildApp({
        log: pino({ level: 'silent' }),
        authenticator: createAuthenticator({ onFault: () => undefined }),
        bodyLimitBytes: 1_048_576,
        requestTimeoutMs: 30_000,
        headersTimeoutMs: 10_000,
        connectionsMax: 1_000,
        corsOrigins: [],
      })
      app = built.app as unknown as FastifyInstance
      app.route({ method: 'POST', url: '/n', ...intake.route(define()) })
      return listening()
    },
  ],
  [
    'a Fastify of one’s own',
    () => {
      app = Fastify({ bodyLimit: 100_000 })
      app.route({ method: 'POST', url: '/n', ...intake.route(define()) })
      return listening()
    },
  ],
]

describe.each(bindings)('%s', (name, open) => {
  it('compares the body as it came', async () => {
    const send = await open()
    const key = { 'idempotency-key': 'one' }
    expect((await send(near, key)).status).toBe(201)
    expect((await send('{"n":9007199254740993}', key)).status).toBe(422)
    expect((await send(`${near} `, key)).status).toBe(422)
    const again = await send(near, key)
    expect([again.status, again.headers.get('idempotent-replayed')]).toEqual([201, 'true'])
    expect(seen).toHaveLength(1)
  })

  it('gives the handler the parsed body and its text, run now or later', async () => {
    const send = await open()
    expect((await send(odd)).status).toBe(201)
    const ticket = (await (await send(odd, { prefer: 'respond-async' })).json()) as { operationId: string }
    await b.finished(ticket.operationId)
    // The user's own app may change the body before it gets here, so its text is serialized again there.
    const text = name === 'a Fastify of one’s own' ? JSON.stringify(JSON.parse(odd)) : odd
    expect(seen).toEqual([1, 2].map(() => ({ body: JSON.parse(text), text })))
  })
})

describe('a Fastify of one’s own', () => {
  it('keeps its limit and its errors for a body with a key', async () => {
    app = Fastify({ bodyLimit: 1_000 })
    app.route({ method: 'POST', url: '/n', ...intake.route(define()) })
    const send = await listening()
    const key = { 'idempotency-key': 'one' }
    expect((await send(`{"n":"${'x'.repeat(1_000)}"}`, key)).status).toBe(413)
    expect((await send('{"n":', key)).status).toBe(400)
    expect((await send(`{"n":"é${'x'.repeat(900)}"}`, key)).status).toBe(201)
  })

  it('stores the body as its hooks have left it', async () => {
    app = Fastify()
    app.addHook('preValidation', async (request) => {
      Object.assign(request.body as object, { by: 'a hook' })
    })
    app.route({ method: 'POST', url: '/n', ...intake.route(define()) })
    const send = await listening()
    expect((await send('{"n":1}', { 'idempotency-key': 'one' })).status).toBe(201)
    expect(seen).toEqual([{ body: { n: 1, by: 'a hook' }, text: '{"n":1,"by":"a hook"}' }])
  })
})

it('without HTTP the text is the body as JSON', async () => {
  await intake.submit(define(), { n: [1, 'é'] })
  expect(seen).toEqual([{ body: { n: [1, 'é'] }, text: '{"n":[1,"é"]}' }])
})
