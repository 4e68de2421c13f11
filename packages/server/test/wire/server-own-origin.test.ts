/** `http.request` and the server's own origin: /demo/echo and nothing else, however it is spelt. */
import { once } from 'node:events'
import { createServer } from 'node:net'
import { afterAll, beforeAll, describe, expect, it } from 'vitest'
import { freshDatabase, type TestDatabase } from '../../../spillway/test/setup/database.js'
import { endAll, get, type ServerProcess, startServer, startTarget, submit, type Target } from '../server-process.js'

let database: TestDatabase
let target: Target
/** With its own origin listed by the operator, in every form that reaches it. */
let listed: ServerProcess
/** Without a list: its own origin is allowed by itself. */
let plain: ServerProcess

async function freePort(): Promise<number> {
  const probe = createServer().listen(0, '127.0.0.1')
  await once(probe, 'listening')
  const { port } = probe.address() as { port: number }
  probe.close()
  await once(probe, 'close')
  return port
}

beforeAll(async () => {
  database = await freshDatabase()
  target = await startTarget(({ path }, response) => {
    const to = new URL(path, 'http://x').searchParams.get('to')
    response.writeHead(to === null ? 200 : 307, to === null ? {} : { location: to }).end()
  })
  const port = await freePort()
  const hosts = ['127.0.0.1', 'localhost', 'localhost.', '0.0.0.0', '[::1]', '[::]', '[::ffff:127.0.0.1]', '127.0.0.2']
  ;[listed, plain] = await Promise.all([
    startServer({
      DATABASE_URL: database.url,
      SPILLWAY_PORT: String(port),
      SPILLWAY_FORWARD_ALLOW: [target.origin, ...hosts.map((host) => `http://${host}:${port}`)].join(','),
    }),
    startServer({ DATABASE_URL: database.url, SPILLWAY_DB_SCHEMA: 'plain' }),
  ])
})
afterAll(async () => {
  await endAll()
  await Promise.all([target.close(), database.drop()])
})

const hosts = [
  ...['127.0.0.1', 'localhost', 'LOCALHOST', 'localhost.', '127.1', '0x7f.1', '2130706433', '017700000001'],
  ...['0.0.0.0', '0', '127.0.0.2', '[::1]', '[::]', '[::ffff:127.0.0.1]', '[::ffff:7f00:1]', '[0:0:0:0:0:0:0:1]'],
]
const paths = [
  ...[
    '/api/v1/admin/halt',
    '/',
    '',
    '//demo/echo',
    '/demo/echo/',
    '/demo/echo//',
    '/demo/echo/x',
    '/demo',
    '/DEMO/ECHO',
  ],
  ...[
    '/demo/echo/../../api/v1/admin/halt',
    '/demo/echo/%2e%2e/%2e%2e/api/v1/admin/halt',
    '/demo/echo%2f..',
    '/demo%2fecho',
  ],
  ...[
    '/demo/echo%2f..%2f..%2fapi%2fv1%2fadmin%2fhalt',
    '/demo/echo;x',
    '/demo/echo%00',
    '/demo/echo\\..\\..\\api',
    '/./x',
  ],
]

describe('the own origin', () => {
  it.each(hosts)('as %s is no target but for /demo/echo', async (host) => {
    for (const server of [listed, plain]) {
      for (const path of paths) {
        const answer = await submit(server, `http://${host}:${server.port}${path}`, {
          payload: { body: { reason: 'x' } },
        })
        expect([path, answer.status, answer.body.code]).toEqual([path, 403, 'target_not_allowed'])
      }
    }
  })

  it('is one for /demo/echo, with a query and with dots that lead there', async () => {
    for (const server of [listed, plain]) {
      for (const url of ['/demo/echo', '/demo/echo?delay_ms=1', '/x/../demo/echo', '/demo/./echo', '/demo/echo#api']) {
        for (const host of ['127.0.0.1', 'localhost', '127.1']) {
          const answer = await submit(server, `http://${host}:${server.port}${url}`, { queue: url })
          expect([url, host, answer.status, answer.body.status]).toEqual([url, host, 201, 'executed'])
        }
      }
    }
  })

  it('with user info is refused as before', async () => {
    const answer = await submit(listed, `http://u:p@127.0.0.1:${listed.port}/demo/echo`)
    expect([answer.status, answer.body.code]).toEqual([400, 'invalid_request'])
  })

  it('is not reached by a redirect from an allowed target', async () => {
    const through = (to: string) => `${target.origin}/go?to=${encodeURIComponent(to)}`
    for (const path of ['/api/v1/admin/halt', '/demo/echo/../../api/v1/admin/halt']) {
      for (const host of ['127.0.0.1', 'localhost', '[::ffff:127.0.0.1]']) {
        const url = through(`http://${host}:${listed.port}${path}`)
        const { body } = await submit(listed, url, { payload: { body: { reason: 'x' } } })
        expect(body).toMatchObject({ status: 'failed', error_message: expect.stringContaining('redirect') })
      }
    }
    const allowed = await submit(listed, through(`${listed.origin}/demo/echo`), { payload: { body: {} } })
    expect(allowed.body).toMatchObject({ status: 'executed', result: { status: 200 } })
    expect((await get(listed, '/api/v1/admin/halt')).body.halted).toBe(false)
  })

  it('leaves other services on this machine alone', async () => {
    expect((await submit(listed, `${target.origin}/api/v1/admin/halt`)).body.status).toBe('executed')
  })
})
