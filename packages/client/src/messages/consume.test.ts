import { afterEach, describe, expect, it } from 'vitest'
import { deferred } from '../../test/deferred.js'
import { clientOn } from '../client.js'
import { systemClock } from '../clock.js'
import { SpillwayError } from '../error.js'
import type { Ack, Client, ConsumeOptions, Consumer } from '../index.js'

type Reply = (body: { acknowledgments: Ack[] }, signal: AbortSignal | null | undefined) => Response | Promise<Response>

const problem =
  (status: number, code: string): Reply =>
  () =>
    Response.json({ code, title: code, detail: 'the detail' }, { status })
const html: Reply = () => new Response('no backend', { status: 404, headers: { 'content-type': 'text/html' } })
const none: Reply = () => new Response(null, { status: 204 })
const dropped: Reply = () => Promise.reject(new TypeError('fetch failed'))
/** Until its client leaves. */
const held: Reply = (_, signal) =>
  new Promise((_, reject) => signal?.addEventListener('abort', () => reject(signal.reason)))
const acked: Reply = ({ acknowledgments }) =>
  Response.json(acknowledgments.map(({ transactionId }, index) => ({ index, transactionId, success: true })))
const messages = (...data: unknown[]): Reply => {
  const found = data.map((each, i) => ({ transactionId: `t${i}`, partitionId: 'p', leaseId: 'l', data: each }))
  return () => Response.json({ success: true, messages: found })
}

const running: Consumer[] = []
afterEach(async () => {
  await Promise.allSettled(running.splice(0).map((consumer) => consumer.stop()))
})

interface Scripted {
  pops: Reply[]
  ack?: Reply
  extend?: Reply
}

/** A server that answers pops in turn and holds back later ones; pauses take no time. */
function serving({ pops, ack = acked, extend = dropped }: Scripted) {
  const seen = { pops: 0, acks: [] as Ack[][], pauses: [] as number[], warned: [] as string[], errors: [] as unknown[] }
  const client: Client = clientOn(
    {
      ...{ baseUrl: 'http://spillway.test', throttle: false, retry: { attempts: 1 } },
      logger: { debug: () => undefined, warn: (message) => seen.warned.push(message) },
      fetch: async (url, init) => {
        const body = init?.body === undefined ? {} : JSON.parse(String(init.body))
        const { pathname } = new URL(String(url))
        if (pathname.includes('/pop/')) return (pops[seen.pops++] ?? held)(body, init?.signal)
        if (pathname.includes('/extend')) return extend(body, init?.signal)
        seen.acks.push(body.acknowledgments)
        return ack(body, init?.signal)
      },
    },
    {
      ...systemClock,
      random: () => 0.5,
      sleep: async (ms) => {
        seen.pauses.push(ms)
        await new Promise((resolve) => setImmediate(resolve))
      },
    },
  )
  const consume = (
    handler: (data: unknown, signal: AbortSignal) => unknown,
    options: ConsumeOptions = {},
  ): Consumer => {
    const onError = (error: unknown) => seen.errors.push(error)
    const take = ({ data }: { data: unknown }, { signal }: { signal: AbortSignal }) => handler(data, signal)
    const consumer = client.messages.consume('q', take, { onError, ...options })
    running.push(consumer)
    return consumer
  }
  return { consume, seen }
}

/** Consumes until the first message is handed over, then stops. */
async function first(server: ReturnType<typeof serving>, options?: ConsumeOptions): Promise<unknown> {
  const { promise, resolve } = deferred<unknown>()
  const consumer = server.consume(resolve, options)
  const data = await promise
  await consumer.stop()
  return data
}

describe('a consumer that cannot take', () => {
  it('retries after errors of a proxy, with growing pauses, and reports it', async () => {
    const server = serving({ pops: [html, html, html, dropped, messages('here')] })
    expect(await first(server)).toBe('here')
    expect(server.seen.errors).toMatchObject([
      ...[{ status: 404 }, { status: 404 }, { status: 404, code: 'unexpected' }],
      { code: 'unreachable' },
    ])
    expect(server.seen.pauses).toEqual([125, 250, 500, 1_000])
  })

  it.each([
    [400, 'invalid_request'],
    [401, 'unauthorized'],
    [403, 'forbidden'],
  ])('ends with a %i of the server, and reports it', async (status, code) => {
    const { consume, seen } = serving({ pops: [problem(status, code)] })
    const consumer = consume(() => undefined)
    await expect(consumer.finished).rejects.toMatchObject({ status, code })
    expect(seen.errors).toMatchObject([{ status, code }])
    expect(seen.pops).toBe(1)
  })

  it('does not ask in a hot loop where nothing is held back', async () => {
    const server = serving({ pops: [none, none, none, none, none, messages('here')] })
    expect(await first(server)).toBe('here')
    expect(server.seen.pauses).toEqual([150, 250, 450, 550, 550])
  })

  it.each<[string, ConsumeOptions]>([
    ['no partition at once', { concurrency: 0 }],
    ['no number of partitions', { concurrency: Number.NaN }],
    ['no message at once', { batch: 0 }],
    ['no time', { renewal: { seconds: Number.NaN } }],
  ])('is refused: %s', (_, options) => {
    const { consume, seen } = serving({ pops: [] })
    expect(() => consume(() => undefined, options)).toThrow(TypeError)
    expect(seen.pops).toBe(0)
  })

  it('is refused for a name that no URL holds', () => {
    const { messages: at } = clientOn({ baseUrl: 'http://spillway.test' }, systemClock)
    expect(() => at.consume('..', () => undefined)).toThrow(TypeError)
  })
})

describe('a handler that fails', () => {
  const failingWith = (fault: unknown) => () => {
    throw fault
  }

  it.each([
    ['a NUL', new Error('bad \0 byte'), 'bad \ufffd byte'],
    ['half a character', new Error('a\ud800b'), 'a\ufffdb'],
    ['a character at the limit', new Error(`${'x'.repeat(9_999)}😀y`), 'x'.repeat(9_999)],
    ['whole characters', 'né 😀', 'né 😀'],
    ['something that is no text', Object.create(null), 'something that is no text'],
  ])('is answered for with a text that the server takes: %s', async (_, fault, error) => {
    const answered = deferred<void>()
    const ack: Reply = (body) => {
      answered.resolve()
      return acked(body, null)
    }
    const { consume, seen } = serving({ pops: [messages(1, 2)], ack })
    consume(failingWith(fault))
    await answered.promise
    expect(seen.acks).toMatchObject([[{ status: 'failed', error }, { status: 'retry' }]])
  })

  it('does not hold up the others when its ack is refused', async () => {
    const all = deferred<void>()
    const ack: Reply = (body) => {
      if (seen.acks.length === 4) all.resolve()
      const isWrong = body.acknowledgments.some(({ transactionId }) => transactionId === 't1')
      return isWrong ? problem(400, 'invalid_request')(body, null) : acked(body, null)
    }
    const { consume, seen } = serving({ pops: [messages(0, 1, 2)], ack })
    const consumer = consume(() => undefined)
    await all.promise
    await consumer.stop()
    expect(seen.acks.map((acks) => acks.map(({ transactionId }) => transactionId))).toEqual([
      ['t0', 't1', 't2'],
      ['t0'],
      ['t1'],
      ['t2'],
    ])
    expect(seen.errors).toMatchObject([{ status: 400 }])
  })

  it.each([
    ['throws', failingWith(new Error('of the hook'))],
    ['rejects', () => Promise.reject(new Error('of the hook'))],
  ])('is no reason to end, nor is an onError that %s', async (_, onError) => {
    const server = serving({ pops: [html, messages(1)], ack: problem(400, 'invalid_request') })
    expect(await first(server, { onError })).toBe(1)
    expect(server.seen.warned).toEqual(['a hook failed', 'a hook failed'])
  })
})

describe('a lease', () => {
  const renewal = { firstMs: 5, leaseSeconds: 0.05 }
  const untilLost = (_: unknown, signal: AbortSignal) =>
    new Promise((_, reject) => signal.addEventListener('abort', () => reject(signal.reason)))
  /** The abort reason that a handler gets when the lease is lost, and the acks that are sent. */
  const lostWith = async (extend: Reply) => {
    const { consume, seen } = serving({ pops: [messages(1, 2)], extend })
    const lost = deferred<unknown>()
    const consumer = consume(
      (data, signal) => untilLost(data, signal).catch((why) => Promise.reject(lost.resolve(why))),
      {
        renewal,
      },
    )
    const reason = await lost.promise
    await consumer.stop()
    return { reason, seen }
  }

  it.each([
    ['nobody answers', dropped],
    ['the answer never comes', held],
    ['a proxy answers', html],
  ])('counts as lost when it could not be extended in time as %s, and its messages are returned', async (_, extend) => {
    const { reason, seen } = await lostWith(extend)
    expect(reason).toBeInstanceOf(Error)
    expect(seen.acks).toMatchObject([[{ status: 'retry' }, { status: 'retry' }]])
  })

  it('that the server does not know is lost, and nothing is answered for', async () => {
    const { reason, seen } = await lostWith(problem(404, 'not_found'))
    expect(reason).toBeInstanceOf(SpillwayError)
    expect(reason).toMatchObject({ code: 'not_found' })
    expect(seen.acks).toEqual([])
    expect(seen.warned).toHaveLength(1)
  })
})
