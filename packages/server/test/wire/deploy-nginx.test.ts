/** deploy/nginx.conf in a real nginx: what it passes on, to whom, and when. */
import { createHash } from 'node:crypto'
import { once } from 'node:events'
import { request } from 'node:http'
import { BlockList } from 'node:net'
import { describe, expect, it } from 'vitest'
import { eventually } from '../../../spillway/test/pipeline-fixture.js'
import { findNginx } from '../../../spillway/test/setup/nginx.js'
import { clientAddress } from '../../src/auth/identity.js'
import { type Arrival, answerJson, behindNginx, call, deadServer } from '../scripted-gateways.js'

const found = await findNginx()
const eventStream = { 'content-type': 'text/event-stream; charset=utf-8' }
const streamRoutes = [
  ['POST', '/v1/chat/completions'],
  ['POST', '/api/v1/stream'],
  ['GET', '/api/v1/streams/0190a0b0-0000-7000-8000-000000000000?starting_after=3'],
  ['GET', '/api/v1/operations/0190a0b0-0000-7000-8000-000000000000/stream'],
] as const

/** Takes the request and leaves without a word. */
const hangUp = ({ request: incoming }: Arrival): void => {
  incoming.socket.destroy()
}

describe.skipIf('missing' in found)('streams through nginx', () => {
  it.each(streamRoutes)('%s %s: headers at once, then each chunk as it is written', async (method, target) => {
    const { nginx, gateways } = await behindNginx()
    const calling = call(nginx.origin, target, { method })
    const { response } = await gateways.next()
    response.writeHead(200, eventStream).flushHeaders()
    const called = await calling
    expect(called.status).toBe(200)
    for (const chunk of ['data: a\n\n', ':\n', 'data: [DONE]\n\n']) {
      response.write(chunk)
      expect(await called.piece()).toBe(chunk)
    }
    response.end()
    expect(await called.piece()).toBeUndefined()
  })

  it('any other route streams when the gateway says so, and the header is passed to the next proxy', async () => {
    const { nginx, gateways } = await behindNginx()
    const calling = call(nginx.origin, '/demo/tokens')
    const { response } = await gateways.next()
    response.writeHead(200, { ...eventStream, 'x-accel-buffering': 'no' }).flushHeaders()
    const called = await calling
    response.write('data: a\n\n')
    expect(await called.piece()).toBe('data: a\n\n')
    expect(called.headers['x-accel-buffering']).toBe('no')
    response.end()
  })

  it('nothing is compressed, whatever the client takes', async () => {
    const { nginx } = await behindNginx({
      answer: ({ response }) => response.writeHead(200, eventStream).end('data: a\n\n'.repeat(500)),
    })
    const called = await call(nginx.origin, '/v1/chat/completions', { headers: { 'accept-encoding': 'gzip, br' } })
    expect(called.headers['content-encoding']).toBeUndefined()
    expect(await called.text()).toBe('data: a\n\n'.repeat(500))
  })

  it.each(['before the headers', 'in the middle'])(
    'a client that leaves %s is gone for the gateway within 1 s',
    async (when) => {
      const { nginx, gateways } = await behindNginx()
      const client = new AbortController()
      const calling = call(nginx.origin, '/v1/chat/completions', { method: 'POST', body: '{}', signal: client.signal })
      const { response, left } = await gateways.next()
      if (when === 'in the middle') {
        response.writeHead(200, eventStream).write('data: a\n\n')
        const called = await calling
        await called.piece()
      } else calling.catch(() => undefined)
      const leftAt = performance.now()
      client.abort()
      await left
      expect(performance.now() - leftAt).toBeLessThan(1_000)
    },
  )

  it('a heartbeat keeps a stream without tokens alive beyond every read limit', async () => {
    const { nginx, gateways } = await behindNginx({ replace: { 'proxy_read_timeout 60s': 'proxy_read_timeout 1s' } })
    const calling = call(nginx.origin, '/api/v1/stream', { method: 'POST' })
    const { response } = await gateways.next()
    response.writeHead(200, eventStream).flushHeaders()
    const called = await calling
    const beats = setInterval(() => response.write(':\n'), 250)
    const start = performance.now()
    // As a share of its limit: 60 s at a beat every 15.
    for (let heard = 0; heard < 10; heard++) expect(await called.piece()).toMatch(/^(:\n)+$/)
    clearInterval(beats)
    expect(performance.now() - start).toBeGreaterThan(2_000)
    response.end('data: [DONE]\n\n')
    expect(await called.text()).toBe('data: [DONE]\n\n')
  })

  it('a gateway that sends nothing times out, and the client gets an error', async () => {
    const { nginx, gateways } = await behindNginx({ replace: { 'proxy_read_timeout 60s': 'proxy_read_timeout 1s' } })
    const calling = call(nginx.origin, '/api/v1/stream', { method: 'POST' })
    const { response, left } = await gateways.next()
    response.writeHead(200, eventStream).flushHeaders()
    const called = await calling
    await expect(called.piece()).rejects.toThrow()
    await left
  })

  it('a reload cuts no stream, and new requests are served meanwhile', async () => {
    const { nginx, gateways } = await behindNginx()
    const calling = call(nginx.origin, '/v1/chat/completions', { method: 'POST' })
    const { response } = await gateways.next()
    response.writeHead(200, eventStream).write('data: a\n\n')
    const called = await calling
    await called.piece()
    await nginx.reload()
    const another = call(nginx.origin, '/api/v1/operations')
    answerJson(await gateways.next())
    expect((await another).status).toBe(200)
    response.end('data: b\n\n')
    expect(await called.text()).toBe('data: b\n\n')
  })
})

describe.skipIf('missing' in found)('which gateway', () => {
  it('has the fewest open, for all workers alike', async () => {
    const { nginx, gateways } = await behindNginx({ gateways: 2 })
    const taken = [0, 0]
    // Workers that each counted for themselves would be two apart as soon as both have an odd number.
    for (let open = 1; open <= 20; open++) {
      const calling = call(nginx.origin, '/v1/chat/completions', { method: 'POST' })
      const { gateway, response } = await gateways.next()
      response.writeHead(200, eventStream).flushHeaders()
      await calling
      taken[gateway] = (taken[gateway] ?? 0) + 1
      expect(Math.max(...taken)).toBe(Math.ceil(open / 2))
    }
  })

  it('is another one when the first is dead: no POST is lost, none comes twice', async () => {
    const { nginx, gateways } = await behindNginx({ answer: answerJson, others: [await deadServer()] })
    const numbers = Array.from({ length: 20 }, (_, n) => `/v1/petition-submissions?n=${n}`)
    const statuses: number[] = []
    for (const target of numbers)
      statuses.push((await call(nginx.origin, target, { method: 'POST', body: '{}' })).status)
    expect(statuses).toEqual(numbers.map(() => 200))
    expect(gateways.arrivals.map(({ target }) => target)).toEqual(numbers)
    expect(nginx.errors()).toContain('Connection refused')
  })

  it.each(['/v1/chat/completions', '/v1/petition-submissions'])(
    'POST %s that reached one goes to no other',
    async (target) => {
      const { nginx, gateways } = await behindNginx({ gateways: 3, answer: hangUp })
      const headers = { 'idempotency-key': 'k' }
      expect((await call(nginx.origin, target, { method: 'POST', body: '{}', headers })).status).toBe(502)
      expect(gateways.arrivals).toHaveLength(1)
    },
  )

  it('is another one for a GET that the first left unanswered', async () => {
    const { nginx, gateways } = await behindNginx({
      gateways: 2,
      answer: (arrival) => (gateways.arrivals.length === 1 ? hangUp(arrival) : answerJson(arrival)),
    })
    expect((await call(nginx.origin, '/api/v1/operations')).status).toBe(200)
    expect(new Set(gateways.arrivals.map(({ gateway }) => gateway)).size).toBe(2)
  })

  it('stays the same for a GET that takes messages', async () => {
    const { nginx, gateways } = await behindNginx({ gateways: 2, answer: hangUp })
    expect((await call(nginx.origin, '/api/v1/pop/queue/orders?autoAck=true')).status).toBe(502)
    expect(gateways.arrivals).toHaveLength(1)
  })

  it('that sheds load is trusted: the answer passes unchanged, and no other server is tried', async () => {
    const refusal = JSON.stringify({ code: 'overloaded', retry_after_seconds: 7 })
    const { nginx, gateways } = await behindNginx({
      gateways: 2,
      answer: ({ response }) =>
        response.writeHead(503, { 'content-type': 'application/problem+json', 'retry-after': '7' }).end(refusal),
    })
    const called = await call(nginx.origin, '/api/v1/operations')
    expect([called.status, called.headers['retry-after'], await called.text()]).toEqual([503, '7', refusal])
    expect(gateways.arrivals).toHaveLength(1)
  })

  it('is spoken to over connections that stay open', async () => {
    const { nginx, gateways } = await behindNginx({ answer: answerJson })
    for (let n = 0; n < 20; n++) await (await call(nginx.origin, '/api/v1/operations')).text()
    // One for each worker.
    expect(new Set(gateways.arrivals.map(({ peerPort }) => peerPort)).size).toBeLessThanOrEqual(2)
    expect(gateways.arrivals).toHaveLength(20)
  })
})

describe.skipIf('missing' in found)('what the gateway gets', () => {
  it('the path as it was sent', async () => {
    const { nginx, gateways } = await behindNginx({ answer: answerJson })
    const target = '/api/v1/resources/queues/a%2Fb%20c//%C3%A9?x=%2F&y'
    await call(nginx.origin, target)
    expect(gateways.arrivals.map((arrival) => arrival.target)).toEqual([target])
  })

  it("the caller's address behind what he claims, so that only the true one counts", async () => {
    const { nginx, gateways } = await behindNginx({ answer: answerJson })
    await call(nginx.origin, '/', { headers: { 'x-forwarded-for': '203.0.113.9' }, localAddress: '127.0.0.5' })
    const forwarded = gateways.arrivals[0]?.headers['x-forwarded-for']
    expect(forwarded).toBe('203.0.113.9, 127.0.0.5')
    const trusted = new BlockList()
    trusted.addAddress('127.0.0.1')
    expect(clientAddress(forwarded, '127.0.0.1', trusted)).toBe('127.0.0.5')
  })

  it("the caller's own host, key, identity and deadline", async () => {
    const { nginx, gateways } = await behindNginx({ answer: answerJson })
    const headers = {
      host: 'api.example.org:8443',
      authorization: 'Bearer k',
      'x-user-id': 'u',
      'idempotency-key': 'i',
      'last-event-id': '3',
      'x-request-id': 'r',
      'x-stainless-timeout': '60',
    }
    await call(nginx.origin, '/v1/models', { headers })
    expect(gateways.arrivals[0]?.headers).toMatchObject(headers)
  })

  it("the caller's trace", async () => {
    const { nginx, gateways } = await behindNginx({ answer: answerJson })
    const traceparent = '00-4bf92f3577b34da6a3ce929d0e0e4736-00f067aa0ba902b7-00'
    await call(nginx.origin, '/', { headers: { traceparent } })
    expect(gateways.arrivals[0]?.headers.traceparent).toBe(traceparent)
  })

  it.each(['', '00-00000000000000000000000000000000-00f067aa0ba902b7-01', 'x'])(
    'a trace of its own for "%s"',
    async (given) => {
      const { nginx, gateways } = await behindNginx({ answer: answerJson })
      await call(nginx.origin, '/', { headers: given === '' ? {} : { traceparent: given } })
      const [, traceId] =
        /^00-([0-9a-f]{32})-[0-9a-f]{16}-01$/.exec(gateways.arrivals[0]?.headers.traceparent as string) ?? []
      expect(traceId).toBeDefined()
      const logged = await eventually(async () => (await nginx.accesses())[0], 'the line in the log')
      expect(logged.trace_id).toBe(traceId)
    },
  )

  it('a complete body of 16 MiB and more', async () => {
    const { nginx, gateways } = await behindNginx()
    const body = Buffer.alloc(16 * 1024 * 1024 + 1, 'prompt ')
    const calling = call(nginx.origin, '/v1/chat/completions', { method: 'POST', body })
    const arrival = await gateways.next()
    const hash = createHash('sha256')
    for await (const chunk of arrival.request) hash.update(chunk as Buffer)
    answerJson(arrival)
    expect((await calling).status).toBe(200)
    expect(hash.digest('hex')).toBe(createHash('sha256').update(body).digest('hex'))
  })

  it('nothing of a slow sender before the request is complete', async () => {
    const { nginx, gateways } = await behindNginx({ answer: answerJson })
    const options = { host: '127.0.0.1', port: nginx.port, path: '/v1/petition-submissions?slow', agent: false }
    const slow = request({ ...options, method: 'POST', headers: { 'content-length': '4', expect: '100-continue' } })
    slow.flushHeaders()
    // It has the headers and waits for the rest.
    await once(slow, 'continue')
    slow.write('{}')
    await call(nginx.origin, '/v1/petition-submissions?quick', { method: 'POST', body: '{}' })
    slow.end('  ')
    await once(slow, 'response')
    expect(gateways.arrivals.map(({ target }) => target)).toEqual([
      '/v1/petition-submissions?quick',
      '/v1/petition-submissions?slow',
    ])
  })
})
