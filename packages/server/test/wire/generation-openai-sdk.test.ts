/** OpenAI's own package, as it is published, against the real server: whatever it does there, it does here. */
import { createHash } from 'node:crypto'
import { mkdtemp, rm, writeFile } from 'node:fs/promises'
import type { ServerResponse } from 'node:http'
import { tmpdir } from 'node:os'
import { join } from 'node:path'
import OpenAI, {
  APIError,
  AuthenticationError,
  BadRequestError,
  type ClientOptions,
  InternalServerError,
  NotFoundError,
  PermissionDeniedError,
  RateLimitError,
  UnprocessableEntityError,
} from 'openai'
import { Stream } from 'openai/core/streaming'
import type { ChatCompletionChunk } from 'openai/resources/chat/completions'
import { afterAll, beforeAll, describe, expect, it } from 'vitest'
import { monotonicMs } from '../../../spillway/test/setup/scripted-upstream.js'
import { as, type Fleet, native, occupy, open, startFleet } from '../generation-server.js'
import { type Call, get, latch, type ServerProcess, startTarget, type Target, until } from '../server-process.js'

const soonMs = 1_000
const layers = ['1-Direct', '3-Queue-Failover'] as const
type Layer = (typeof layers)[number]
const keys = { ann: 'sk-of-ann', reader: 'sk-of-reader' }

let fleet: Fleet
let folder: string
let tools: Target
/** One place for each user: a second chat of the same user is queued. */
let server: ServerProcess
/** The waiting room has one place, too. */
let narrow: ServerProcess
/** Requests without a free slot are refused. Its upstream calls tools. */
let strict: ServerProcess
/** The demo model, behind keys. */
let locked: ServerProcess

beforeAll(async () => {
  folder = await mkdtemp(join(tmpdir(), 'spillway-openai-'))
  const file = join(folder, 'keys.json')
  const named = (key: string) => `sha256:${createHash('sha256').update(key).digest('hex')}`
  const known = { ann: { identity: 'ann', roles: ['submit'] }, reader: { identity: 'reader', roles: ['metrics'] } }
  await writeFile(file, JSON.stringify({ [named(keys.ann)]: known.ann, [named(keys.reader)]: known.reader }))
  fleet = await startFleet()
  tools = await startTarget(callTools)
  const single = { CONNECTION_POOL_MAX_PER_USER: '1' }
  // Two at a time: four would share two cores, and each has only so long to start.
  const pair = await Promise.all([
    fleet.start({ ...single, STREAM_HEARTBEAT_SECONDS: '1', QUEUE_FAILOVER_MAX_RETRIES: '1' }),
    fleet.start({ ...single, QUEUE_FAILOVER_MAX_DEPTH: '1' }),
  ])
  server = pair[0]
  narrow = pair[1]
  const others = await Promise.all([
    fleet.start({ ...single, QUEUE_FAILOVER_ENABLED: 'false', GENERATION_UPSTREAM_URL: `${tools.origin}/v1` }),
    fleet.startDemo({ SPILLWAY_API_KEYS: file, GENERATION_DEMO_TOKENS_PER_SECOND: '1000' }),
  ])
  strict = others[0]
  locked = others[1]
})

afterAll(async () => {
  await fleet?.close()
  await tools?.close()
  await rm(folder, { recursive: true, force: true })
})

const clientOf = (at: { origin: string }, user: string, options: ClientOptions = {}) =>
  new OpenAI({ baseURL: `${at.origin}/v1`, apiKey: 'unused', maxRetries: 0, defaultHeaders: as(user), ...options })

const asking = (script: string) => ({
  model: 'scripted',
  messages: [{ role: 'user' as const, content: `script: ${script}` }],
})

const words = (marker: string, count: number) => Array.from({ length: count }, (_, n) => ` ${marker}#${n + 1}`).join('')

const contentOf = (chunks: readonly ChatCompletionChunk[]) =>
  chunks.map(({ choices }) => choices[0]?.delta.content ?? '').join('')

async function all<Item>(items: AsyncIterable<Item>): Promise<Item[]> {
  const read: Item[] = []
  for await (const item of items) read.push(item)
  return read
}

/** A user who is served at once, or one who has to wait until it is let through. */
async function userOn(layer: Layer, name: string) {
  const user = `${name}-${layer}`
  const held = layer === '1-Direct' ? null : await occupy(fleet, server, user)
  return {
    user,
    marker: user,
    letThrough: async (): Promise<void> => {
      if (held === null) return
      await until('it is queued', async () => {
        const { items } = (await get(server, '/api/v1/operations?status=pending&limit=200')).body
        return items.some(({ partition }) => String(partition).startsWith(`${user}#`))
      })
      held.release()
    },
  }
}

/** The fault that ends a stream, and what had come before it. */
async function readToFault(stream: AsyncIterable<ChatCompletionChunk>) {
  const chunks: ChatCompletionChunk[] = []
  try {
    for await (const chunk of stream) chunks.push(chunk)
  } catch (fault) {
    return { fault, content: contentOf(chunks) }
  }
  throw new Error('the stream ended as if it were whole')
}

/** An upstream that asks for a tool call, then answers its result with a word; it sends nothing to `hold`. */
function callTools({ body }: Call, response: ServerResponse): void {
  const last = JSON.parse(body).messages.at(-1)
  const head = { id: 'chatcmpl-tools', object: 'chat.completion.chunk', created: 1_700_000_000, model: 'tools' }
  const say = (delta: object, finish_reason: string | null = null): void => {
    response.write(`data: ${JSON.stringify({ ...head, choices: [{ index: 0, delta, finish_reason }] })}\n\n`)
  }
  response.writeHead(200, { 'content-type': 'text/event-stream' })
  say({ role: 'assistant', content: null })
  if (last.content === 'hold') return
  if (last.role === 'tool') {
    say({ content: `It is ${last.content}.` })
    say({}, 'stop')
  } else {
    const called = { name: 'weather', arguments: '' }
    say({ tool_calls: [{ index: 0, id: 'call-1', type: 'function', function: called }] })
    for (const piece of ['{"city":', '"Zürich"}']) say({ tool_calls: [{ index: 0, function: { arguments: piece } }] })
    say({}, 'tool_calls')
  }
  response.end('data: [DONE]\n\n')
}

describe.concurrent.each(layers)('the openai package, %s', (layer) => {
  it('streams', async () => {
    const { user, marker, letThrough } = await userOn(layer, 'stream')
    const asked = { ...asking(`marker=${marker} tokens=3`), stream: true as const }
    const { data, response } = await clientOf(server, user).chat.completions.create(asked).withResponse()
    await letThrough()
    const chunks = await all(data)
    expect(response.headers.get('x-resilience-layer')).toBe(layer)
    expect(contentOf(chunks)).toBe(words(marker, 3))
    expect(chunks.at(-1)?.choices[0]?.finish_reason).toBe('stop')
  })

  it('sends a complete answer', async () => {
    const { user, marker, letThrough } = await userOn(layer, 'whole')
    const answering = clientOf(server, user)
      .chat.completions.create(asking(`marker=${marker} tokens=3`))
      .withResponse()
    const [{ data, response }] = await Promise.all([answering, letThrough()])
    expect(response.headers.get('x-resilience-layer')).toBe(layer)
    expect(data.choices[0]?.message).toMatchObject({ role: 'assistant', content: words(marker, 3) })
    expect(data.usage?.completion_tokens).toBe(3)
  })

  it('puts a stream together, telling each piece as it comes', async () => {
    const { user, marker, letThrough } = await userOn(layer, 'helper')
    const runner = clientOf(server, user).chat.completions.stream(asking(`marker=${marker} tokens=3`))
    const pieces: string[] = []
    runner.on('content', (piece) => pieces.push(piece))
    await letThrough()
    const { choices } = await runner.finalChatCompletion()
    expect(pieces.filter((piece) => piece !== '')).toEqual([1, 2, 3].map((n) => ` ${marker}#${n}`))
    expect(choices[0]?.message.content).toBe(words(marker, 3))
  })

  it('gets the usage that it asked for, once and last', async () => {
    const { user, marker, letThrough } = await userOn(layer, 'usage')
    const stream = await clientOf(server, user).chat.completions.create({
      ...asking(`marker=${marker} tokens=3`),
      stream: true,
      stream_options: { include_usage: true },
    })
    await letThrough()
    const usages = (await all(stream)).map(({ usage }) => usage?.completion_tokens ?? null)
    expect(usages).toEqual([...Array(usages.length - 1).fill(null), 3])
  })

  it.each([
    ['end=error', 'scripted'],
    ['end=cut', 'upstream_error'],
  ])('throws where a stream breaks off (%s), after the received chunks', async (how, code) => {
    const { user, marker, letThrough } = await userOn(layer, `broken-${code}`)
    const asked = { ...asking(`marker=${marker} tokens=2 ${how}`), stream: true as const }
    const stream = await clientOf(server, user).chat.completions.create(asked)
    await letThrough()
    const { fault, content } = await readToFault(stream)
    expect(content).toBe(words(marker, 2))
    expect(fault).toBeInstanceOf(APIError)
    expect(fault).toMatchObject({ code })
  })

  it.each(['abort', 'break'])('that leaves a stream by %s is gone for the upstream within 1 s', async (how) => {
    const { user, marker, letThrough } = await userOn(layer, `left-${how}`)
    const asked = { ...asking(`marker=${marker} tokens=1 end=hang`), stream: true as const }
    const stream = await clientOf(server, user).chat.completions.create(asked)
    await letThrough()
    let leftMs = Number.NaN
    for await (const chunk of stream) {
      if (contentOf([chunk]) === '') continue
      leftMs = monotonicMs()
      if (how === 'break') break
      stream.controller.abort()
    }
    expect((await fleet.abortedMs(marker)) - leftMs).toBeLessThan(soonMs)
  })

  it('that leaves an answer without stream is gone for the upstream within 1 s', async () => {
    const { user, marker, letThrough } = await userOn(layer, 'left-whole')
    const leaving = new AbortController()
    const asked = asking(`marker=${marker} first=60000`)
    const answer = clientOf(server, user).chat.completions.create(asked, { signal: leaving.signal })
    const refused = expect(answer).rejects.toBeInstanceOf(OpenAI.APIUserAbortError)
    await letThrough()
    await fleet.asked(marker)
    const leftMs = monotonicMs()
    leaving.abort()
    await refused
    expect((await fleet.abortedMs(marker)) - leftMs).toBeLessThan(soonMs)
  })
})

describe.concurrent('the openai package in the queue', () => {
  it('that leaves while it waits is never generated', async () => {
    const { user, marker } = await userOn('3-Queue-Failover', 'left-queued')
    const asked = { ...asking(`marker=${marker}`), stream: true as const }
    const { data, response } = await clientOf(server, user).chat.completions.create(asked).withResponse()
    const leftAt = Date.now()
    data.controller.abort()
    const path = `/api/v1/operations/${response.headers.get('x-stream-id')}`
    const { processed_at } = await until('it is cancelled', async () => {
      const { body } = await get(server, path, as(user))
      return body.status === 'cancelled' && body
    })
    expect(Date.parse(processed_at) - leftAt).toBeLessThan(soonMs)
    expect(fleet.timesAsked(marker)).toBe(0)
  })

  it('waits no longer than the timeout that it was given for a stream', async () => {
    const { user, marker } = await userOn('3-Queue-Failover', 'hurry')
    const asked = { ...asking(`marker=${marker}`), stream: true as const }
    // Where it is known that it would wait longer, it is refused before.
    const outcome = clientOf(server, user)
      .chat.completions.create(asked, { timeout: 2_000 })
      .then(readToFault, (fault) => ({ fault }))
    const { fault } = await outcome
    expect(fault).toBeInstanceOf(APIError)
    expect(fault).toMatchObject({ code: expect.stringMatching(/^(?:queue_timeout|overloaded)$/) })
  })

  it('is not generated behind its back once it has waited for long enough', async () => {
    const { user, marker, letThrough } = await userOn('3-Queue-Failover', 'hurry-whole')
    const client = clientOf(server, user)
    const late = client.chat.completions.create(asking(`marker=${marker}-late`), { timeout: 1_000 })
    await expect(late).rejects.toBeInstanceOf(APIError)
    const next = client.chat.completions.create(asking(`marker=${marker}-next tokens=1`))
    await letThrough()
    // It waited behind the one that timed out.
    expect((await next).choices[0]?.message.content).toBe(` ${marker}-next#1`)
    expect(fleet.timesAsked(`${marker}-late`)).toBe(0)
  })

  it('is refused with 503 when the room is full, retries by itself, and is served', async () => {
    const held = await occupy(fleet, narrow, 'again')
    const waiting = await native(narrow, 'again', 'marker=again-waiting tokens=1')
    const tries: { status: number; atMs: number; retryAfter: string | null; count: string | null }[] = []
    const refused = latch()
    const watched: typeof fetch = async (input, init) => {
      const answer = await fetch(input, init)
      const { status, headers } = answer
      const count = new Headers(init?.headers).get('x-stainless-retry-count')
      tries.push({ status, count, atMs: monotonicMs(), retryAfter: headers.get('retry-after') })
      refused.open()
      return answer
    }
    const client = clientOf(narrow, 'again', { fetch: watched, maxRetries: 2 })
    const answer = client.chat.completions.create(asking('marker=again tokens=1'))
    await refused.opened
    held.release()
    await waiting.whole()
    expect((await answer).choices[0]?.message.content).toBe(' again#1')
    expect(tries).toMatchObject([
      { status: 503, count: '0' },
      { status: 200, count: '1' },
    ])
    const [first, second] = tries
    const waitedMs = (second?.atMs ?? 0) - (first?.atMs ?? 0)
    // A timer may be a millisecond early.
    expect(waitedMs).toBeGreaterThan(Number(first?.retryAfter) * 1_000 - 10)
  })
})

describe.concurrent('the openai package with tools', () => {
  const weather = { type: 'object', properties: { city: { type: 'string' } } }

  it('sends them as they are and puts the calls together', async () => {
    const messages = [{ role: 'user' as const, content: 'weather?' }]
    const offered = [{ type: 'function' as const, function: { name: 'weather', strict: true, parameters: weather } }]
    const asked = { model: 'tools', messages, tools: offered, tool_choice: 'auto' as const, parallel_tool_calls: false }
    const final = await clientOf(strict, 'calls').chat.completions.stream(asked).finalChatCompletion()
    expect(final.choices[0]).toMatchObject({
      finish_reason: 'tool_calls',
      message: { tool_calls: [{ id: 'call-1', function: { name: 'weather', arguments: '{"city":"Zürich"}' } }] },
    })
    const sent = tools.calls.map(({ body }) => JSON.parse(body)).find(({ tool_choice }) => tool_choice === 'auto')
    expect(sent).toEqual({ ...asked, stream: true })
  })

  it('runs them and gives their results back', async () => {
    const cities: string[] = []
    const run = (given: { city: string }) => {
      cities.push(given.city)
      return 'sunny'
    }
    const runner = clientOf(strict, 'runs').chat.completions.runTools({
      model: 'tools',
      stream: true,
      messages: [{ role: 'user', content: 'weather?' }],
      tools: [
        {
          type: 'function',
          function: { name: 'weather', description: '', parameters: weather, parse: JSON.parse, function: run },
        },
      ],
    })
    expect(await runner.finalContent()).toBe('It is sunny.')
    expect(cities).toEqual(['Zürich'])
  })
})

describe.concurrent('the openai package throws', () => {
  const refusal = (client: OpenAI, asked: object = asking('tokens=1')): Promise<unknown> =>
    client.chat.completions.create(asked as ReturnType<typeof asking>).then(
      () => 'it was not refused',
      (fault: unknown) => fault,
    )

  it('BadRequestError, naming the member', async () => {
    const fault = await refusal(clientOf(server, 'bad'), { model: 'scripted', messages: [{ content: 'no role' }] })
    expect(fault).toBeInstanceOf(BadRequestError)
    expect(fault).toMatchObject({ param: 'messages[0].role', type: 'invalid_request_error' })
  })

  it('NotFoundError for a model that the demo does not have', async () => {
    const fault = await refusal(clientOf(locked, 'ann', { apiKey: keys.ann }))
    expect(fault).toBeInstanceOf(NotFoundError)
    expect(fault).toMatchObject({ code: 'model_not_found', param: 'model' })
  })

  it('AuthenticationError for a key that is not known', async () => {
    const fault = await refusal(clientOf(locked, 'ann', { apiKey: 'sk-of-nobody' }))
    expect(fault).toBeInstanceOf(AuthenticationError)
    expect(fault).toMatchObject({ code: 'invalid_api_key' })
  })

  it('PermissionDeniedError for a key that may not ask', async () => {
    expect(await refusal(clientOf(locked, 'reader', { apiKey: keys.reader }))).toBeInstanceOf(PermissionDeniedError)
  })

  it('RateLimitError, with the time to wait, for a user at its limit without failover', async () => {
    const client = clientOf(strict, 'limited')
    const holding = { model: 'tools', messages: [{ role: 'user' as const, content: 'hold' }], stream: true as const }
    const held = await client.chat.completions.create(holding)
    const fault = await refusal(client)
    held.controller.abort()
    expect(fault).toBeInstanceOf(RateLimitError)
    const { headers } = fault as RateLimitError
    expect(Number(headers.get('retry-after'))).toBeGreaterThanOrEqual(1)
  })

  it('InternalServerError for an upstream that fails and fails', async () => {
    const fault = await refusal(clientOf(server, 'failing'), asking('marker=failing status=500'))
    expect(fault).toBeInstanceOf(InternalServerError)
    expect(fault).toMatchObject({ status: 502, code: 'upstream_error' })
  })

  it('UnprocessableEntityError where the upstream refuses, in its words', async () => {
    const fault = await refusal(clientOf(server, 'refused'), asking('status=422'))
    expect(fault).toBeInstanceOf(UnprocessableEntityError)
    expect(fault).toMatchObject({ code: 'scripted', type: 'scripted_error' })
  })
})

describe.concurrent('the openai package lists models', () => {
  it.each(['the demo', 'an upstream'])('of %s', async (of) => {
    const client = of === 'the demo' ? clientOf(locked, 'ann', { apiKey: keys.ann }) : clientOf(server, 'ann')
    const names = (await all(client.models.list())).map(({ id }) => id)
    expect(names).toEqual([of === 'the demo' ? 'demo' : 'scripted'])
  })
})

interface SentEvent {
  data: string
  id: string
}

/** The rules of WHATWG's event streams, for bytes that came in any pieces. */
function eventsOf(raw: string): SentEvent[] {
  const events: SentEvent[] = []
  let [data, id]: [string[], string] = [[], '']
  for (const line of raw.split(/\r\n|\r|\n/)) {
    const [, field, value = ''] = /^([^:]*)(?:: ?(.*))?$/.exec(line) ?? []
    if (line === '' && data.length > 0) events.push({ data: data.join('\n'), id })
    if (line === '') data = []
    else if (field === 'data') data.push(value)
    else if (field === 'id') id = value
  }
  return events
}

/** As decoders have it that take every blank line for the end of an event once they have seen an id. */
const eventsByBlankLines = (raw: string): string[] =>
  raw
    .split('\n\n')
    .slice(0, -1)
    .map((block) => /^data: (.*)$/m.exec(block)?.[1] ?? '')

/** As scripts have it that look at lines alone. */
const eventsByLines = (raw: string): string[] =>
  raw.split('\n').flatMap((line) => (line.startsWith('data: ') ? [line.slice('data: '.length)] : []))

describe('what a queued stream with heartbeats is made of', () => {
  const user = 'recorded'
  let raw = ''
  let contents: string[] = []

  beforeAll(async () => {
    const held = await occupy(fleet, server, user)
    const body = { ...asking(`marker=${user} tokens=2 end=hang`), stream: true }
    const stream = await open(server, '/v1/chat/completions', { headers: as(user), body })
    await stream.seen('a heartbeat while it waits', (so) => so.raw.includes('\n:\n'))
    held.release()
    await stream.seen('its last token', (so) => so.content === words(user, 2))
    await stream.seen('a heartbeat between two events', (so) => so.raw.endsWith('\n\n:\n'))
    fleet.upstream.release(user)
    raw = (await stream.whole()).raw
    contents = ['', ` ${user}#1`, ` ${user}#2`, '']
  })

  const contentsOf = (texts: readonly string[]) => texts.slice(0, -1).map((text) => contentOf([JSON.parse(text)]))

  it('are events with data, by the rules of WHATWG', () => {
    const events = eventsOf(raw)
    expect(events.map(({ id }) => id)).toEqual(events.map((_, n) => String(n + 1)))
    expect(contentsOf(events.map(({ data }) => data))).toEqual(contents)
    expect(events.at(-1)?.data).toBe('[DONE]')
  })

  it.each([
    ['blank lines', eventsByBlankLines],
    ['lines', eventsByLines],
  ])('are the same to a decoder that goes by %s', (_, decode) => {
    expect(decode(raw)).toEqual(eventsOf(raw).map(({ data }) => data))
  })

  it("are the same to OpenAI's decoder, byte by byte", async () => {
    const bytes = new ReadableStream<Uint8Array>({
      start: (to) => {
        for (const byte of new TextEncoder().encode(raw)) to.enqueue(Uint8Array.of(byte))
        to.close()
      },
    })
    const decoded = Stream.fromSSEResponse<ChatCompletionChunk>(new Response(bytes), new AbortController())
    expect((await all(decoded)).map((chunk) => contentOf([chunk]))).toEqual(contents)
  })
})
