/** deploy/nginx.conf in a real nginx: what it answers itself, whom it refuses, and what it writes down. */
import { once } from 'node:events'
import { request } from 'node:http'
import { connect } from 'node:net'
import { problems } from '@spillway/protocol/wire'
import { describe, expect, it } from 'vitest'
import { eventually } from '../../../spillway/test/pipeline-fixture.js'
import { checkNginxConfig, findNginx, shippedConfig } from '../../../spillway/test/setup/nginx.js'
import { answerJson, behindNginx, type Called, call, deadServer } from '../scripted-gateways.js'

const found = await findNginx()
const traceId = '4bf92f3577b34da6a3ce929d0e0e4736'
const headers = { traceparent: `00-${traceId}-00f067aa0ba902b7-01` }

/** An answer of nginx, in the form of the gateways' own. */
async function expectProblem(called: Called, status: number, code: string, instance: string): Promise<void> {
  expect([called.status, called.headers['content-type']]).toEqual([status, 'application/problem+json'])
  const document = await called.json()
  expect(document).toMatchObject({ type: `urn:spillway:error:${code}`, code, status, instance })
  expect(document.trace_id).toBe(called.headers['x-request-id'])
  expect([document.title, document.detail]).toEqual([expect.stringMatching(/\w/), expect.stringMatching(/\w/)])
  const retryAfter = called.headers['retry-after']
  expect(document.retry_after_seconds).toBe(retryAfter === undefined ? undefined : Number(retryAfter))
}

async function expectOpenAiError(called: Called, status: number, type: string, code: string): Promise<void> {
  expect([called.status, called.headers['content-type']]).toEqual([status, 'application/json'])
  const message: unknown = expect.stringMatching(/\w/)
  expect(await called.json()).toEqual({ error: { message, type, param: null, code } })
}

const seconds = expect.stringMatching(/^[12]$/) as unknown

describe.skipIf('missing' in found)('deploy/nginx.conf', () => {
  it('is valid as it is', async () => {
    const program = 'program' in found ? found.program : ''
    const { ok, output } = await checkNginxConfig(program, shippedConfig())
    expect(ok, output).toBe(true)
    expect(output).not.toMatch(/\[(warn|alert|error|emerg)\]/)
  })

  it('has the codes and titles of the gateways; two that only a proxy can give', () => {
    const config = shippedConfig()
    const block = (name: string) => new RegExp(`\\$${name} \\{\\n([^}]+)\\}`).exec(config)?.[1] ?? ''
    const pairs = (name: string) => [...block(name).matchAll(/^ +(\w+) "?([^";$]+)"?;$/gm)].map(([, a, b]) => [a, b])
    const titles = new Map(pairs('error_title').map(([code = '', title]) => [code, title]))
    const statuses = new Map(pairs('error_code').map(([status = '', code]) => [code, status]))
    for (const code of ['connection_limit', 'rate_limited']) statuses.set(code, '429')
    expect([...titles.keys()].filter((code) => !(code in problems))).toEqual([
      'gateway_unreachable',
      'gateway_timeout',
      'default',
    ])
    for (const [code, { status, title }] of Object.entries(problems).filter(([name]) => titles.has(name)))
      expect([code, statuses.get(code), titles.get(code)]).toEqual([code, String(status), title])
  })
})

describe.skipIf('missing' in found)('without a gateway that answers', () => {
  it("502 is a problem document with the caller's trace and Retry-After", async () => {
    const { nginx } = await behindNginx({ gateways: 0, others: [await deadServer()] })
    const called = await call(nginx.origin, '/v1/petition-submissions?secret=1', {
      method: 'POST',
      body: '{}',
      headers,
    })
    expect(called.headers).toMatchObject({
      'retry-after': seconds,
      'x-request-id': traceId,
      'cache-control': 'no-store',
      'x-content-type-options': 'nosniff',
    })
    expect(called.headers.server).toBe('nginx')
    await expectProblem(called, 502, 'gateway_unreachable', '/v1/petition-submissions')
  })

  it("502 is OpenAI's error object for OpenAI's routes", async () => {
    const { nginx } = await behindNginx({ gateways: 0, others: [await deadServer()] })
    const called = await call(nginx.origin, '/v1/chat/completions', { method: 'POST', body: '{}', headers })
    expect(called.headers).toMatchObject({ 'retry-after': seconds, 'x-request-id': traceId })
    await expectOpenAiError(called, 502, 'server_error', 'gateway_unreachable')
  })

  it('504 when it is too late, likewise', async () => {
    const { nginx } = await behindNginx({
      replace: {
        'proxy_read_timeout 130s': 'proxy_read_timeout 1s',
        'proxy_read_timeout 660s': 'proxy_read_timeout 1s',
      },
    })
    const [other, openAi] = await Promise.all([
      call(nginx.origin, '/v1/petition-submissions', { method: 'POST', body: '{}' }),
      call(nginx.origin, '/v1/chat/completions', { method: 'POST', body: '{}' }),
    ])
    expect([other.headers['retry-after'], openAi.headers['retry-after']]).toEqual([seconds, seconds])
    await expectProblem(other, 504, 'gateway_timeout', '/v1/petition-submissions')
    await expectOpenAiError(openAi, 504, 'server_error', 'gateway_timeout')
  })

  it('one that is back is used again', async () => {
    const { nginx, gateways } = await behindNginx({
      gateways: 2,
      answer: (arrival) => (broken ? arrival.request.socket.destroy() : answerJson(arrival)),
      replace: { 'fail_timeout=5s': 'fail_timeout=1s' },
    })
    let broken = true
    const status = async () => (await call(nginx.origin, '/api/v1/operations')).status
    // Until none of them is tried any more.
    await eventually(async () => {
      const before = gateways.arrivals.length
      expect(await status()).toBe(502)
      return gateways.arrivals.length === before ? true : undefined
    }, 'all gateways to be left alone')
    broken = false
    await eventually(async () => ((await status()) === 200 ? true : undefined), 'a gateway to be tried again')
  })

  it('a path that cannot stand in JSON is not repeated', async () => {
    const { nginx } = await behindNginx({ gateways: 0, others: [await deadServer()] })
    const called = await call(nginx.origin, '/a"b\\c')
    await expectProblem(called, 502, 'gateway_unreachable', '/')
  })
})

describe.skipIf('missing' in found)('refusals', () => {
  it.each(['/metrics', '/_metrics', '/%6detrics', '//metrics', '/x/../metrics', '/metrics/', '/metrics?a=1'])(
    '%s is not for everyone',
    async (target) => {
      const { nginx, gateways } = await behindNginx({ answer: answerJson })
      const called = await call(nginx.origin, target)
      await expectProblem(called, 404, 'not_found', target.replace(/\?.*/, ''))
      expect(called.headers['retry-after']).toBeUndefined()
      expect(gateways.arrivals).toEqual([])
    },
  )

  it('more requests at once than one address may have, until one of them ends', async () => {
    const { nginx, gateways } = await behindNginx({
      replace: { 'limit_conn connections 2000': 'limit_conn connections 2' },
    })
    const leave = new AbortController()
    const open = [leave.signal, undefined].map((signal) =>
      call(nginx.origin, '/v1/chat/completions', { method: 'POST', ...(signal && { signal }) }),
    )
    // They end with the client or with the test.
    for (const one of open) one.catch(() => undefined)
    const arrivals = [await gateways.next(), await gateways.next()]
    const refused = await call(nginx.origin, '/api/v1/operations')
    expect(refused.headers['retry-after']).toEqual(seconds)
    await expectProblem(refused, 429, 'connection_limit', '/api/v1/operations')
    await expectOpenAiError(await call(nginx.origin, '/v1/models'), 429, 'rate_limit_error', 'connection_limit')
    leave.abort()
    await Promise.race(arrivals.map(({ left }) => left))
    const calling = call(nginx.origin, '/api/v1/operations')
    answerJson(await gateways.next())
    expect((await calling).status).toBe(200)
  })

  it('more requests in a time than one address may send', async () => {
    const { nginx } = await behindNginx({
      answer: answerJson,
      replace: { 'rate=500r/s': 'rate=1r/m', 'burst=1000': 'burst=2' },
    })
    const statuses: number[] = []
    for (let n = 0; n < 5; n++) statuses.push((await call(nginx.origin, '/api/v1/operations')).status)
    expect(statuses).toEqual([200, 200, 200, 429, 429])
    const refused = await call(nginx.origin, '/api/v1/operations')
    expect(refused.headers['retry-after']).toEqual(seconds)
    await expectProblem(refused, 429, 'rate_limited', '/api/v1/operations')
    await expectOpenAiError(await call(nginx.origin, '/v1/models'), 429, 'rate_limit_error', 'rate_limit_exceeded')
  })

  it('no probe, whatever else its address does', async () => {
    const { nginx } = await behindNginx({
      answer: answerJson,
      replace: { 'rate=500r/s': 'rate=1r/m', ' burst=1000 nodelay': '', 'connections 2000': 'connections 1' },
    })
    const statuses = async (target: string) => {
      const calls = Array.from({ length: 5 }, () => call(nginx.origin, target))
      return (await Promise.all(calls)).map(({ status }) => status)
    }
    expect(await statuses('/api/v1/operations')).toContain(429)
    for (const target of ['/health/ready', '/health', '/_health'])
      expect(await statuses(target)).toEqual(Array(5).fill(200))
  })

  it('a body over 17 MiB, in the form of the route', async () => {
    const { nginx, gateways } = await behindNginx({ answer: answerJson })
    const big = { method: 'POST', headers: { 'content-length': String(17 * 1024 * 1024 + 1) } }
    const refused = async (target: string): Promise<Called> => call(nginx.origin, target, { ...big, body: '{' })
    await expectProblem(await refused('/api/v1/push'), 413, 'body_too_large', '/api/v1/push')
    await expectOpenAiError(await refused('/v1/chat/completions'), 413, 'invalid_request_error', 'body_too_large')
    expect(gateways.arrivals).toEqual([])
  })

  it('header fields without end', async () => {
    const { nginx } = await behindNginx({ answer: answerJson })
    const called = await call(nginx.origin, '/api/v1/operations', { headers: { 'x-long': 'x'.repeat(20_000) } })
    await expectProblem(called, 431, 'header_fields_too_large', '/api/v1/operations')
  })

  it('a path without end', async () => {
    const { nginx } = await behindNginx({ answer: answerJson })
    const called = await call(nginx.origin, `/${'x'.repeat(20_000)}`)
    expect([called.status, (await called.json()).code]).toEqual([431, 'header_fields_too_large'])
  })

  it.each(['GET / HTTP/1.1\r\nhost: a\r\nhost: b\r\n\r\n', 'GET nowhere HTTP/1.1\r\n\r\n', 'GET / HTTP/9.9\r\n\r\n'])(
    '%j, which is no HTTP',
    async (sent) => {
      const { nginx } = await behindNginx({ answer: answerJson })
      const socket = connect(nginx.port, '127.0.0.1')
      socket.write(sent)
      let text = ''
      for await (const chunk of socket) text += String(chunk)
      expect(text).toMatch(/^HTTP\/1\.1 400 /)
      expect(JSON.parse(text.slice(text.indexOf('\r\n\r\n')))).toMatchObject({ status: 400, code: 'invalid_request' })
    },
  )

  it('half a body, when the rest does not come', async () => {
    const { nginx, gateways } = await behindNginx({
      answer: answerJson,
      replace: { 'client_body_timeout 15s': 'client_body_timeout 1s' },
    })
    const options = {
      host: '127.0.0.1',
      port: nginx.port,
      path: '/v1/petition-submissions',
      method: 'POST',
      agent: false,
    }
    const slow = request({ ...options, headers: { 'content-length': '4' } })
    slow.write('{}')
    await expect(once(slow, 'response')).rejects.toMatchObject({ code: 'ECONNRESET' })
    expect(gateways.arrivals).toEqual([])
  })
})

describe.skipIf('missing' in found)('the access log', () => {
  it('shows what happened and nothing that is private to the caller', async () => {
    const { nginx, gateways } = await behindNginx({ answer: answerJson })
    await call(nginx.origin, '/v1/models?key=hidden-1', {
      headers: { ...headers, authorization: 'Bearer hidden-2', 'x-user-id': 'hidden-3', referer: 'http://a/?hidden-4' },
    })
    const [line] = await eventually(async () => {
      const lines = await nginx.accesses()
      return lines.length > 0 ? lines : undefined
    }, 'the line in the log')
    expect(line).toMatchObject({
      method: 'GET',
      path: '/v1/models',
      status: 200,
      address: '127.0.0.1',
      gateway: gateways.servers[0],
      gateway_status: '200',
      trace_id: traceId,
    })
    expect(JSON.stringify(line)).not.toContain('hidden')
  })

  it('stays JSON whatever is asked for, and leaves probes out', async () => {
    const { nginx } = await behindNginx({ answer: answerJson })
    await call(nginx.origin, '/health/ready')
    await call(nginx.origin, '/a"b\\c')
    const lines = await eventually(async () => {
      const found = await nginx.accesses()
      return found.length > 0 ? found : undefined
    }, 'the line in the log')
    expect(lines.map(({ path }) => path)).toEqual(['/a"b\\c'])
  })
})
