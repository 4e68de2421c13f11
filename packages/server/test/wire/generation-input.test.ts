/** What generation refuses, through the real server: bad input, full places, strangers. */
import { createHash } from 'node:crypto'
import { mkdtemp, rm, writeFile } from 'node:fs/promises'
import { connect } from 'node:net'
import { tmpdir } from 'node:os'
import { join } from 'node:path'
import { afterAll, beforeAll, describe, expect, it } from 'vitest'
import { as, chat, chatBody, type Fleet, native, occupy, open, startFleet } from '../generation-server.js'
import { type Answer, call, get, post, type ServerProcess, until } from '../server-process.js'

const chatPath = '/v1/chat/completions'
const nativePath = '/api/v1/stream'

let fleet: Fleet
let demo: ServerProcess
/** Without failover: three places for all, one for each user. */
let bare: ServerProcess
/** With room for one that waits, and not for long. */
let narrow: ServerProcess
/** With authentication. */
let guarded: ServerProcess
let dir: string

const keyOf = { ann: 'key-of-ann', bob: 'key-of-bob', ops: 'key-of-ops', reader: 'key-of-reader' }
const bearer = (key: string) => ({ authorization: `Bearer ${key}` })

beforeAll(async () => {
  dir = await mkdtemp(join(tmpdir(), 'spillway-generation-'))
  const named = (key: string) => `sha256:${createHash('sha256').update(key).digest('hex')}`
  const keys = {
    [named(keyOf.ann)]: { identity: 'ann', roles: ['submit'] },
    [named(keyOf.bob)]: { identity: 'bob', roles: ['submit'] },
    [named(keyOf.ops)]: { identity: 'ops', roles: ['operate'] },
    [named(keyOf.reader)]: { identity: 'reader', roles: ['metrics'] },
  }
  await writeFile(join(dir, 'keys.json'), JSON.stringify(keys))
  fleet = await startFleet()
  const started = await Promise.all([
    fleet.startDemo({ GENERATION_DEMO_TOKENS_PER_SECOND: '1000' }),
    fleet.start({
      QUEUE_FAILOVER_ENABLED: 'false',
      CONNECTION_POOL_MAX_PER_USER: '1',
      CONNECTION_POOL_MAX_GLOBAL: '3',
    }),
    fleet.start({
      CONNECTION_POOL_MAX_PER_USER: '1',
      QUEUE_FAILOVER_MAX_DEPTH: '1',
      QUEUE_FAILOVER_TIMEOUT_SECONDS: '2',
      GENERATION_CONCURRENCY: '3',
    }),
    fleet.start({ SPILLWAY_API_KEYS: join(dir, 'keys.json') }),
  ])
  demo = started[0]
  bare = started[1]
  narrow = started[2]
  guarded = started[3]
})

afterAll(async () => {
  await fleet.close()
  await rm(dir, { recursive: true, force: true })
})

interface OpenAiError {
  message: string
  type: string
  param: string | null
  code: string | null
}

/** OpenAI's error object, and nothing else. */
function openAiError(answer: Answer): OpenAiError {
  expect(Object.keys(answer.body)).toEqual(['error'])
  const { error } = answer.body as unknown as { error: OpenAiError }
  expect(Object.keys(error).sort()).toEqual(['code', 'message', 'param', 'type'])
  return error
}

/** A problem of RFC 9457, with its members. */
function problem(answer: Answer) {
  expect(answer.headers.get('content-type')).toBe('application/problem+json')
  const { type, title, status, detail, instance, code, trace_id } = answer.body
  expect([type, title, detail, instance, trace_id].map((member) => typeof member)).toEqual(Array(5).fill('string'))
  expect([status, trace_id]).toEqual([answer.status, answer.headers.get('x-request-id')])
  return { status, code, errors: answer.body.errors }
}

/** Whole seconds from `base` on, a tenth more at most; the same in the body of a problem. */
function expectRetryAfter(answer: Answer): void {
  const seconds = Number(answer.headers.get('retry-after'))
  expect(Number.isInteger(seconds) && seconds >= 1).toBe(true)
  if (answer.body.retry_after_seconds !== undefined) expect(answer.body.retry_after_seconds).toBe(seconds)
}

const deep = `${'['.repeat(70)}${']'.repeat(70)}`
const messages = [{ role: 'user', content: 'hello' }]

describe.concurrent('POST /v1/chat/completions', () => {
  it.each<[string, unknown, string | null]>([
    ['that is no JSON', '{"model":', null],
    ['without messages', { model: 'demo' }, 'messages'],
    ['with no message at all', { model: 'demo', messages: [] }, 'messages'],
    ['without a model', { messages }, 'model'],
    ['with max_tokens 0', { model: 'demo', messages, max_tokens: 0 }, 'max_tokens'],
    [
      'with max_completion_tokens below 0',
      { model: 'demo', messages, max_completion_tokens: -1 },
      'max_completion_tokens',
    ],
    ['with n above 1', { model: 'demo', messages, n: 2 }, 'n'],
    ['with stream that is no boolean', { model: 'demo', messages, stream: 'yes' }, 'stream'],
    ['with a message that has no role', { model: 'demo', messages: [{ content: 'a' }] }, 'messages[0].role'],
    ['nested too deep', `{"model":"demo","messages":[{"role":"user","content":${deep}}]}`, null],
    ['with a NUL', { model: 'demo', messages: [{ role: 'user', content: 'a\0b' }] }, 'messages[0].content'],
    ['with __proto__', '{"model":"demo","messages":[{"role":"user","content":"a"}],"__proto__":{}}', null],
  ])('%s is refused in OpenAI’s form', async (_, body, param) => {
    const answer = await post(demo, chatPath, body)
    expect(answer.status).toBe(400)
    const error = openAiError(answer)
    expect(error).toMatchObject({ type: 'invalid_request_error', code: 'invalid_request' })
    if (param !== null) expect(error.param).toBe(param)
  })

  it('names a model that does not exist', async () => {
    const answer = await post(demo, chatPath, { model: 'gpt-17', messages })
    expect(answer.status).toBe(404)
    expect(openAiError(answer)).toMatchObject({ code: 'model_not_found', param: 'model' })
  })

  it('takes a prompt of 10 MB', async () => {
    const body = { model: 'demo', messages: [{ role: 'user', content: 'a '.repeat(5_000_000) }], max_tokens: 1 }
    const { status, body: completion } = await post(demo, chatPath, body)
    expect([status, completion.object]).toEqual([200, 'chat.completion'])
  })

  it('of 17 MB is too large', async () => {
    const answer = await post(demo, chatPath, chatBody('x'.repeat(17_000_000)))
    expect(answer.status).toBe(413)
    expect(openAiError(answer).type).toBe('invalid_request_error')
  })

  it('of which only half comes leaves nothing behind', async () => {
    const socket = connect(demo.port, '127.0.0.1')
    const body = JSON.stringify(chatBody('1 word'))
    const head = `POST ${chatPath} HTTP/1.1\r\nhost: localhost\r\nx-user-id: half\r\ncontent-type: application/json\r\n`
    await new Promise<void>((resolve) => {
      socket.write(`${head}content-length: ${body.length}\r\n\r\n${body.slice(0, 20)}`, () => resolve())
    })
    socket.destroy()
    expect((await chat(demo, 'half', '1 word')).layer).toBe('1-Direct')
    const { items } = (await get(demo, '/api/v1/operations', as('half'))).body
    expect(items.length).toBe(1)
  })

  it('of another media type is refused', async () => {
    const answer = await call(demo, 'POST', chatPath, { body: 'hello', headers: { 'content-type': 'text/plain' } })
    expect(answer.status).toBe(415)
    openAiError(answer)
  })

  it('by another method is refused, saying which there is', async () => {
    const answer = await get(demo, chatPath)
    expect([answer.status, answer.headers.get('allow')]).toEqual([405, 'POST'])
    openAiError(answer)
  })

  it('to an unknown path is answered in OpenAI’s form', async () => {
    const answer = await post(demo, '/v1/embeddings', { input: 'a' })
    expect(answer.status).toBe(404)
    openAiError(answer)
  })

  it('with an Idempotency-Key that is too long is refused', async () => {
    const answer = await post(demo, chatPath, chatBody('a'), { 'idempotency-key': 'k'.repeat(256) })
    expect(answer.status).toBe(400)
    openAiError(answer)
  })
})

describe.concurrent('POST /api/v1/stream', () => {
  it.each<[string, unknown, string | null]>([
    ['that is no JSON', '{"query"', null],
    ['without a query', { model: 'demo' }, '/query'],
    ['with an empty query', { model: 'demo', query: '' }, '/query'],
    ['with a query of 100,001 characters', { model: 'demo', query: 'é'.repeat(100_001) }, '/query'],
    ['with a query that is no text', { model: 'demo', query: 7 }, '/query'],
    ['without a model', { query: 'a' }, '/model'],
    ['with a provider that is no text', { query: 'a', model: 'demo', provider: 1 }, '/provider'],
  ])('%s is a problem', async (_, body, path) => {
    const { status, code, errors } = problem(await post(demo, nativePath, body))
    expect([status, code]).toEqual([400, 'invalid_request'])
    if (path !== null) expect(errors.map((error) => error.path)).toContain(path)
  })

  it('takes a query of 100,000 characters, a provider, and members that it does not know', async () => {
    const body = { model: 'demo', query: `${'😀'.repeat(99_991)} 1 word`.slice(0), provider: 'any', more: 1 }
    const stream = await (await open(demo, nativePath, { body })).whole()
    expect([stream.status, stream.events.at(-1)?.data]).toEqual([200, '[DONE]'])
  })

  it('of a model that is not there is a problem', async () => {
    const answer = await post(demo, nativePath, { query: 'a', model: 'gpt-17' })
    expect(problem(answer)).toMatchObject({ status: 404, code: 'model_not_found' })
  })

  it('with an X-Thread-ID that is too long is a problem', async () => {
    const answer = await post(demo, nativePath, { query: 'a', model: 'demo' }, { 'x-thread-id': 't'.repeat(256) })
    expect(problem(answer)).toMatchObject({ status: 400, code: 'invalid_request' })
  })

  it('by another method is a problem, saying which there is', async () => {
    const answer = await get(demo, nativePath)
    expect([problem(answer).status, answer.headers.get('allow')]).toEqual([405, 'POST'])
  })
})

describe('without failover', () => {
  it('more than a user may have at once is refused with 429', async () => {
    const held = await native(bare, 'greedy', 'marker=greedy tokens=1 end=hang')
    await fleet.asked('greedy')
    const [openai, own] = await Promise.all([
      post(bare, chatPath, chatBody('marker=too-many'), as('greedy')),
      post(bare, nativePath, { query: 'script: marker=too-many', model: 'demo' }, as('greedy')),
    ])
    expect(openai.status).toBe(429)
    expect(openAiError(openai).type).toBe('rate_limit_error')
    expectRetryAfter(openai)
    expect(problem(own)).toMatchObject({ status: 429, code: 'connection_limit' })
    expectRetryAfter(own)
    expect(own.body.retry_after_seconds).toBeGreaterThanOrEqual(1)
    expect(fleet.timesAsked('too-many')).toBe(0)
    fleet.upstream.release('greedy')
    await held.whole()
  })

  it('another is served as soon as one has ended', async () => {
    const again = await until('the place is free', async () => {
      const stream = await (await chat(bare, 'greedy', 'tokens=1')).whole()
      return stream.status === 200 && stream
    })
    expect(again.layer).toBe('1-Direct')
  })

  it('more than there are places is refused with 503', async () => {
    const users = ['one', 'two', 'three']
    const held = await Promise.all(users.map((user) => native(bare, user, `marker=place-${user} tokens=1 end=hang`)))
    const [openai, own] = await Promise.all([
      post(bare, chatPath, chatBody('marker=no-place'), as('four')),
      post(bare, nativePath, { query: 'script: marker=no-place', model: 'demo' }, as('four')),
    ])
    expect(openai.status).toBe(503)
    expect(openAiError(openai).type).toBe('server_error')
    expectRetryAfter(openai)
    expect(problem(own)).toMatchObject({ status: 503, code: 'overloaded' })
    expect(fleet.timesAsked('no-place')).toBe(0)
    await Promise.all(users.map((user) => fleet.asked(`place-${user}`)))
    for (const user of users) fleet.upstream.release(`place-${user}`)
    await Promise.all(held.map((stream) => stream.whole()))
  })
})

describe('with a short queue', () => {
  let held: { release(): void }
  beforeAll(async () => {
    held = await occupy(fleet, narrow, 'crowd')
  })
  afterAll(() => held.release())

  it('more than QUEUE_FAILOVER_MAX_DEPTH is refused with 503', async () => {
    const waiting = await chat(narrow, 'crowd', 'marker=crowd')
    const answer = await post(narrow, chatPath, chatBody('marker=crowd'), as('crowd'))
    expect([waiting.status, answer.status]).toEqual([200, 503])
    expect(openAiError(answer).code).toBe('overloaded')
    expectRetryAfter(answer)
    waiting.leave()
  })

  it('a stream that waits longer than QUEUE_FAILOVER_TIMEOUT_SECONDS gets an error, without [DONE]', async () => {
    const stream = await until('a place in the queue', async () => {
      const asked = await chat(narrow, 'crowd', 'marker=crowd')
      return asked.status === 200 && asked
    })
    await stream.whole()
    expect(stream.error).toEqual({
      message: expect.any(String),
      type: 'server_error',
      param: null,
      code: 'queue_timeout',
    })
    expect(stream.raw).not.toContain('[DONE]')
    expect(fleet.timesAsked('crowd')).toBe(0)
  })

  it('a native one too, and it may be tried again', async () => {
    const stream = await until('a place in the queue', async () => {
      const asked = await native(narrow, 'crowd', 'marker=crowd')
      return asked.status === 200 && asked
    })
    await stream.whole()
    expect(stream.error).toEqual({ message: expect.any(String), code: 'queue_timeout', retryable: true })
  })

  it('one that does not stream is refused then, with Retry-After', async () => {
    const body = chatBody('marker=crowd', { stream: false })
    const answer = await until('a place in the queue', async () => {
      const asked = await post(narrow, chatPath, body, as('crowd'))
      return openAiError(asked).code !== 'overloaded' && asked
    })
    expect([answer.status, openAiError(answer).code]).toEqual([503, 'queue_timeout'])
    expectRetryAfter(answer)
    expect(fleet.timesAsked('crowd')).toBe(0)
  })

  it('a key whose request was refused is not used up', async () => {
    const last = await native(narrow, 'last-slot', 'marker=last-slot tokens=1 end=hang')
    await last.seen('its token', ({ content }) => content !== '')
    const waiting = await until('a place in the queue', async () => {
      const asked = await chat(narrow, 'crowd', 'marker=crowd')
      return asked.status === 200 && asked
    })
    const headers = { 'idempotency-key': 'k' }
    const refused = await chat(narrow, 'keyed', 'marker=keyed tokens=1', { headers })
    expect(refused.status).toBe(503)
    waiting.leave()
    fleet.upstream.release('last-slot')
    await last.whole()
    const again = await until('it is served', async () => {
      const asked = await (await chat(narrow, 'keyed', 'marker=keyed tokens=1', { headers })).whole()
      return asked.status !== 503 && asked
    })
    expect([again.status, again.content]).toEqual([200, ' keyed#1'])
  })
})

describe.concurrent('with authentication', () => {
  it.each([
    ['without a key', {}],
    ['with a key that is none', bearer('nobody')],
  ])('%s OpenAI’s routes answer 401 in its form', async (_, headers) => {
    const answers = await Promise.all([
      post(guarded, chatPath, chatBody('marker=stranger'), headers),
      get(guarded, '/v1/models', headers),
    ])
    for (const answer of answers) {
      expect(answer.status).toBe(401)
      expect(answer.headers.get('www-authenticate')).toContain('Bearer')
      expect(openAiError(answer)).toMatchObject({ type: 'authentication_error', code: 'invalid_api_key' })
    }
    expect(fleet.timesAsked('stranger')).toBe(0)
  })

  it('the native routes answer 401 with a problem', async () => {
    const id = '0190a8e0-0000-7000-8000-000000000000'
    const answers = await Promise.all([
      post(guarded, nativePath, { query: 'a', model: 'demo' }),
      get(guarded, `/api/v1/streams/${id}`),
      post(guarded, `/api/v1/streams/${id}/cancel`),
    ])
    for (const answer of answers) {
      expect(problem(answer)).toMatchObject({ status: 401, code: 'unauthenticated' })
      expect(answer.headers.get('www-authenticate')).toContain('Bearer')
    }
  })

  it('a key without the role is answered 403, each in its form', async () => {
    const openai = await post(guarded, chatPath, chatBody('a'), bearer(keyOf.reader))
    expect([openai.status, openAiError(openai).type]).toEqual([403, 'permission_error'])
    const own = await post(guarded, nativePath, { query: 'a', model: 'demo' }, bearer(keyOf.reader))
    expect(problem(own)).toMatchObject({ status: 403, code: 'forbidden' })
  })

  it('another’s stream is not there, neither to read nor to cancel', async () => {
    const headers = bearer(keyOf.ann)
    const stream = await native(guarded, 'bob', 'marker=private tokens=1 end=hang', { headers })
    await stream.seen('its token', ({ content }) => content !== '')
    // Named in a header, but the key says who it is.
    const asBob = { ...bearer(keyOf.bob), 'x-user-id': 'ann' }
    const read = await get(guarded, `/api/v1/streams/${stream.id}`, asBob)
    const cancel = await post(guarded, `/api/v1/streams/${stream.id}/cancel`, undefined, asBob)
    expect([problem(read).status, problem(cancel).status]).toEqual([404, 404])
    expect((await fleet.asked('private')).outcome).toBe('open')
    fleet.upstream.release('private')
    await stream.whole()
  })

  it('operators read and cancel every stream', async () => {
    const headers = bearer(keyOf.ann)
    const stream = await native(guarded, 'ann', 'marker=operated tokens=1 end=hang', { headers })
    await stream.seen('its token', ({ content }) => content !== '')
    const read = await open(guarded, `/api/v1/streams/${stream.id}`, { headers: bearer(keyOf.ops) })
    await read.seen('its token', ({ content }) => content === ' operated#1')
    expect((await post(guarded, `/api/v1/streams/${stream.id}/cancel`, undefined, bearer(keyOf.ops))).status).toBe(200)
    await fleet.abortedMs('operated')
    await Promise.all([stream.whole(), read.whole()])
  })
})
