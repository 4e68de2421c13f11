/** OpenAI's routes through the real server: their form, waiting in the queue, and an upstream's faults. */
import { afterAll, beforeAll, describe, expect, it } from 'vitest'
import { as, blocksWithoutData, chat, chatBody, type Fleet, occupy, startFleet } from '../generation-server.js'
import { get, post, type ServerProcess, until } from '../server-process.js'

/** "At once": long before there is anything to tell, on a machine that runs other tests too. */
const atOnceMs = 5_000

let fleet: Fleet
let demo: ServerProcess
/** One place for each user, and otherwise the limits that are usual. */
let server: ServerProcess
/** Little patience with the upstream. */
let strict: ServerProcess

beforeAll(async () => {
  fleet = await startFleet()
  const started = await Promise.all([
    fleet.startDemo({ GENERATION_DEMO_TOKENS_PER_SECOND: '1000' }),
    fleet.start({
      CONNECTION_POOL_MAX_PER_USER: '1',
      STREAM_HEARTBEAT_SECONDS: '1',
      GENERATION_UPSTREAM_KEY: 'sk-upstream',
      QUEUE_FAILOVER_MAX_RETRIES: '2',
      QUEUE_FAILOVER_BASE_DELAY_MS: '10',
    }),
    fleet.start({
      CONNECTION_POOL_MAX_PER_USER: '1',
      STREAM_FIRST_TOKEN_SECONDS: '1',
      STREAM_IDLE_SECONDS: '1',
      STREAM_TOTAL_SECONDS: '3',
      QUEUE_FAILOVER_BASE_DELAY_MS: '2000',
    }),
  ])
  demo = started[0]
  server = started[1]
  strict = started[2]
})

afterAll(() => fleet.close())

/** `stream: false`. */
const whole = (of: ServerProcess, user: string, script: string, members: object = {}) =>
  post(of, '/v1/chat/completions', chatBody(script, { stream: false, ...members }), as(user))

describe.concurrent('a chat that streams', () => {
  it('is what the upstream said, chunk by chunk, then [DONE]', async () => {
    const stream = await (await chat(server, 'form', 'marker=form tokens=2')).whole()
    const head = { id: 'chatcmpl-form', object: 'chat.completion.chunk', created: expect.any(Number), model: 'demo' }
    const choice = (delta: object, finish_reason: string | null = null) => ({
      ...head,
      choices: [{ index: 0, delta, logprobs: null, finish_reason }],
    })
    expect(stream.events.slice(0, -1).map(({ data }) => JSON.parse(data))).toEqual([
      choice({ role: 'assistant', content: '' }),
      choice({ content: ' form#1' }),
      choice({ content: ' form#2' }),
      choice({}, 'stop'),
    ])
    expect(stream.events.map(({ id }) => id)).toEqual(['1', '2', '3', '4', '5'])
    expect(stream.events.at(-1)?.data).toBe('[DONE]')
  })

  it('has the headers of a stream', async () => {
    const { headers } = await (await chat(server, 'chat-head', 'tokens=1')).whole()
    expect(Object.fromEntries(headers)).toMatchObject({
      'content-type': 'text/event-stream; charset=utf-8',
      'cache-control': 'no-cache, no-transform',
      'x-accel-buffering': 'no',
      'x-resilience-layer': '1-Direct',
      'x-stream-id': expect.stringMatching(/^[\da-f-]{36}$/),
      'x-thread-id': expect.stringMatching(/^[\da-f-]{36}$/),
    })
  })

  it('sends its head at once though the upstream has not answered', async () => {
    const stream = await chat(server, 'chat-slow', 'marker=chat-slow headers=60000')
    expect([stream.status, stream.headMs < atOnceMs]).toEqual([200, true])
    stream.leave()
  })

  it('has the same id and time in all chunks of the demo model', async () => {
    const stream = await (await chat(demo, 'constant', '40 words')).whole()
    const chunks = stream.events.slice(0, -1).map(({ data }) => JSON.parse(data))
    expect(new Set(chunks.map(({ id, created, model }) => `${id} ${created} ${model}`)).size).toBe(1)
    expect(chunks.length).toBe(42)
  })

  it.each(['demo', 'scripted'])('with include_usage says it once, at the end and without choices: %s', async (of) => {
    const members = { stream_options: { include_usage: true } }
    const stream = await (
      await chat(of === 'demo' ? demo : server, `usage-${of}`, '3 words tokens=3', { members })
    ).whole()
    const chunks = stream.events.slice(0, -1).map(({ data }) => JSON.parse(data))
    expect(chunks.filter(({ choices }) => choices.length === 0)).toEqual([chunks.at(-1)])
    expect(chunks.at(-1).usage).toMatchObject({ completion_tokens: 3 })
  })

  it.each(['demo', 'scripted'])('without it has a choice in every chunk: %s', async (of) => {
    const stream = await (await chat(of === 'demo' ? demo : server, `plain-${of}`, '3 words tokens=3')).whole()
    const chunks = stream.events.slice(0, -1).map(({ data }) => JSON.parse(data))
    expect(chunks.map(({ choices }) => choices.length)).toEqual(Array(5).fill(1))
  })

  it('sends the body on as it came, with our key', async () => {
    const tools = [{ type: 'function', function: { name: 'weather', parameters: { type: 'object' } } }]
    const members = { model: 'any/model:7b', tools, temperature: 0.3, of_the_future: { a: [1] } }
    await (await chat(server, 'passed', 'marker=passed tokens=1', { members })).whole()
    const { body, authorization } = await fleet.asked('passed')
    expect(body).toEqual(chatBody('marker=passed tokens=1', members))
    expect(authorization).toBe('Bearer sk-upstream')
  })
})

describe.concurrent('a chat that does not stream', () => {
  it.each(['demo', 'scripted'])('is one answer in JSON, with the same words: %s', async (of) => {
    const at = of === 'demo' ? demo : server
    const streamed = await (await chat(at, `both-${of}`, 'marker=both 5 words tokens=5')).whole()
    const { status, headers, body } = await whole(at, `both-${of}`, 'marker=both 5 words tokens=5')
    expect(status).toBe(200)
    expect(headers.get('content-type')).toBe('application/json; charset=utf-8')
    expect(body).toMatchObject({
      object: 'chat.completion',
      choices: [{ message: { role: 'assistant', content: streamed.content }, finish_reason: 'stop' }],
      usage: { completion_tokens: 5 },
    })
  })

  it('names its stream and its layer too', async () => {
    const { headers } = await whole(server, 'whole-head', 'tokens=1')
    expect([headers.get('x-resilience-layer'), headers.get('x-stream-id')]).toEqual([
      '1-Direct',
      expect.stringMatching(/^[\da-f-]{36}$/),
    ])
  })

  it('waits while it is queued, then is answered', async () => {
    const held = await occupy(fleet, server, 'whole-queued')
    const answer = whole(server, 'whole-queued', 'marker=whole-queued tokens=2')
    await until('it is queued', async () => {
      const { items } = (await get(server, '/api/v1/operations?status=pending&limit=200')).body
      return items.some(({ partition }) => String(partition).startsWith('whole-queued#'))
    })
    held.release()
    const { status, headers, body } = await answer
    expect([status, headers.get('x-resilience-layer')]).toEqual([200, '3-Queue-Failover'])
    expect(body).toMatchObject({ choices: [{ message: { content: ' whole-queued#1 whole-queued#2' } }] })
  })
})

describe.concurrent('GET /v1/models', () => {
  it('lists the demo model where there is no upstream', async () => {
    expect((await get(demo, '/v1/models')).body).toEqual({
      object: 'list',
      data: [{ id: 'demo', object: 'model', created: expect.any(Number), owned_by: 'spillway' }],
    })
  })

  it('lists what the upstream has', async () => {
    expect((await get(server, '/v1/models')).body).toMatchObject({ object: 'list', data: [{ id: 'scripted' }] })
  })
})

describe.concurrent('a chat that is queued', () => {
  it('changes nothing on the wire except comment lines', async () => {
    const held = await occupy(fleet, server, 'wire')
    const stream = await chat(server, 'wire', 'marker=wire tokens=2')
    expect(stream.headMs).toBeLessThan(atOnceMs)
    expect(stream.layer).toBe('3-Queue-Failover')
    await stream.seen('its position and a heartbeat', ({ raw }) => /^: queued position=0 .*\n(?:.+\n)*:\n/m.test(raw))
    expect(stream.events).toEqual([])
    held.release()
    await stream.whole()
    const direct = await (await chat(server, 'wire-direct', 'marker=wire tokens=2')).whole()
    const normal = (raw: string) => raw.replace(/^:.*\n/gm, '').replace(/"created":\d+/g, '')
    expect(normal(stream.raw)).toBe(normal(direct.raw))
    expect(blocksWithoutData(stream.raw)).toEqual([])
    expect(stream.raw).not.toMatch(/^(?:event|retry)/m)
  })

  it('waits no longer than x-stainless-timeout allows', async () => {
    const held = await occupy(fleet, server, 'hurry')
    const headers = { 'x-stainless-timeout': '1' }
    const stream = await (await chat(server, 'hurry', 'marker=hurry', { headers })).whole()
    // Where it is known that it would wait longer, it is refused before.
    const code = stream.status === 200 ? stream.error?.code : JSON.parse(stream.raw).error.code
    expect([stream.status, code]).toEqual(stream.status === 200 ? [200, 'queue_timeout'] : [503, 'overloaded'])
    expect(stream.raw).not.toContain('[DONE]')
    expect(fleet.timesAsked('hurry')).toBe(0)
    held.release()
  })
})

describe.concurrent('an upstream', () => {
  it('that fails once is retried: its client sees only the good answer', async () => {
    const stream = await (await chat(server, 'once', 'marker=once tokens=2 status=500 times=1')).whole()
    expect([stream.status, stream.content, stream.error]).toEqual([200, ' once#1 once#2', undefined])
    expect(fleet.timesAsked('once')).toBe(2)
  })

  it('that always fails is reported in a stream that has begun, without [DONE]', async () => {
    const stream = await (await chat(server, 'never', 'marker=never headers=200 status=500')).whole()
    expect(stream.status).toBe(200)
    expect(stream.error).toEqual({
      message: expect.any(String),
      type: expect.any(String),
      param: null,
      code: 'upstream_error',
    })
    expect(stream.raw).not.toContain('[DONE]')
  })

  it('is retried QUEUE_FAILOVER_MAX_RETRIES times', async () => {
    const { status, body } = await whole(server, 'retries', 'marker=retries status=500')
    expect([status, (body as { error?: { code: string } }).error?.code]).toEqual([502, 'upstream_error'])
    expect(fleet.timesAsked('retries')).toBe(3)
  })

  it('is not asked again where QUEUE_FAILOVER_BASE_DELAY_MS is more than is left for the first token', async () => {
    const { status } = await whole(strict, 'no-time', 'marker=no-time status=500')
    expect([status, fleet.timesAsked('no-time')]).toEqual([502, 1])
  })

  it('that sends Retry-After is retried then', async () => {
    const stream = await (await chat(server, 'busy', 'marker=busy tokens=1 status=429 retry_after=1 times=1')).whole()
    expect(stream.content).toBe(' busy#1')
    const [first, second] = fleet.upstream.requests.filter(({ marker }) => marker === 'busy')
    expect((second?.beganMs ?? 0) - (first?.beganMs ?? 0)).toBeGreaterThanOrEqual(990)
  })

  it('with a Retry-After too far away is reported at once, with that time', async () => {
    const { status, headers, body } = await whole(server, 'full', 'marker=full status=429 retry_after=3600')
    expect(status).toBe(503)
    const seconds = Number(headers.get('retry-after'))
    expect([seconds >= 3_600, seconds <= 3_960]).toEqual([true, true])
    expect(body).toMatchObject({ error: { code: 'overloaded' } })
    expect(fleet.timesAsked('full')).toBe(1)
  })

  it.each([400, 404, 422])('that refuses with %i is passed on with its error, and not asked again', async (status) => {
    const answer = await whole(server, `refused-${status}`, `marker=refused-${status} status=${status}`)
    expect(answer.status).toBe(status)
    expect(answer.body).toEqual({
      error: { message: `scripted ${status}`, type: 'scripted_error', param: null, code: 'scripted' },
    })
    expect(fleet.timesAsked(`refused-${status}`)).toBe(1)
  })

  it('that refuses at once gives a stream its status', async () => {
    // Unless the machine is so slow that the head was sent before: then the error is in the stream.
    const refused = await until('a refusal that came before the head', async () => {
      const stream = await (await chat(server, 'refused-stream', 'status=422')).whole()
      if (stream.status === 200) expect(stream.error).toMatchObject({ message: 'scripted 422' })
      return stream.status !== 200 && stream
    })
    expect([refused.status, JSON.parse(refused.raw).error.message]).toEqual([422, 'scripted 422'])
    expect(refused.headers.get('content-type')).toContain('application/json')
  })

  it('that does not accept our key is our fault, and its words are not passed on', async () => {
    const { status, text } = await whole(server, 'key', 'marker=key status=401')
    expect(status).toBe(502)
    expect(text).not.toContain('scripted 401')
    expect(JSON.parse(text).error.code).toBe('upstream_error')
    expect(fleet.timesAsked('key')).toBe(1)
  })

  it.each([
    ['garbage=2', 'upstream_error'],
    ['end=half', 'upstream_error'],
    ['end=cut', 'upstream_error'],
    ['end=error', 'scripted'],
  ])('that breaks off by %s is reported after its tokens, without [DONE]', async (how, code) => {
    const marker = how.replace('=', '-')
    const stream = await (await chat(server, marker, `marker=${marker} tokens=2 ${how}`)).whole()
    expect(stream.content).toBe(` ${marker}#1 ${marker}#2`)
    expect(stream.error).toEqual({ message: expect.any(String), type: expect.any(String), param: null, code })
    expect(stream.raw).not.toContain('[DONE]')
    // After the first token a request may not be retried.
    expect(fleet.timesAsked(marker)).toBe(1)
  })

  it('that ends with a finish_reason and no [DONE] has come to its end', async () => {
    const stream = await (await chat(server, 'nodone', 'marker=nodone tokens=1 end=nodone')).whole()
    expect([stream.error, stream.events.at(-1)?.data]).toEqual([undefined, '[DONE]'])
  })

  it('that breaks off before its first token is retried', async () => {
    const stream = await (await chat(server, 'early', 'marker=early tokens=0 end=cut times=1')).whole()
    expect([stream.error, fleet.timesAsked('early')]).toEqual([undefined, 2])
  })
})

describe.concurrent('the time of an answer', () => {
  it('until its first token is limited by STREAM_FIRST_TOKEN_SECONDS', async () => {
    const stream = await (await chat(strict, 'first', 'marker=first first=60000')).whole()
    expect(stream.error).toMatchObject({ code: 'upstream_timeout' })
    expect(stream.raw).not.toContain('[DONE]')
    await fleet.abortedMs('first')
  })

  it('between two tokens is limited by STREAM_IDLE_SECONDS', async () => {
    const stream = await (await chat(strict, 'idle', 'marker=idle tokens=1 end=hang')).whole()
    expect(stream.content).toBe(' idle#1')
    expect(stream.error).toMatchObject({ code: 'upstream_timeout' })
    await fleet.abortedMs('idle')
  })

  it('in all is limited by STREAM_TOTAL_SECONDS', async () => {
    const stream = await (await chat(strict, 'total', 'marker=total tokens=1000 every=100')).whole()
    expect(stream.content).toMatch(/^ total#1 total#2/)
    expect(stream.error).toMatchObject({ code: 'upstream_timeout' })
    await fleet.abortedMs('total')
  })

  it('is not cut at the limits of waiting once it streams', async () => {
    // Longer than the first token and a silence may take; shorter than the whole may.
    const stream = await (await chat(strict, 'long', 'marker=long tokens=16 every=100')).whole()
    expect([stream.error, stream.events.at(-1)?.data]).toEqual([undefined, '[DONE]'])
  })

  it('has no first-token limit where nothing is streamed', async () => {
    const { status } = await whole(strict, 'whole-long', 'tokens=15 every=100')
    expect(status).toBe(200)
  })
})
