import { connect, type Socket } from 'node:net'
import { pino } from 'pino'
import Type from 'typebox'
import { type App, type AppDeps, buildApp } from '../src/app.js'
import { createAuthenticator } from '../src/auth/auth.js'
import { addDemoEcho } from '../src/demo/echo.js'
import { addHealth, type CheckState } from '../src/health.js'
import { addLanding } from '../src/landing.js'
import { addOpenApi } from '../src/openapi.js'

export interface Listening {
  app: App
  origin: string
  port: number
  /** Lines that were logged, parsed. */
  logged: Record<string, unknown>[]
  checks: { store: CheckState; nats: CheckState }
  close(): Promise<void>
}

const Item = Type.Object({
  name: Type.String({ minLength: 1, maxLength: 255 }),
  count: Type.Optional(Type.Integer({ minimum: 1, maximum: 10 })),
  extra: Type.Optional(Type.Unknown()),
})

function addTestRoutes(app: App): void {
  app.post('/items', { schema: { body: Item }, config: { role: 'submit' } }, async (request) => ({
    received: request.body,
    identity: request.principal.identity,
    trace: request.trace,
    clientAddress: request.clientAddress,
  }))
  app.post('/anything', async (request) => ({ body: request.body === undefined ? 'none' : request.body }))
  app.delete('/items/:id', async (request) => ({ body: request.body === undefined ? 'none' : request.body }))
  app.get('/items/:id', async (request) => ({ params: request.params }))
  app.get(
    '/search',
    { schema: { querystring: Type.Object({ limit: Type.Optional(Type.Integer({ minimum: 1, maximum: 200 })) }) } },
    async (request) => ({ query: request.query }),
  )
  app.get('/large', async () => 'x'.repeat(24 * 1_048_576))
  app.get('/operate', { config: { role: 'operate' } }, async () => ({ ok: true }))
  app.get('/consume', { config: { role: 'consume' } }, async () => ({ ok: true }))
  app.get('/broken', async () => {
    throw new Error('secret: password=hunter2 in SELECT * FROM users')
  })
  app.get('/broken-oddly', async () => {
    throw 'just a text'
  })
}

/** A real server with everything of the HTTP layer and a few routes of the test's own. */
export async function listening(overrides: Partial<AppDeps> & { protectMetrics?: boolean } = {}): Promise<Listening> {
  const { protectMetrics = false, ...deps } = overrides
  const logged: Record<string, unknown>[] = []
  const log = pino({ level: 'debug' }, { write: (line: string) => logged.push(JSON.parse(line)) })
  const checks: Listening['checks'] = { store: { ok: true }, nats: { ok: true, optional: true } }
  const { app, readBody } = buildApp({
    log,
    authenticator: createAuthenticator({ onFault: (err) => log.error({ err }) }),
    bodyLimitBytes: 1_048_576,
    requestTimeoutMs: 30_000,
    headersTimeoutMs: 10_000,
    connectionsMax: 1_000,
    corsOrigins: [],
    ...deps,
  })
  addOpenApi(app, '0.0.0-test')
  addHealth(app, {
    version: '0.0.0-test',
    checks: { store: () => checks.store, nats: () => checks.nats },
    metrics: { contentType: 'text/plain; version=0.0.4', render: () => '# HELP up\nup 1\n' },
    protectMetrics,
  })
  addLanding(app, '0.0.0-test')
  addDemoEcho(app, readBody)
  addTestRoutes(app)
  const origin = await app.listen({ host: '127.0.0.1', port: 0 })
  return { app, origin, port: Number(new URL(origin).port), logged, checks, close: () => app.close() }
}

export interface RawAnswer {
  text: string
  status: number
  headers: Record<string, string>
  body: string
}

export interface RawConnection {
  socket: Socket
  /** Everything the server sent until it closed. */
  ended: Promise<RawAnswer>
}

function parseAnswer(text: string): RawAnswer {
  const [head = '', ...rest] = text.split('\r\n\r\n')
  const [statusLine = '', ...lines] = head.split('\r\n')
  const headers = Object.fromEntries(
    lines.map((line) => {
      const colon = line.indexOf(':')
      return [line.slice(0, colon).toLowerCase(), line.slice(colon + 1).trim()]
    }),
  )
  return { text, status: Number(statusLine.split(' ')[1]), headers, body: rest.join('\r\n\r\n') }
}

/** Bytes as a hostile or clumsy client sends them. */
export function rawConnection(port: number, allowHalfOpen = false): RawConnection {
  const socket = connect({ host: '127.0.0.1', port, allowHalfOpen })
  const chunks: Buffer[] = []
  const ended = new Promise<RawAnswer>((resolve) => {
    socket.on('data', (chunk: Buffer) => chunks.push(chunk))
    // A reset after the answer is as good an end as any: what was received counts.
    socket.on('error', () => socket.destroy())
    socket.on('close', () => resolve(parseAnswer(Buffer.concat(chunks).toString())))
    socket.on('end', () => socket.end())
  })
  return { socket, ended }
}

export async function rawExchange(port: number, bytes: string | Buffer): Promise<RawAnswer> {
  const { socket, ended } = rawConnection(port)
  socket.write(bytes)
  return ended
}
