import { createServer as createHttpServer, type IncomingMessage, type ServerResponse } from 'node:http'
import { type AddressInfo, createServer, type Server } from 'node:net'
import { afterEach, describe, expect, it } from 'vitest'
import { eventually } from '../../../spillway/test/pipeline-fixture.js'
import {
  monotonicMs,
  type ScriptedUpstream,
  scriptedTokens,
  startScriptedUpstream,
} from '../../../spillway/test/setup/scripted-upstream.js'
import { carriedChat } from '../../src/workloads/generation/request.js'
import type { Upstream, UpstreamChunk, UpstreamFault } from '../../src/workloads/generation/upstream.js'
import { OpenAiUpstream } from '../../src/workloads/generation/upstream-openai.js'

const cleanups: (() => Promise<unknown>)[] = []
afterEach(async () => {
  for (const cleanup of cleanups.splice(0).reverse()) await cleanup()
})

const limits = { firstTokenMs: 20_000, idleMs: 20_000, totalMs: 25_000 }
const never = new AbortController().signal
const key = 'sk-test-0123456789'

function client(url: string, connectionsMax = 8): Upstream {
  const upstream = new OpenAiUpstream({ url, key, version: '0.0.0-test', connectionsMax })
  cleanups.push(() => upstream.close())
  return upstream
}

async function scripted(connectionsMax = 8): Promise<{ server: ScriptedUpstream; upstream: Upstream }> {
  const server = await startScriptedUpstream()
  cleanups.push(() => server.close())
  return { server, upstream: client(server.url, connectionsMax) }
}

async function listening<T extends Server>(server: T): Promise<string> {
  await new Promise<void>((resolve) => server.listen(0, '127.0.0.1', resolve))
  return `http://127.0.0.1:${(server.address() as AddressInfo).port}/v1`
}

/** A server that answers every request in the same odd way. */
async function answering(answer: (request: IncomingMessage, response: ServerResponse) => void) {
  const server = createHttpServer(
    (request, response) => void request.resume().on('end', () => answer(request, response)),
  )
  const connections = { count: 0, closed: 0 }
  server.on('connection', (socket) => {
    connections.count++
    socket.on('close', () => connections.closed++)
  })
  const url = await listening(server)
  cleanups.push(async () => {
    server.closeAllConnections()
    server.close()
  })
  return { upstream: client(url), connections }
}

function asked(content: string, more: Record<string, unknown> = {}) {
  const body = { model: 'm', stream: true, messages: [{ role: 'user', content }], ...more }
  return {
    ...carriedChat(body),
    operationId: 'op-1',
    traceparent: '00-4bf92f3577b34da6a3ce929d0e0e4736-00f067aa0ba902b7-01',
  }
}

interface Run {
  chunks: UpstreamChunk[]
  text: string
  fault: UpstreamFault | undefined
}

/** All that comes, and how it ended. */
async function run(upstream: Upstream, request: ReturnType<typeof asked>, own = limits, signal = never): Promise<Run> {
  const chunks: UpstreamChunk[] = []
  let fault: UpstreamFault | undefined
  try {
    for await (const batch of upstream.generate(request, own, signal)) chunks.push(...batch)
  } catch (thrown) {
    fault = thrown as UpstreamFault
  }
  return { chunks, text: chunks.map(({ content }) => content).join(''), fault }
}

const numbersIn = (text: string) => scriptedTokens(text).map(({ number }) => number)
const upTo = (count: number) => Array.from({ length: count }, (_, at) => at + 1)
const outcomes = (server: ScriptedUpstream) => server.requests.map(({ outcome }) => outcome)
const seenAborted = (server: ScriptedUpstream) =>
  eventually(() => server.requests.find(({ outcome }) => outcome === 'aborted'), 'the upstream to hear of it')

describe('a generation', () => {
  it('brings every token in order, and ends', async () => {
    const { upstream } = await scripted()
    const { text, chunks, fault } = await run(upstream, asked('script: tokens=500 marker=a'))
    expect(fault).toBeUndefined()
    expect(scriptedTokens(text)).toEqual(upTo(500).map((number) => ({ marker: 'a', number, sentMs: null })))
    expect(chunks.at(-1)?.finishReason).toBe('stop')
  })

  it('sends the body as it is, with our key, the operation and the trace', async () => {
    const { server, upstream } = await scripted()
    const request = asked('hello', { tools: [{ type: 'x' }], unknown_member: { a: [1] } })
    await run(upstream, request)
    const { traceparent, chat } = request
    expect(server.requests).toMatchObject([
      { body: JSON.parse(chat), idempotencyKey: 'op-1', authorization: `Bearer ${key}`, traceparent },
    ])
  })

  it('delivers tokens while the upstream continues', async () => {
    const { server, upstream } = await scripted()
    const run = upstream.generate(asked('script: tokens=3 end=hang'), limits, never)
    let text = ''
    for await (const batch of run) {
      text += batch.map(({ content }) => content).join('')
      if (numbersIn(text).length === 3) server.release()
    }
    expect(numbersIn(text)).toEqual([1, 2, 3])
  })

  it('passes usage on', async () => {
    const { upstream } = await scripted()
    const { chunks } = await run(upstream, asked('script: tokens=2', { stream_options: { include_usage: true } }))
    expect(JSON.parse(chunks.at(-1)?.text ?? '')).toMatchObject({ choices: [], usage: { completion_tokens: 2 } })
  })

  it('without a stream is one chunk', async () => {
    const { upstream } = await scripted()
    const { chunks, text, fault } = await run(upstream, asked('script: tokens=3', { stream: false }))
    expect([fault, chunks.length, numbersIn(text)]).toEqual([undefined, 1, [1, 2, 3]])
    expect(JSON.parse(chunks[0]?.text ?? '')).toMatchObject({ object: 'chat.completion' })
  })

  it('reuses earlier connections', async () => {
    const { upstream, connections } = await answering((_, response) => {
      response.setHeader('content-type', 'text/event-stream')
      response.end('data: {"id":"i","created":1,"choices":[{"delta":{"content":"x"}}]}\n\ndata: [DONE]\n\n')
    })
    for (let count = 0; count < 10; count++) expect((await run(upstream, asked('x'))).text).toBe('x')
    // Two: the next one may begin between [DONE] and the end of the body.
    expect(connections.count).toBeLessThanOrEqual(2)
    expect(connections.closed).toBe(0)
  })

  it('ends at [DONE], also when the upstream keeps the body open', async () => {
    const { upstream, connections } = await answering((_, response) => {
      response.write('data: {"id":"i","created":1,"choices":[{"delta":{"content":"x"}}]}\n\ndata: [DONE]\n\n')
    })
    expect(await run(upstream, asked('x'))).toMatchObject({ text: 'x', fault: undefined })
    await eventually(() => connections.closed === 1 || undefined, 'the connection to be closed')
  })
})

describe('a refusal', () => {
  it.each([
    ['500', { code: 'upstream_error', status: 500, retryable: true, retryAfterMs: null }],
    ['429 retry_after=2', { code: 'upstream_overloaded', status: 429, retryable: true, retryAfterMs: 2_000 }],
    ['400', { code: 'upstream_rejected', status: 400, retryable: false, error: { message: 'scripted 400' } }],
    ['401', { code: 'upstream_error', status: 401, retryable: false }],
  ])('of status %s is reported', async (status, fault) => {
    const { upstream } = await scripted()
    expect((await run(upstream, asked(`script: status=${status}`))).fault).toMatchObject(fault)
  })

  it('may name a date in Retry-After', async () => {
    const { upstream } = await scripted()
    const { fault } = await run(upstream, asked('script: status=503 retry_after=date:30'))
    expect(fault?.retryAfterMs).toBeGreaterThan(20_000)
    expect(fault?.retryAfterMs).toBeLessThanOrEqual(30_000)
  })

  it('passes when the upstream has recovered', async () => {
    const { upstream } = await scripted()
    const request = asked('script: tokens=2 status=500 times=2')
    const codes = [await run(upstream, request), await run(upstream, request), await run(upstream, request)]
    expect(codes.map(({ fault, text }) => fault?.status ?? numbersIn(text))).toEqual([500, 500, [1, 2]])
  })

  it('is read to its limit only', async () => {
    const { upstream, connections } = await answering((_, response) =>
      response.writeHead(500).write('x'.repeat(70_000)),
    )
    expect((await run(upstream, asked('x'))).fault).toMatchObject({ code: 'upstream_malformed', status: 500 })
    await eventually(() => connections.closed === 1 || undefined, 'the connection to be closed')
  })

  it('never exposes the key or the address', async () => {
    const { upstream } = await answering((request, response) => {
      const message = `bad: ${request.headers.authorization} at ${request.headers.host}`
      response.writeHead(400).end(JSON.stringify({ error: { message } }))
    })
    expect((await run(upstream, asked('x'))).fault?.error.message).toBe('bad: Bearer *** at ***')
  })
})

describe('a broken upstream', () => {
  it.each([
    ['end=cut', 'upstream_incomplete'],
    ['end=half', 'upstream_incomplete'],
    ['end=error', 'upstream_error'],
    ['garbage=3', 'upstream_malformed'],
  ])('with %s is reported after the tokens before it', async (script, code) => {
    const { upstream } = await scripted()
    const { text, fault } = await run(upstream, asked(`script: tokens=3 every=5 ${script}`))
    expect([numbersIn(text), fault?.code]).toEqual([[1, 2, 3], code])
  })

  it('that resets the connection is reported; tokens read before are kept', async () => {
    const { upstream } = await scripted()
    const { text, fault } = await run(upstream, asked('script: tokens=30 every=5 end=reset'))
    const numbers = numbersIn(text)
    expect([numbers, fault?.code]).toEqual([upTo(numbers.length), 'upstream_incomplete'])
  })

  it.each(['cut', 'half', 'reset'])('with end=%s before the first token leaves nothing behind', async (end) => {
    const { upstream } = await scripted()
    const { chunks, fault } = await run(upstream, asked(`script: tokens=0 first=5 end=${end}`))
    expect([chunks, fault?.retryable]).toEqual([[], true])
  })

  it('that sends no [DONE] but a finish reason has come to its end', async () => {
    const { upstream } = await scripted()
    const { text, fault } = await run(upstream, asked('script: tokens=3 end=nodone'))
    expect([numbersIn(text), fault]).toEqual([[1, 2, 3], undefined])
  })

  it('that sends a line over the limit is cut off', async () => {
    const { server, upstream } = await scripted()
    const { fault } = await run(upstream, asked('script: tokens=1 big=1100000 end=hang'))
    expect(fault?.code).toBe('upstream_malformed')
    await seenAborted(server)
  })

  it('that sends an answer over the limit is cut off', async () => {
    const { upstream } = await scripted()
    const { fault } = await run(upstream, asked('script: tokens=1 pad=16800000', { stream: false }))
    expect(fault?.code).toBe('upstream_malformed')
  })

  it('that is not there is unreachable', async () => {
    const server = createServer()
    const url = await listening(server)
    await new Promise((resolve) => server.close(resolve))
    expect((await run(client(url), asked('x'))).fault).toMatchObject({ code: 'upstream_unreachable', retryable: true })
  })

  it('that speaks no HTTP is malformed', async () => {
    const server = createServer((socket) => {
      socket.on('error', () => socket.destroy())
      socket.once('data', () => socket.end('220 mail ready\r\n'))
    })
    const url = await listening(server)
    cleanups.push(async () => server.close())
    expect((await run(client(url), asked('x'))).fault).toMatchObject({ code: 'upstream_malformed' })
  })

  it.each([
    ['nothing', 'text/event-stream', '', { code: 'upstream_incomplete' }],
    ['nothing as JSON', 'application/json', '', { code: 'upstream_incomplete' }],
    ['an error as JSON', 'application/json', '{"error":{"message":"no"}}', { error: { message: 'no' } }],
    ['HTML', 'text/html', '<html>\n\n</html>', { code: 'upstream_incomplete' }],
  ])('that answers 200 with %s is found out', async (_, type, body, fault) => {
    const { upstream } = await answering((_request, response) => response.setHeader('content-type', type).end(body))
    expect(await run(upstream, asked('x'))).toMatchObject({ chunks: [], fault })
  })

  it('that does not stream is passed on as a stream', async () => {
    const { upstream } = await answering((_, response) => {
      const completion = {
        id: 'i',
        created: 1,
        choices: [{ index: 0, message: { content: 'all' }, finish_reason: 'stop' }],
      }
      response.setHeader('content-type', 'application/json').end(JSON.stringify(completion))
    })
    const { chunks, fault } = await run(upstream, asked('x'))
    expect([fault, chunks.length]).toEqual([undefined, 1])
    expect(JSON.parse(chunks[0]?.text ?? '')).toMatchObject({
      object: 'chat.completion.chunk',
      choices: [{ delta: { content: 'all' }, finish_reason: 'stop' }],
    })
  })

  it('that streams unasked is malformed', async () => {
    const { upstream } = await answering((_, response) => {
      response.setHeader('content-type', 'text/event-stream').write('data: {}\n\n')
    })
    expect((await run(upstream, asked('x', { stream: false }))).fault?.code).toBe('upstream_malformed')
  })

  it('that compresses unasked is malformed', async () => {
    const { upstream } = await answering((_, response) => response.setHeader('content-encoding', 'gzip').end('x'))
    expect((await run(upstream, asked('x'))).fault?.code).toBe('upstream_malformed')
  })
})

describe('limits', () => {
  it('end the wait for the first token, which comments are not', async () => {
    const { server, upstream } = await scripted()
    const own = { ...limits, firstTokenMs: 300 }
    const { chunks, fault } = await run(upstream, asked('script: tokens=0 end=hang comments=20'), own)
    expect([chunks, fault?.code, fault?.retryable]).toEqual([[], 'upstream_timeout', true])
    await seenAborted(server)
  })

  it('end a silence', async () => {
    const { server, upstream } = await scripted()
    const { text, fault } = await run(upstream, asked('script: tokens=2 end=hang'), { ...limits, idleMs: 200 })
    expect([numbersIn(text), fault?.code]).toEqual([[1, 2], 'upstream_timeout'])
    await seenAborted(server)
  })

  it('take a comment for a sign of life', async () => {
    const { upstream } = await scripted()
    const own = { ...limits, idleMs: 600 }
    const { text, fault } = await run(upstream, asked('script: tokens=2 every=1500 comments=30'), own)
    expect([numbersIn(text), fault]).toEqual([[1, 2], undefined])
  })

  it('do not take a slow reader for a silent upstream', async () => {
    const { server, upstream } = await scripted()
    const tokens = upstream.generate(asked('script: tokens=2 every=400'), { ...limits, idleMs: 100 }, never)
    let text = ''
    for await (const batch of tokens) {
      text += batch.map(({ content }) => content).join('')
      await eventually(() => server.counts.finished === 1 || undefined, 'the upstream to have sent all')
    }
    expect(numbersIn(text)).toEqual([1, 2])
  })

  it('end an answer that never ends', async () => {
    const { server, upstream } = await scripted()
    const { chunks, fault } = await run(upstream, asked('script: tokens=1000000 every=5'), { ...limits, totalMs: 300 })
    expect([chunks.length > 1, fault?.code, fault?.retryable]).toEqual([true, 'upstream_timeout', false])
    await seenAborted(server)
  })

  it('of the total apply to an answer without stream too', async () => {
    const { upstream } = await scripted()
    const request = asked('script: tokens=1 first=60000', { stream: false })
    expect((await run(upstream, request, { ...limits, firstTokenMs: 1, totalMs: 200 })).fault?.message).toMatch(
      /longer/,
    )
  })
})

describe('leaving', () => {
  const reason = new Error('the client left')

  it.each([
    ['in the middle of an answer', 'script: tokens=1000000 every=10', 1],
    ['before the headers', 'script: headers=60000', 0],
    ['before the first token', 'script: first=60000', 0],
  ])('%s reaches the upstream within a second', async (_, script, tokens) => {
    const { server, upstream } = await scripted()
    const controller = new AbortController()
    const running = run(upstream, asked(script), limits, controller.signal)
    await eventually(() => server.requests.some((seen) => seen.tokensSent >= tokens) || undefined, 'the request')
    const leftMs = monotonicMs()
    controller.abort(reason)
    expect((await running).fault).toBe(reason)
    expect(((await seenAborted(server)).endedMs ?? Infinity) - leftMs).toBeLessThan(1_000)
  })

  it('works by leaving the loop', async () => {
    const { server, upstream } = await scripted()
    for await (const _ of upstream.generate(asked('script: tokens=1000000 every=5'), limits, never)) break
    await seenAborted(server)
  })

  it('while it waits for a connection ends at once and never reaches the upstream', async () => {
    const { server, upstream } = await scripted(1)
    const first = run(upstream, asked('script: tokens=1 end=hang marker=first'))
    await eventually(() => server.requests[0]?.tokensSent === 1 || undefined, 'the first to hold the connection')
    const controller = new AbortController()
    const second = run(upstream, asked('script: marker=second'), limits, controller.signal)
    controller.abort(reason)
    expect((await second).fault).toBe(reason)
    server.release()
    await first
    const third = await run(upstream, asked('script: tokens=1 marker=third'))
    expect([numbersIn(third.text), server.requests.map(({ marker }) => marker)]).toEqual([[1], ['first', 'third']])
  })

  it('before it began sends no request', async () => {
    const { server, upstream } = await scripted()
    expect((await run(upstream, asked('x'), limits, AbortSignal.abort(reason))).fault).toBe(reason)
    expect(server.requests).toEqual([])
  })

  it('is what closing does to all that run', async () => {
    const { server, upstream } = await scripted()
    const running = run(upstream, asked('script: tokens=1000000 every=5'))
    await eventually(() => server.requests.some(({ tokensSent }) => tokensSent > 0) || undefined, 'the first token')
    await upstream.close()
    expect((await running).fault).toMatchObject({ code: 'upstream_incomplete' })
    await seenAborted(server)
  })
})

describe('a slow reader', () => {
  it('stops the upstream, and gets every token in the end', async () => {
    const { server, upstream } = await scripted()
    const tokens = upstream.generate(asked('script: tokens=20000 pad=1000'), limits, never)[Symbol.asyncIterator]()
    const first = await tokens.next()
    let sent = -1
    let looks = 0
    await eventually(() => {
      const now = server.requests[0]?.tokensSent ?? 0
      looks = now === sent ? looks + 1 : 0
      sent = now
      return looks === 20 || undefined
    }, 'the upstream to be held up')
    expect(sent).toBeLessThan(20_000)
    let text = (first.value as UpstreamChunk[]).map(({ content }) => content).join('')
    for (let next = await tokens.next(); next.done !== true; next = await tokens.next()) {
      text += next.value.map(({ content }) => content).join('')
    }
    expect(numbersIn(text)).toEqual(upTo(20_000))
    expect(outcomes(server)).toEqual(['finished'])
  })
})

describe('the list of models', () => {
  it('is requested once a minute', async () => {
    const { server, upstream } = await scripted()
    const lists = await Promise.all([upstream.models(), upstream.models()])
    lists.push(await upstream.models())
    expect(lists.map((list) => (list as { data: unknown[] }).data)).toEqual(
      Array.from({ length: 3 }, () => [expect.objectContaining({ id: 'scripted' })]),
    )
    expect(server.modelLists).toBe(1)
  })

  it('answers while all connections are taken', async () => {
    const { server, upstream } = await scripted(1)
    const running = run(upstream, asked('script: tokens=1 end=hang'))
    await eventually(() => server.requests[0]?.tokensSent === 1 || undefined, 'the connection to be taken')
    expect(await upstream.models()).toMatchObject({ object: 'list' })
    server.release()
    await running
  })

  it('is requested again after a fault', async () => {
    let calls = 0
    const { upstream } = await answering((_, response) => {
      if (++calls === 1) response.writeHead(500).end()
      else response.end('{"object":"list","data":[]}')
    })
    await expect(upstream.models()).rejects.toMatchObject({ code: 'upstream_error', status: 500 })
    expect(await upstream.models()).toEqual({ object: 'list', data: [] })
  })

  it('is bounded', async () => {
    const { upstream } = await answering((_, response) => response.end(`"${'x'.repeat(1_100_000)}"`))
    await expect(upstream.models()).rejects.toMatchObject({ code: 'upstream_malformed' })
  })

  it('does not say which models are unknown', async () => {
    const { upstream } = await scripted()
    expect(upstream.unknownModel('anything')).toBeNull()
  })
})
