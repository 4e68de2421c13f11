import { describe, expect, it } from 'vitest'
import type { Clock } from '../clock.js'
import { type ClientOptions, type Retrying, settingsOf } from '../options.js'
import type { Call } from './call.js'
import { createSender } from './sender.js'

type Reply = () => Response

const json =
  (body: unknown, status = 200, headers: Record<string, string> = {}): Reply =>
  () =>
    new Response(JSON.stringify(body), { status, headers })
const problem = (code: string, status: number, headers: Record<string, string> = {}): Reply =>
  json({ code, title: code, detail: 'the detail' }, status, headers)
const busy = (retryAfter: string): Reply => problem('overloaded', 503, { 'retry-after': retryAfter })
const silence: Reply = () => {
  throw new TypeError('fetch failed')
}
const done = json({ done: true })

const read: Call = { method: 'GET', path: '/x', service: 'operations', expects: ['done', ''], isRepeatable: true }
const take: Call = { ...read, isRepeatable: false }

/** A server that gives the answers in turn and repeats the last; time passes only in pauses. */
function answering(replies: Reply[], options: Partial<ClientOptions> = {}, random = 0.5) {
  const asked: { url: string; headers: Record<string, string>; redirect: string | undefined }[] = []
  const pauses: number[] = []
  const retries: Retrying[] = []
  const clock: Clock & { ms: number } = {
    ms: 0,
    now: () => clock.ms,
    wallMs: () => Date.UTC(2026, 0, 1),
    random: () => random,
    sleep: async (ms, signal) => {
      signal?.throwIfAborted()
      pauses.push(ms)
      clock.ms += ms
    },
  }
  const settings = settingsOf({
    baseUrl: 'http://a.test/prefix/',
    throttle: false,
    hooks: { onRetry: (retrying) => retries.push(retrying) },
    fetch: async (url, init) => {
      asked.push({ url: String(url), headers: init?.headers as Record<string, string>, redirect: init?.redirect })
      return (replies[Math.min(asked.length, replies.length) - 1] ?? silence)()
    },
    ...options,
  })
  return { send: createSender(settings, clock), asked, pauses, retries, clock }
}

describe('a call', () => {
  it('goes to the base URL with token, identity, headers and query', async () => {
    const { send, asked } = answering([done], { token: async () => 't', identity: 'u', headers: { 'x-own': '1' } })
    await send({ ...read, query: { a: 'b c', b: undefined, c: 0 }, headers: { 'x-more': '2' } })
    expect(asked[0]?.url).toBe('http://a.test/prefix/x?a=b+c&c=0')
    expect(asked[0]?.headers).toMatchObject({
      authorization: 'Bearer t',
      'x-user-id': 'u',
      'x-own': '1',
      'x-more': '2',
    })
  })

  it("has each header once, the caller's before the token, its own before the caller's", async () => {
    const own = { Authorization: 'Basic own', 'X-User-ID': 'a', Accept: 'x/y', 'Content-Type': 'x/y', 'X-KEY': 'fixed' }
    const { send, asked } = answering([done], { token: 't', identity: 'b', headers: own })
    await send({ ...read, body: {}, headers: { 'x-key': 'k' } })
    expect(asked[0]?.headers).toEqual({
      ...{ authorization: 'Basic own', 'x-user-id': 'a' },
      ...{ accept: 'application/json', 'content-type': 'application/json', 'x-key': 'k' },
    })
  })

  it.each([Number.POSITIVE_INFINITY, 2 ** 31])('may have %d ms', async (ms) => {
    const later = () => new Promise<Response>((resolve) => setImmediate(() => setImmediate(() => resolve(done()))))
    const { send } = answering([], { deadlineMs: ms, attemptTimeoutMs: ms, fetch: later })
    expect(await send(read)).toMatchObject({ body: { done: true } })
  })

  it.each(['localhost:7745', 'ftp://a.test', ''])('does not go to %j', (baseUrl) => {
    expect(() => answering([done], { baseUrl })).toThrow(TypeError)
  })

  it('has no body where the server sends none', async () => {
    const { send } = answering([() => new Response(null, { status: 204 })])
    expect(await send(read)).toMatchObject({ status: 204, body: undefined })
  })

  it('distinguishes another server from a Spillway server', async () => {
    const { send, asked } = answering([() => new Response('<html>')])
    await expect(send(read)).rejects.toMatchObject({ code: 'unexpected', status: 200, retryable: false })
    expect(asked).toHaveLength(1)
  })

  it.each([
    ['an empty text', () => new Response('')],
    ['other JSON', json({ hello: 'portal' })],
    ['a list', json([])],
    ['null', json(null)],
    ['an empty 200', () => new Response(null, { status: 200 })],
  ])('does not take %s for its answer', async (_, reply) => {
    const { send, asked } = answering([reply])
    await expect(send(read)).rejects.toMatchObject({ name: 'SpillwayError', code: 'unexpected', status: 200 })
    expect(asked).toHaveLength(1)
  })

  it('does not take a 204 for an answer where there has to be one', async () => {
    const { send } = answering([() => new Response(null, { status: 204 })])
    await expect(send({ ...read, expects: ['done'] })).rejects.toMatchObject({ code: 'unexpected', status: 204 })
  })

  it.each([301, 302, 303, 307, 308])('does not follow a %i, and says where it leads', async (status) => {
    const { send, asked } = answering([() => new Response('', { status, headers: { location: '/far' } }), done])
    const sent = send({ ...read, method: 'POST' })
    await expect(sent).rejects.toMatchObject({ code: 'unexpected', status, retryable: false })
    await expect(sent).rejects.toThrow('/far')
    expect(asked).toHaveLength(1)
    expect(asked[0]?.redirect).toBe('manual')
  })

  it('does not follow a redirect that a browser hides', async () => {
    const opaque = Object.defineProperty(Response.error(), 'type', { value: 'opaqueredirect' })
    const { send } = answering([() => opaque])
    await expect(send(read)).rejects.toMatchObject({ code: 'unexpected', status: null, retryable: false })
  })
})

describe('a refusal', () => {
  it('is waited out: what the server asks for, and jitter above that', async () => {
    const { send, pauses, retries } = answering([busy('3'), done])
    expect(await send(take)).toMatchObject({ body: { done: true } })
    expect(pauses).toEqual([4_500])
    expect(retries).toMatchObject([{ method: 'GET', path: '/x', attempts: 1, delayMs: 4_500 }])
  })

  it('may name a date', async () => {
    const { send, pauses } = answering([busy('Thu, 01 Jan 2026 00:00:02 GMT'), done], {}, 0)
    await send(read)
    expect(pauses).toEqual([2_000])
  })

  it('is waited out by its own back-off when Retry-After is not to be honoured', async () => {
    const { send, pauses } = answering([busy('20'), done], { honorRetryAfter: false })
    await send(read)
    expect(pauses).toEqual([125])
  })

  it('that asks for more than maxRetryDelay is reported at once', async () => {
    const { send, pauses } = answering([busy('31')])
    await expect(send(read)).rejects.toMatchObject({ code: 'overloaded', retryAfterMs: 31_000, attempts: 1 })
    expect(pauses).toEqual([])
  })

  it('that would end after the deadline is reported at once', async () => {
    const { send, pauses } = answering([busy('10')])
    await expect(send({ ...read, deadlineMs: 9_000 })).rejects.toMatchObject({ code: 'overloaded' })
    expect(pauses).toEqual([])
  })

  it('of 429 is reported at once when it is not to be retried', async () => {
    const { send, asked } = answering([problem('rate_limited', 429, { 'retry-after': '1' })], { retryOn429: false })
    await expect(send(read)).rejects.toMatchObject({ code: 'rate_limited', status: 429, retryAfterMs: 1_000 })
    expect(asked).toHaveLength(1)
  })

  it('is not followed by a pause when it was the last attempt', async () => {
    const { send, asked, pauses } = answering([busy('1')], { retry: { attempts: 3 } })
    await expect(send(read)).rejects.toMatchObject({ code: 'overloaded', attempts: 3 })
    expect(asked).toHaveLength(3)
    expect(pauses).toHaveLength(2)
  })
})

describe('silence', () => {
  it('is retried where that is safe', async () => {
    const { send, asked } = answering([silence, silence, done])
    await send(read)
    expect(asked).toHaveLength(3)
  })

  it.each(['{"done":', ''])('in the middle of an answer (%j) is retried', async (cut) => {
    const { send } = answering([() => new Response(cut, { headers: { 'content-type': 'application/json' } }), done])
    expect(await send(read)).toMatchObject({ body: { done: true } })
  })

  it('is an error where it is not', async () => {
    const { send, asked } = answering([silence, done])
    await expect(send(take)).rejects.toMatchObject({ code: 'unreachable', status: null, retryable: true })
    expect(asked).toHaveLength(1)
  })

  it('ends with the deadline', async () => {
    const { send, clock } = answering([silence], { retry: { attempts: 1_000, budget: false } })
    await expect(send({ ...read, deadlineMs: 5_000 })).rejects.toMatchObject({ code: 'unreachable' })
    expect(clock.ms).toBeLessThan(5_000)
    expect(clock.ms).toBeGreaterThan(4_000)
  })

  it('of one endpoint is answered by the other, at once', async () => {
    const { send, asked, pauses } = answering([silence, done], { baseUrls: ['http://a.test', 'http://b.test'] })
    await send(read)
    await send(take)
    expect(asked.map(({ url }) => url)).toEqual(['http://a.test/x', 'http://b.test/x', 'http://b.test/x'])
    expect(pauses).toEqual([0])
  })

  it('of a server that stops is no reason to wait, even where a request must not be repeated blindly', async () => {
    const replies = [problem('draining', 503, { 'retry-after': '5' }), done]
    const { send, pauses } = answering(replies, { baseUrls: ['http://a.test', 'http://b.test'] })
    await send(take)
    expect(pauses).toEqual([0])
  })
})

it('a signal ends a call also between two attempts', async () => {
  const { send } = answering([busy('5')])
  const stop = new AbortController()
  const sent = send({ ...read, signal: stop.signal })
  stop.abort(new Error('enough'))
  await expect(sent).rejects.toThrow('enough')
})

it('other 4xx are never sent again', async () => {
  for (const status of [400, 401, 403, 404, 409, 413, 422]) {
    const { send, asked } = answering([problem('the_code', status)])
    await expect(send(read)).rejects.toMatchObject({ status, retryable: false })
    expect(asked).toHaveLength(1)
  }
})

describe('the budget', () => {
  it('makes retries wait their turn', async () => {
    const { send, clock } = answering(
      [busy('0')],
      { retry: { attempts: 6, budget: { reserve: 1, perSecond: 0.5 } } },
      0,
    )
    await expect(send(read)).rejects.toMatchObject({ code: 'overloaded' })
    // The reserve pays for the first of five retries, each other takes two seconds to earn.
    expect(clock.ms).toBeGreaterThan(7_000)
    expect(clock.ms).toBeLessThan(8_100)
  })

  it('gives up at once where its turn would come after the deadline', async () => {
    const { send, asked } = answering([busy('0')], { retry: { budget: { reserve: 0, perSecond: 0.01 } } }, 0)
    await expect(send(read)).rejects.toMatchObject({ code: 'overloaded', attempts: 1 })
    expect(asked).toHaveLength(1)
  })
})

describe('the throttle', () => {
  it('holds back what the server refuses, and reports its last refusal', async () => {
    const { send, asked } = answering([busy('1')], { throttle: { probeMs: 60_000 }, retry: { budget: false } }, 0.4)
    await expect(send({ ...read, deadlineMs: 20_000 })).rejects.toMatchObject({ code: 'overloaded', attempts: 3 })
    expect(asked).toHaveLength(3)
    await expect(send({ ...read, deadlineMs: 100 })).rejects.toMatchObject({ code: 'throttled', attempts: 0 })
  })

  it('does not count what its caller left, nor silence', async () => {
    const { send, asked } = answering([silence], { throttle: {}, retry: { attempts: 1 } }, 0)
    for (let i = 0; i < 5; i++) {
      const left = new AbortController()
      const sent = send({ ...read, signal: left.signal })
      if (i % 2 === 0) left.abort(new Error('left'))
      await expect(sent).rejects.toThrow()
    }
    await expect(send({ ...read, deadlineMs: 10 })).rejects.toMatchObject({ code: 'unreachable' })
    expect(asked.length).toBeGreaterThanOrEqual(3)
  })

  it('is one for each kind of work', async () => {
    const { send, asked } = answering([busy('1'), busy('1'), done], { throttle: {}, retry: { attempts: 1 } }, 0)
    for (let i = 0; i < 2; i++) await expect(send(read)).rejects.toMatchObject({ code: 'overloaded' })
    await expect(send({ ...read, deadlineMs: 10 })).rejects.toMatchObject({ code: 'throttled' })
    await send({ ...read, service: 'messages' })
    expect(asked).toHaveLength(3)
  })
})

describe('what the caller throws', () => {
  const failing = () => {
    throw new Error('thrown')
  }
  it.each([
    ['throws', failing],
    ['rejects', () => Promise.reject(Object.create(null))],
  ])('in a hook that %s, or in the logger, changes nothing', async (_, onRetry) => {
    const warned: string[] = []
    const warn = (message: string) => {
      warned.push(message)
      failing()
    }
    const options = { hooks: { onRetry }, logger: { debug: failing, warn } }
    const { send } = answering([busy('0'), done], options)
    expect(await send(read)).toMatchObject({ body: { done: true } })
    expect(warned).toEqual(['a hook failed'])
  })

  it('for want of a token is thrown as it is', async () => {
    const { send, asked } = answering([done], { token: () => Promise.reject(new Error('logged out')) })
    await expect(send(read)).rejects.toThrow('logged out')
    expect(asked).toHaveLength(0)
  })

  it('instead of hanging: waiting for a token that never arrives ends with the deadline or the signal', async () => {
    const { send, asked } = answering([done], { token: () => new Promise(() => undefined) })
    await expect(send({ ...read, deadlineMs: 20 })).rejects.toMatchObject({ code: 'unreachable', attempts: 0 })
    const left = new AbortController()
    const sent = send({ ...read, signal: left.signal })
    left.abort(new Error('enough'))
    await expect(sent).rejects.toThrow('enough')
    expect(asked).toHaveLength(0)
  })

  it('for a body that is no JSON is thrown as it is', async () => {
    const { send, asked } = answering([done])
    await expect(send({ ...read, body: 1n })).rejects.toThrow(TypeError)
    expect(asked).toHaveLength(0)
  })
})
