import { createServer, type IncomingMessage, type ServerResponse } from 'node:http'
import type { AddressInfo } from 'node:net'
import { afterEach, describe, expect, it } from 'vitest'
import { parseAllowList } from '../../src/workloads/http-request/allow-list.js'
import { createForwarder, type Forwarder, type ForwardOptions } from '../../src/workloads/http-request/forward.js'
import type { ForwardRequest } from '../../src/workloads/http-request/payload.js'

interface Received {
  method: string
  path: string
  headers: IncomingMessage['headers']
  body: string
}

type Handler = (request: IncomingMessage, answer: ServerResponse) => void

const cleanups: (() => Promise<unknown>)[] = []
afterEach(async () => {
  for (const cleanup of cleanups.splice(0).reverse()) await cleanup()
})

async function target(handler: Handler) {
  const received: Received[] = []
  const server = createServer(async (request, answer) => {
    const chunks: Buffer[] = []
    for await (const chunk of request) chunks.push(chunk)
    const body = Buffer.concat(chunks).toString()
    received.push({ method: request.method ?? '', path: request.url ?? '', headers: request.headers, body })
    handler(request, answer)
  })
  await new Promise<void>((resolve) => server.listen(0, '127.0.0.1', resolve))
  cleanups.push(async () => {
    server.closeAllConnections()
    server.close()
  })
  const { port } = server.address() as AddressInfo
  return { origin: `http://127.0.0.1:${port}`, port, received, server }
}

function forwarder(...options: Parameters<typeof createForwarder>): Forwarder {
  const made = createForwarder(...options)
  cleanups.push(() => made.close())
  return made
}

const request = (url: string, more: Partial<ForwardRequest> = {}): ForwardRequest => ({
  url,
  method: 'POST',
  headers: {},
  ...more,
})

const options = (origins: string[], more: Partial<ForwardOptions> = {}): ForwardOptions => ({
  allow: parseAllowList(origins),
  operationId: '0190c5d2-7e6f-7000-8e5e-aaaaaaaaaaaa',
  traceparent: '00-4bf92f3577b34da6a3ce929d0e0e4736-00f067aa0ba902b7-01',
  signal: AbortSignal.timeout(10_000),
  ...more,
})

const ok: Handler = (_, answer) => answer.setHeader('content-type', 'application/json').end('{"fine":true}')

describe('forwarding', () => {
  it('sends JSON with our key and trace, and keeps the answer', async () => {
    const { origin, received } = await target(ok)
    const outcome = await forwarder().forward(
      request(`${origin}/a?b=c#d`, { body: { x: 1 }, headers: { 'x-own': 'v', authorization: 'Bearer t' } }),
      options([origin]),
    )
    expect(outcome).toMatchObject({ kind: 'done', result: { status: 200, body: { fine: true } } })
    expect(outcome).not.toHaveProperty('result.truncated')
    expect(received).toMatchObject([
      {
        method: 'POST',
        path: '/a?b=c',
        body: '{"x":1}',
        headers: {
          'content-type': 'application/json',
          'x-own': 'v',
          authorization: 'Bearer t',
          'idempotency-key': '0190c5d2-7e6f-7000-8e5e-aaaaaaaaaaaa',
          traceparent: '00-4bf92f3577b34da6a3ce929d0e0e4736-00f067aa0ba902b7-01',
        },
      },
    ])
  })

  it('sends a text as it is when its type is given, as JSON when not', async () => {
    const { origin, received } = await target(ok)
    const { forward } = forwarder()
    await forward(request(origin, { body: 'a=b', headers: { 'content-type': 'text/plain' } }), options([origin]))
    await forward(request(origin, { body: 'a=b' }), options([origin]))
    await forward(request(origin, { body: null }), options([origin]))
    await forward(request(origin, { method: 'GET' }), options([origin]))
    expect(received.map(({ body, headers }) => [body, headers['content-type']])).toEqual([
      ['a=b', 'text/plain'],
      ['"a=b"', 'application/json'],
      ['null', 'application/json'],
      ['', undefined],
    ])
  })

  it.each([
    [200, 'done'],
    [204, 'done'],
    [304, 'failed'],
    [400, 'failed'],
    [404, 'failed'],
    [408, 'retry'],
    [409, 'failed'],
    [429, 'retry'],
    [500, 'retry'],
    [503, 'retry'],
  ])('an answer of %d is %s', async (status, kind) => {
    const { origin } = await target((_, answer) => answer.writeHead(status).end())
    const outcome = await forwarder().forward(request(origin), options([origin]))
    expect(outcome).toMatchObject({ kind, result: { status } })
  })

  it('honours Retry-After in both forms, up to a day', async () => {
    const date = new Date(Date.now() + 60_000).toUTCString()
    for (const [value, low, high] of [
      ['7', 7_000, 7_000],
      [date, 55_000, 60_000],
      ['999999', 86_400_000, 86_400_000],
    ] as const) {
      const { origin } = await target((_, answer) => answer.writeHead(503, { 'retry-after': value }).end())
      const outcome = await forwarder().forward(request(origin), options([origin]))
      const retryAfterMs = outcome.kind === 'retry' ? (outcome.retryAfterMs ?? 0) : 0
      expect(retryAfterMs).toBeGreaterThanOrEqual(low)
      expect(retryAfterMs).toBeLessThanOrEqual(high)
    }
  })

  it('keeps 64 KiB of an endless answer and closes the connection', async () => {
    let closed: (value: unknown) => void
    const closing = new Promise((resolve) => {
      closed = resolve
    })
    const { origin } = await target((incoming, answer) => {
      incoming.socket.once('close', () => closed(true))
      answer.setHeader('content-type', 'application/json')
      const send = () => {
        while (!answer.destroyed && answer.write('x'.repeat(10_000)));
      }
      answer.on('drain', send)
      send()
    })
    const outcome = await forwarder().forward(request(origin), options([origin]))
    expect(outcome).toMatchObject({ kind: 'done', result: { truncated: true } })
    expect(outcome.kind === 'done' && outcome.result.body).toBe('x'.repeat(65_536))
    expect(await closing).toBe(true)
  })

  it('retries when the connection is refused or breaks, and when the time is over', async () => {
    const { origin, server } = await target((incoming) => incoming.socket.destroy())
    expect(await forwarder().forward(request(origin), options([origin]))).toMatchObject({
      kind: 'retry',
      error: { code: 'network' },
    })
    const closed = new Promise((resolve) => server.close(resolve))
    await closed
    expect(await forwarder().forward(request(origin), options([origin]))).toMatchObject({
      kind: 'retry',
      error: { code: 'network', message: expect.stringContaining('ECONNREFUSED') },
    })
    const abort = new AbortController()
    const silent = await target(() => abort.abort())
    expect(
      await forwarder().forward(request(silent.origin), options([silent.origin], { signal: abort.signal })),
    ).toMatchObject({ kind: 'retry', error: { code: 'aborted' } })
  })

  it('retries when the answer breaks off', async () => {
    const { origin } = await target((incoming, answer) => {
      answer.writeHead(200, { 'content-length': '100' })
      answer.write('half', () => incoming.socket.destroy())
    })
    expect(await forwarder().forward(request(origin), options([origin]))).toMatchObject({
      kind: 'retry',
      error: { code: 'network' },
    })
  })
})

describe('where a call may go', () => {
  it('makes no connection to an origin that is not listed', async () => {
    const { origin, received } = await target(ok)
    const { forward } = forwarder()
    for (const url of [origin, origin.replace('http://', 'http://u:p@')]) {
      expect(await forward(request(url), options(['http://127.0.0.1:1']))).toMatchObject({
        kind: 'failed',
        error: { code: 'target_not_allowed' },
      })
    }
    expect(received).toEqual([])
  })

  it('allows localhost when it is listed', async () => {
    const { port } = await target(ok)
    const origin = `http://localhost:${port}`
    expect(await forwarder().forward(request(origin), options([origin]))).toMatchObject({ kind: 'done' })
  })

  it('refuses a listed name that resolves to a private address, at connect time', async () => {
    const { port, received } = await target(ok)
    const origin = `http://hooks.example.com:${port}`
    for (const address of ['127.0.0.1', '10.0.0.1', '169.254.169.254']) {
      const { forward } = forwarder({ resolve: (_, callback) => callback(null, [{ address, family: 4 }]) })
      expect(await forward(request(origin), options([origin]))).toMatchObject({
        kind: 'failed',
        error: { code: 'target_not_allowed' },
      })
    }
    expect(received).toEqual([])
  })

  it('retries when a name does not resolve', async () => {
    const fault = Object.assign(new Error('no such name'), { code: 'ENOTFOUND' })
    const { forward } = forwarder({ resolve: (_, callback) => callback(fault, []) })
    const origin = 'http://hooks.example.com'
    expect(await forward(request(origin), options([origin]))).toMatchObject({
      kind: 'retry',
      error: { code: 'network', message: expect.stringContaining('ENOTFOUND') },
    })
  })
})

describe('redirects', () => {
  it.each([
    [301, 'GET'],
    [302, 'HEAD'],
    [303, 'GET'],
    [307, 'POST'],
    [308, 'PUT'],
  ] as const)('%d of a %s is repeated within the list', async (status, method) => {
    const body = method === 'POST' || method === 'PUT' ? '{"x":1}' : ''
    const other = await target(ok)
    const first = await target((_, answer) => answer.writeHead(status, { location: `${other.origin}/there` }).end())
    const outcome = await forwarder().forward(
      request(first.origin, {
        method,
        ...(body !== '' && { body: { x: 1 } }),
        headers: { authorization: 'Bearer t', cookie: 'c' },
      }),
      options([first.origin, other.origin]),
    )
    expect(outcome).toMatchObject({ kind: 'done', result: { status: 200 } })
    expect(other.received).toMatchObject([
      { method, path: '/there', body, headers: { 'idempotency-key': '0190c5d2-7e6f-7000-8e5e-aaaaaaaaaaaa' } },
    ])
    expect(other.received[0]?.headers).not.toHaveProperty('authorization')
    expect(other.received[0]?.headers).not.toHaveProperty('cookie')
  })

  it.each([
    [301, 'POST'],
    [302, 'DELETE'],
    [303, 'PUT'],
  ] as const)('%d of a %s, which would not be done by a GET, is a failure', async (status, method) => {
    const first = await target((_, answer) => answer.writeHead(status, { location: '/there' }).end())
    expect(await forwarder().forward(request(first.origin, { method }), options([first.origin]))).toMatchObject({
      kind: 'failed',
      error: { code: 'redirect_refused', message: expect.stringContaining(String(status)) },
      result: { status },
    })
    expect(first.received).toHaveLength(1)
  })

  it('is not followed elsewhere', async () => {
    const other = await target(ok)
    const first = await target((_, answer) => answer.writeHead(307, { location: other.origin }).end())
    expect(await forwarder().forward(request(first.origin), options([first.origin]))).toMatchObject({
      kind: 'failed',
      error: { code: 'target_not_allowed' },
      result: { status: 307 },
    })
    expect(other.received).toEqual([])
  })

  it('is followed five times, also if relative, and never without Location', async () => {
    const loop = await target((_, answer) => answer.writeHead(307, { location: 'next' }).end())
    expect(await forwarder().forward(request(`${loop.origin}/a/b`), options([loop.origin]))).toMatchObject({
      kind: 'failed',
      error: { code: 'redirect_refused' },
    })
    expect(loop.received.map(({ path }) => path)).toEqual(['/a/b', ...Array(5).fill('/a/next')])
    const lost = await target((_, answer) => answer.writeHead(302).end())
    expect(await forwarder().forward(request(lost.origin), options([lost.origin]))).toMatchObject({
      kind: 'failed',
      error: { code: 'redirect_refused' },
    })
  })
})
