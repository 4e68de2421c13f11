import { afterAll, beforeAll, describe, expect, it } from 'vitest'
import { type Listening, listening, rawConnection, rawExchange } from '../http-listening.js'

let server: Listening
beforeAll(async () => {
  server = await listening()
})
afterAll(() => server.close())

const json = { 'content-type': 'application/json' }

function post(path: string, body: string | Buffer, headers: Record<string, string> = json) {
  return fetch(`${server.origin}${path}`, {
    method: 'POST',
    body: new Uint8Array(Buffer.from(body as string)),
    headers,
  })
}

async function expectProblem(answer: Response, status: number, code: string) {
  expect(answer.status).toBe(status)
  expect(answer.headers.get('content-type')).toBe('application/problem+json')
  const problem = (await answer.json()) as Record<string, unknown>
  expect(problem).toMatchObject({ status, code, type: `urn:spillway:error:${code}` })
  expect(problem.instance).toBe(new URL(answer.url).pathname)
  expect(problem.trace_id).toBe(answer.headers.get('x-request-id'))
  return problem
}

describe('bodies', () => {
  it('takes a valid one and says so with its trace id', async () => {
    const answer = await post('/items', '{"name":"ü😀","count":3}')
    expect(answer.status).toBe(200)
    expect(answer.headers.get('x-content-type-options')).toBe('nosniff')
    expect(await answer.json()).toMatchObject({
      received: { name: 'ü😀', count: 3 },
      trace: { traceId: answer.headers.get('x-request-id') },
    })
  })

  it.each([
    ['malformed', '{"name":', ''],
    ['trailing comma', '{"name":"a",}', ''],
    ['empty where one is needed', '', ''],
    ['null', 'null', ''],
    ['100,000 brackets', '['.repeat(100_000), ''],
    ['100,000 nested objects', '{"a":'.repeat(100_000), ''],
    ['NUL escape', '{"name":"a\\u0000"}', '/name'],
    ['raw NUL', '{"name":"a\0"}', ''],
    ['lone surrogate', '{"name":"\\ud800"}', '/name'],
    ['__proto__', '{"name":"a","extra":{"__proto__":{"x":1}}}', '/extra/__proto__'],
    ['infinite number', '{"name":"a","count":1e999}', '/count'],
    ['wrong type', '{"name":7}', '/name'],
    ['array instead of object', '[]', ''],
    ['out of range', '{"name":"a","count":11}', '/count'],
    ['missing member', '{}', '/name'],
    ['unknown member', '{"name":"a","nmae":"b"}', '/nmae'],
    ['256 code points', `{"name":"${'😀'.repeat(256)}"}`, '/name'],
  ])('refuses %s with 400 and where', async (_, body, path) => {
    const problem = await expectProblem(await post('/items', body), 400, 'invalid_request')
    expect(problem.errors).toEqual(expect.arrayContaining([{ path, message: expect.any(String) }]))
  })

  it('refuses invalid UTF-8', async () => {
    await expectProblem(await post('/items', Buffer.from([0x22, 0xff, 0x22])), 400, 'invalid_request')
  })

  it('takes 255 code points of four bytes', async () => {
    expect((await post('/items', `{"name":"${'😀'.repeat(255)}"}`)).status).toBe(200)
  })

  it('takes an empty body of JSON type as none', async () => {
    expect(await (await post('/anything', '')).json()).toEqual({ body: 'none' })
    const deleted = await fetch(`${server.origin}/items/1`, { method: 'DELETE', headers: json })
    expect(await deleted.json()).toEqual({ body: 'none' })
  })

  it.each([
    ['text/plain', {}],
    ['application/x-www-form-urlencoded', {}],
    ['application/json; charset=latin1', {}],
    ['nonsense', {}],
    ['application/json', { 'content-encoding': 'gzip' }],
  ])('answers 415 to %s', async (type, more) => {
    await expectProblem(
      await post('/items', '{"name":"a"}', { 'content-type': type, ...more }),
      415,
      'unsupported_media_type',
    )
  })

  it('answers 415 to a body of no type, and takes a charset of UTF-8', async () => {
    const untyped = await rawExchange(
      server.port,
      'POST /items HTTP/1.1\r\nHost: localhost\r\nContent-Length: 2\r\nConnection: close\r\n\r\n{}',
    )
    expect(untyped.status).toBe(415)
    expect((await post('/items', '{"name":"a"}', { 'content-type': 'application/json; charset="UTF-8"' })).status).toBe(
      200,
    )
  })

  it('answers 413 to a huge body, sent whole or in chunks, and the answer arrives', async () => {
    const huge = `{"name":"${'x'.repeat(8_000_000)}"}`
    await expectProblem(await post('/items', huge), 413, 'body_too_large')

    const { socket, ended } = rawConnection(server.port)
    socket.write(
      'POST /items HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\nTransfer-Encoding: chunked\r\n\r\n',
    )
    const chunk = `10000\r\n${'x'.repeat(0x10000)}\r\n`
    // Never ends: the server has to.
    const send = () => {
      while (!socket.destroyed && socket.write(chunk));
    }
    socket.on('drain', send)
    send()
    const answer = await ended
    expect(answer.status).toBe(413)
    expect(JSON.parse(answer.body.slice(0, answer.body.lastIndexOf('}') + 1))).toMatchObject({ code: 'body_too_large' })
  })

  it('keeps the connection after a malformed body', async () => {
    const bad =
      'POST /items HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\nContent-Length: 1\r\n\r\n{'
    const good = 'GET /health HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\n\r\n'
    const { text } = await rawExchange(server.port, bad + good)
    expect(text.match(/HTTP\/1\.1 \d+/g)).toEqual(['HTTP/1.1 400', 'HTTP/1.1 200'])
  })
})

describe('paths and methods', () => {
  it('answers 404 to an unknown path', async () => {
    await expectProblem(await fetch(`${server.origin}/nothing/here`), 404, 'not_found')
    await expectProblem(await post('/nothing', '{"broken'), 404, 'not_found')
  })

  it.each([
    ['PUT', '/items', 'POST'],
    ['GET', '/items', 'POST'],
    ['PATCH', '/items/1', 'DELETE, GET, HEAD'],
    ['POST', '/health', 'GET, HEAD'],
    ['OPTIONS', '/items', 'POST'],
  ])('answers 405 to %s %s with Allow: %s', async (method, path, allow) => {
    const answer = await fetch(`${server.origin}${path}`, { method })
    expect(answer.headers.get('allow')).toBe(allow)
    await expectProblem(answer, 405, 'method_not_allowed')
  })

  it.each(['/items/%ff', '/items/%', '/items/%zz', '/items/%00', '/search?limit=%00'])('refuses %s', async (path) => {
    const { status, headers, body } = await rawExchange(
      server.port,
      `GET ${path} HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\n\r\n`,
    )
    expect(status).toBe(400)
    expect(headers['content-type']).toBe('application/problem+json')
    expect(JSON.parse(body)).toMatchObject({
      code: 'invalid_request',
      trace_id: headers['x-request-id'],
      errors: [{ path: '', message: expect.any(String) }],
    })
  })

  it('takes long encoded names and any character in them', async () => {
    const name = `${'😀'.repeat(254)}/`
    const answer = await fetch(`${server.origin}/items/${encodeURIComponent(name)}`)
    expect(await answer.json()).toEqual({ params: { id: name } })
    expect((await fetch(`${server.origin}/items/${'x'.repeat(5_000)}`)).status).toBe(404)
  })

  it('converts and checks query parameters', async () => {
    expect(await (await fetch(`${server.origin}/search?limit=5&_=1`)).json()).toMatchObject({ query: { limit: 5 } })
    for (const query of ['limit=0', 'limit=x', 'limit=1.5', 'limit=', 'limit=1&limit=2']) {
      await expectProblem(await fetch(`${server.origin}/search?${query}`), 400, 'invalid_request')
    }
  })

  it('reports only the path when the target names a host', async () => {
    const { body } = await rawExchange(
      server.port,
      'GET http://localhost:1/nothing?q=1 HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\n\r\n',
    )
    expect(JSON.parse(body)).toMatchObject({ status: 404, instance: '/nothing' })
  })
})

describe('faults of our own', () => {
  it.each(['/broken', '/broken-oddly'])(
    '%s is a 500 that reveals nothing and is logged with its trace id',
    async (path) => {
      const answer = await fetch(`${server.origin}${path}`)
      const traceId = answer.headers.get('x-request-id')
      const problem = await expectProblem(answer, 500, 'internal_error')
      expect(JSON.stringify(problem)).not.toMatch(/hunter2|SELECT|just a text|\.ts/)
      expect(server.logged).toContainEqual(expect.objectContaining({ trace_id: traceId, level: 50, route: path }))
    },
  )
})

describe('traces', () => {
  it('honours a valid traceparent and replaces a broken one', async () => {
    const traceId = 'abcdefabcdefabcdefabcdefabcdefab'
    const ask = (traceparent: string) => post('/items', '{"name":"a"}', { ...json, traceparent })
    const kept = await ask(`00-${traceId}-00f067aa0ba902b7-01`)
    expect(kept.headers.get('x-request-id')).toBe(traceId)
    expect(await kept.json()).toMatchObject({ trace: { traceparent: expect.stringContaining(`00-${traceId}-`) } })
    const replaced = await ask(`00-${traceId}-broken-01`)
    expect(replaced.headers.get('x-request-id')).toMatch(/^(?!abcdef)[0-9a-f]{32}$/)
  })
})

describe('input that is not HTTP', () => {
  it.each([
    ['garbage', 'hello\r\n\r\n', 400],
    ['a TLS hello', Buffer.from([0x16, 3, 1, 0, 5, 1, 0, 0, 1, 0]), 400],
    ['a bad header', 'GET / HTTP/1.1\r\nHost: localhost\r\nbad header\r\n\r\n', 400],
    ['no host', 'GET / HTTP/1.1\r\nConnection: close\r\n\r\n', 400],
    [
      'both framings',
      'POST /items HTTP/1.1\r\nHost: localhost\r\nContent-Length: 5\r\nTransfer-Encoding: chunked\r\n\r\n0\r\n\r\n',
      400,
    ],
    ['huge headers', `GET / HTTP/1.1\r\nHost: localhost\r\nA: ${'x'.repeat(100_000)}\r\n\r\n`, 431],
  ])('%s is answered and closed', async (_, bytes, status) => {
    const answer = await rawExchange(server.port, bytes)
    expect(answer.status).toBe(status)
    expect(answer.headers.connection?.toLowerCase()).toBe('close')
    expect(answer.headers['content-type']).toBe('application/problem+json')
    expect(JSON.parse(answer.body)).toMatchObject({ status, trace_id: answer.headers['x-request-id'] })
  })

  it('answers a client that has closed its half', async () => {
    const { socket, ended } = rawConnection(server.port, true)
    socket.end(
      'POST /items HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\nContent-Length: 12\r\nConnection: close\r\n\r\n{"name":"a"}',
    )
    expect((await ended).status).toBe(200)
  })

  it('answers Expect: 100-continue', async () => {
    const { text } = await rawExchange(
      server.port,
      'POST /items HTTP/1.1\r\nHost: localhost\r\nExpect: 100-continue\r\nContent-Type: application/json\r\nContent-Length: 12\r\nConnection: close\r\n\r\n{"name":"a"}',
    )
    expect(text.match(/^HTTP\/1\.1 \d+/gm)).toEqual(['HTTP/1.1 100', 'HTTP/1.1 200'])
  })

  it('survives a client that leaves in the middle of its body', async () => {
    const { socket, ended } = rawConnection(server.port)
    socket.write(
      'POST /items HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\nContent-Length: 100\r\n\r\n{"na',
      () => socket.destroy(),
    )
    await ended
    expect((await fetch(`${server.origin}/health`)).status).toBe(200)
  })
})

describe('slow senders', () => {
  let strict: Listening
  beforeAll(async () => {
    strict = await listening({ headersTimeoutMs: 200, requestTimeoutMs: 400 })
  })
  afterAll(() => strict.close())

  it.each([
    ['header', 'GET / HTTP/1.1\r\nHost: localhost\r\n'],
    [
      'body',
      'POST /items HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\nContent-Length: 100\r\n\r\n{"na',
    ],
    [
      'chunk',
      'POST /items HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\nTransfer-Encoding: chunked\r\n\r\n5\r\n{"n',
    ],
  ])('a %s that does not come is answered with 408', async (_, bytes) => {
    const answer = await rawExchange(strict.port, bytes)
    expect(answer.status).toBe(408)
    expect(JSON.parse(answer.body)).toMatchObject({ code: 'request_timeout' })
  })
})

describe('bounded connections and draining', () => {
  it('refuses requests on a connection beyond the cap, but answers health there', async () => {
    const small = await listening({ connectionsMax: 1 })
    try {
      const first = rawConnection(small.port)
      first.socket.write('GET /health HTTP/1.1\r\nHost: localhost\r\n\r\n')
      await new Promise((resolve) => first.socket.once('data', resolve))
      const refused = await rawExchange(small.port, 'GET /search HTTP/1.1\r\nHost: localhost\r\n\r\n')
      expect(refused.status).toBe(503)
      expect(JSON.parse(refused.body)).toMatchObject({ code: 'overloaded' })
      expect(Number(refused.headers['retry-after'])).toBe(JSON.parse(refused.body).retry_after_seconds)
      const health = await rawExchange(
        small.port,
        'GET /health HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\n\r\n',
      )
      expect(health.status).toBe(200)
      first.socket.destroy()
      await first.ended
      expect((await fetch(`${small.origin}/search`)).status).toBe(200)
    } finally {
      await small.close()
    }
  })

  it('refuses work while draining, with a Retry-After from 5 to 6, but answers health', async () => {
    const draining = await listening({ draining: () => true })
    try {
      const seen = new Set<number>()
      for (let round = 0; round < 40; round++) {
        const answer = await fetch(`${draining.origin}/search`)
        const problem = (await answer.json()) as { retry_after_seconds: number; code: string }
        expect({ status: answer.status, code: problem.code }).toEqual({ status: 503, code: 'draining' })
        expect(answer.headers.get('retry-after')).toBe(String(problem.retry_after_seconds))
        seen.add(problem.retry_after_seconds)
      }
      expect([...seen].sort()).toEqual([5, 6])
      expect((await fetch(`${draining.origin}/health`)).status).toBe(200)
    } finally {
      await draining.close()
    }
  })
})
