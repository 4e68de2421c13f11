/** Under /v1 every error has OpenAI's form, whichever layer raises it; elsewhere nothing changes. */
import { ChatCompletionRequest } from '@spillway/protocol/schema'
import { limits, type OpenAiErrorBody } from '@spillway/protocol/wire'
import { SignJWT } from 'jose'
import OpenAI, { APIError } from 'openai'
import { pino } from 'pino'
import { afterAll, beforeAll, describe, expect, it } from 'vitest'
import { type Problem, sendProblem } from '../../../spillway/src/http/problem.js'
import { LogFault } from '../../../spillway/src/streams/port.js'
import { type App, type AppDeps, buildApp } from '../../src/app.js'
import { createAuthenticator } from '../../src/auth/auth.js'
import { rawConnection, rawExchange } from '../http-listening.js'

/** What the next call that got so far is answered with. */
let next: Problem | Error | null = null
const passedOn = { message: 'No credit left.', type: 'insufficient_quota', param: null, code: 'insufficient_quota' }

function addRoutes(app: App): void {
  const config = { role: 'submit', errorForm: 'openai' } as const
  const schema = { body: ChatCompletionRequest }
  app.post('/v1/chat/completions', { schema, config, bodyLimit: limits.chatBodyBytes }, async (_, reply) => {
    if (next instanceof Error) throw next
    if (next !== null) return sendProblem(reply, next)
    return { id: 'c', object: 'chat.completion', created: 1, model: 'm', choices: [] }
  })
  app.get('/v1/models', { config }, async () => ({ object: 'list', data: [] }))
  app.get('/v1/models/:model', { config }, async () => ({ id: 'm' }))
  app.get('/v1/operators', { config: { ...config, role: 'operate' } }, async () => ({ ok: true }))
  app.get('/v1/petition-submissions/:id', async () => ({ ok: true }))
  app.get('/v1/of-a-user', { config: { role: 'operate' } }, async () => ({ ok: true }))
  app.get('/health', { config: { public: true, neverShed: true } }, async () => ({ ok: true }))
  app.post('/api/v1/things', { schema }, async () => ({ ok: true }))
}

interface Served {
  origin: string
  port: number
  client: OpenAI
  close(): Promise<void>
}

async function served(overrides: Partial<AppDeps> = {}): Promise<Served> {
  const log = pino({ level: 'silent' })
  const { app } = buildApp({
    log,
    authenticator: createAuthenticator({ onFault: (err) => log.error({ err }) }),
    ...{ bodyLimitBytes: limits.bodyBytes, requestTimeoutMs: 30_000, headersTimeoutMs: 10_000 },
    ...{ connectionsMax: 1_000, corsOrigins: [] },
    ...overrides,
  })
  addRoutes(app)
  const origin = await app.listen({ host: '127.0.0.1', port: 0 })
  const client = new OpenAI({ baseURL: `${origin}/v1`, apiKey: 'any', maxRetries: 0 })
  return { origin, port: Number(new URL(origin).port), client, close: () => app.close() }
}

let server: Served
beforeAll(async () => {
  server = await served()
})
afterAll(() => server.close())

const chat = { model: 'm', messages: [{ role: 'user', content: 'hi' }] }

function post(body: string, headers: Record<string, string> = {}, { origin } = server): Promise<Response> {
  return fetch(`${origin}/v1/chat/completions`, {
    method: 'POST',
    body,
    headers: { 'content-type': 'application/json', ...headers },
  })
}

/** The answer is OpenAI's error object and nothing else. */
async function expectError(answer: Response, status: number, code: string | null): Promise<OpenAiErrorBody['error']> {
  expect(answer.status).toBe(status)
  expect(answer.headers.get('content-type')).toBe('application/json')
  expect(answer.headers.get('x-request-id')).toMatch(/^[0-9a-f]{32}$/)
  const body = (await answer.json()) as OpenAiErrorBody
  expect(Object.keys(body)).toEqual(['error'])
  expect(Object.keys(body.error).sort()).toEqual(['code', 'message', 'param', 'type'])
  expect(body.error.code).toBe(code)
  expect(body.error.message).not.toBe('')
  return body.error
}

async function answerWith(problem: Problem | Error): Promise<Response> {
  next = problem
  try {
    return await post(JSON.stringify(chat))
  } finally {
    next = null
  }
}

describe('bodies', () => {
  it('accepts valid bodies, with unknown members and null', async () => {
    const open = { ...chat, stream: null, n: 1, tools: [{ type: 'new' }], temperature: 3, unheard_of: { of: true } }
    expect((await post(JSON.stringify(open))).status).toBe(200)
  })

  it.each<[string, object, string | null]>([
    ['no model', { messages: chat.messages }, 'model'],
    ['an empty model', { ...chat, model: '' }, 'model'],
    ['a model of 256 characters', { ...chat, model: 'm'.repeat(256) }, 'model'],
    ['no messages', { model: 'm' }, 'messages'],
    ['an empty list of messages', { ...chat, messages: [] }, 'messages'],
    ['a message without a role', { ...chat, messages: [...chat.messages, { content: 'x' }] }, 'messages[1].role'],
    ['a message that is a text', { ...chat, messages: ['hi'] }, 'messages[0]'],
    ['two answers', { ...chat, n: 2 }, 'n'],
    ['a stream that is a text', { ...chat, stream: 'yes' }, 'stream'],
    ['stream options that are a list', { ...chat, stream_options: [] }, 'stream_options'],
    ['a list instead of an object', [], null],
  ])('refuses %s and names where', async (_, body, param) => {
    const error = await expectError(await post(JSON.stringify(body)), 400, 'invalid_request')
    expect(error).toMatchObject({ type: 'invalid_request_error', param })
    expect(error.message).toContain(param ?? 'The request is not valid')
  })

  it('names the only number of answers that there is', async () => {
    const { message } = await expectError(await post(JSON.stringify({ ...chat, n: 2 })), 400, 'invalid_request')
    expect(message).toBe('The request is not valid: n must be 1.')
  })

  it.each([
    ['half an object', '{"model":'],
    ['nothing', ''],
    ['garbage', '\u0001\u0002'],
  ])('refuses %s', async (_, body) => {
    expect((await expectError(await post(body), 400, 'invalid_request')).param).toBeNull()
  })

  it('takes a prompt of 10 MB', async () => {
    const messages = [{ role: 'user', content: 'x'.repeat(10_000_000) }]
    expect((await post(JSON.stringify({ ...chat, messages }))).status).toBe(200)
  })

  it('refuses one that is larger than 16 MiB', async () => {
    const messages = [{ role: 'user', content: 'x'.repeat(limits.chatBodyBytes) }]
    const answer = await post(JSON.stringify({ ...chat, messages }))
    expect((await expectError(answer, 413, 'body_too_large')).type).toBe('invalid_request_error')
  })

  it('refuses another media type', async () => {
    const answer = await post(JSON.stringify(chat), { 'content-type': 'text/plain' })
    expect((await expectError(answer, 415, 'unsupported_media_type')).type).toBe('invalid_request_error')
  })
})

describe('paths and methods', () => {
  it.each(['/v1', '/v1/', '/v1/embeddings', '/v1/chat/completions/more', '/v1/petition-submissionsx'])(
    'there is nothing at %s',
    async (path) => {
      const error = await expectError(await fetch(server.origin + path), 404, 'not_found')
      expect(error.type).toBe('invalid_request_error')
    },
  )

  it('a wrong method gets the list of allowed methods', async () => {
    const answer = await fetch(`${server.origin}/v1/chat/completions`)
    expect(answer.headers.get('allow')).toBe('POST')
    expect((await expectError(answer, 405, 'method_not_allowed')).type).toBe('invalid_request_error')
  })

  it.each(['/v1/models/%ff', '/v1/%', '/v1/models/%00', 'http://elsewhere/v1/%'])('%s is no URL', async (target) => {
    const { status, headers, body } = await rawExchange(
      server.port,
      `GET ${target} HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\n\r\n`,
    )
    expect(status).toBe(400)
    expect(headers['content-type']).toBe('application/json')
    expect(JSON.parse(body)).toEqual({
      error: { message: expect.any(String), type: 'invalid_request_error', param: null, code: 'invalid_request' },
    })
  })

  it.each([
    ['GET', '/v2/models', 404],
    ['GET', '/v1x', 404],
    ['GET', '/api/v1/none', 404],
    ['GET', '/api/v1/things', 405],
    ['POST', '/api/v1/things', 400],
    ['DELETE', '/v1/petition-submissions/1', 405],
    ['GET', '/v1/petition-submissions', 404],
    ['GET', '/v1/petition-submissions/%', 400],
    ['GET', '/v1/of-a-user', 403],
  ])('%s %s is answered with a problem document', async (method, path, status) => {
    const answer = await fetch(server.origin + path, { method, headers: { 'x-user-id': 'somebody' } })
    expect(answer.status).toBe(status)
    expect(answer.headers.get('content-type')).toBe('application/problem+json')
    expect(await answer.json()).toMatchObject({ status, trace_id: answer.headers.get('x-request-id') })
  })
})

describe('the caller', () => {
  let guarded: Served
  let token: string
  beforeAll(async () => {
    const jwtSecret = 'long enough to be no guess at all'
    token = await new SignJWT({ roles: ['submit'] })
      .setProtectedHeader({ alg: 'HS256' })
      .setSubject('me')
      .setExpirationTime('1h')
      .sign(Buffer.from(jwtSecret))
    guarded = await served({ authenticator: createAuthenticator({ jwtSecret, onFault: () => undefined }) })
  })
  afterAll(() => guarded.close())

  it.each([
    ['no', {}, 'Bearer realm="spillway"'],
    ['wrong', { authorization: 'Bearer wrong' }, 'Bearer realm="spillway", error="invalid_token"'],
  ])('the response to %s credentials names the scheme', async (_, headers, scheme) => {
    const answer = await post(JSON.stringify(chat), headers, guarded)
    expect(answer.headers.get('www-authenticate')).toBe(scheme)
    expect((await expectError(answer, 401, 'invalid_api_key')).type).toBe('authentication_error')
  })

  it('a missing role is a lack of permission', async () => {
    const answer = await fetch(`${guarded.origin}/v1/operators`, { headers: { authorization: `Bearer ${token}` } })
    expect((await expectError(answer, 403, 'forbidden')).type).toBe('permission_error')
  })
})

describe('Retry-After', () => {
  it('is in the response of the connection limit', async () => {
    const small = await served({ connectionsMax: 1 })
    try {
      const first = rawConnection(small.port)
      first.socket.write('GET /health HTTP/1.1\r\nHost: localhost\r\n\r\n')
      await new Promise((resolve) => first.socket.once('data', resolve))
      const answer = await fetch(`${small.origin}/v1/models`)
      expect(answer.headers.get('retry-after')).toMatch(/^[56]$/)
      expect((await expectError(answer, 503, 'overloaded')).type).toBe('server_error')
      first.socket.destroy()
      await first.ended
    } finally {
      await small.close()
    }
  })

  it('is in the response while draining', async () => {
    const draining = await served({ draining: () => true })
    try {
      const answer = await fetch(`${draining.origin}/v1/models`)
      expect(answer.headers.get('retry-after')).toMatch(/^[56]$/)
      expect((await expectError(answer, 503, 'draining')).type).toBe('server_error')
    } finally {
      await draining.close()
    }
  })

  it('is in a problem of the route', async () => {
    const answer = await answerWith({
      code: 'connection_limit',
      detail: 'Three streams are open.',
      retryAfterMs: 9_500,
    })
    expect(answer.headers.get('retry-after')).toMatch(/^1[01]$/)
    expect(await expectError(answer, 429, 'connection_limit')).toMatchObject({
      message: 'Three streams are open.',
      type: 'rate_limit_error',
    })
  })

  it('is in the response when the stream log is unavailable', async () => {
    const answer = await answerWith(new LogFault('connection to 10.0.0.7 lost'))
    expect(answer.headers.get('retry-after')).toMatch(/^[23]$/)
    expect((await expectError(answer, 503, 'stream_log_unavailable')).message).not.toContain('10.0.0.7')
  })
})

describe('what an upstream says', () => {
  it.each([402, 422, 451])('its own error is passed on with its status %d', async (status) => {
    const answer = await answerWith({ code: 'upstream_rejected', detail: 'x', status, openai: passedOn })
    expect(await expectError(answer, status, 'insufficient_quota')).toEqual(passedOn)
  })

  it('a limit of its own comes with the time to wait', async () => {
    const problem: Problem = { code: 'upstream_rejected', detail: 'x', status: 429, openai: passedOn }
    const answer = await answerWith({ ...problem, retryAfterMs: 20_000 })
    expect(answer.headers.get('retry-after')).toMatch(/^2[0-2]$/)
    await expectError(answer, 429, 'insufficient_quota')
  })

  it('an internal error reveals nothing', async () => {
    const answer = await answerWith(new Error('password=hunter2'))
    expect((await expectError(answer, 500, 'internal_error')).message).not.toContain('hunter2')
  })
})

describe("OpenAI's own client", () => {
  const refusalOf = async (problem: Problem): Promise<APIError> => {
    next = problem
    try {
      const refused = await server.client.chat.completions.create(chat as OpenAI.ChatCompletionCreateParams).then(
        () => null,
        (fault: unknown) => fault,
      )
      if (!(refused instanceof APIError)) throw new Error('it was not refused')
      return refused
    } finally {
      next = null
    }
  }

  it("has a class for each, with the server's message", async () => {
    const notFound = await refusalOf({ code: 'model_not_found', detail: 'There is no model "m".' })
    expect(notFound).toBeInstanceOf(OpenAI.NotFoundError)
    expect(notFound).toMatchObject({ status: 404, code: 'model_not_found', type: 'invalid_request_error' })
    expect(notFound.message).toBe('404 There is no model "m".')
    expect(notFound.requestID).toMatch(/^[0-9a-f]{32}$/)
  })

  it.each([
    ['connection_limit', OpenAI.RateLimitError],
    ['upstream_error', OpenAI.InternalServerError],
    ['upstream_timeout', OpenAI.InternalServerError],
    ['queue_timeout', OpenAI.InternalServerError],
    ['forbidden', OpenAI.PermissionDeniedError],
    ['idempotency_mismatch', OpenAI.UnprocessableEntityError],
  ] as const)('reads %s', async (code, type) => {
    expect(await refusalOf({ code, detail: 'Why.' })).toBeInstanceOf(type)
  })

  it('does not retry a cancelled operation', async () => {
    next = { code: 'generation_cancelled', detail: 'It was cancelled.' }
    let calls = 0
    const eager = new OpenAI({
      ...{ baseURL: `${server.origin}/v1`, apiKey: 'any', maxRetries: 2 },
      fetch: (url, init) => {
        calls++
        return fetch(url, init)
      },
    })
    try {
      await expect(eager.chat.completions.create(chat as OpenAI.ChatCompletionCreateParams)).rejects.toMatchObject({
        status: 410,
        code: 'generation_cancelled',
      })
    } finally {
      next = null
    }
    expect(calls).toBe(1)
  })
})
