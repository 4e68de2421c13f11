/**
 * The real program as a process of its own, and what a stranger needs to speak to it: a caller, a target for its calls,
 * and waiting for conditions. Nothing here knows the source: tests that use it see the wire and the logs only.
 */
import { type ChildProcess, spawn } from 'node:child_process'
import { once } from 'node:events'
import { existsSync } from 'node:fs'
import { createServer, type IncomingMessage, type ServerResponse } from 'node:http'
import type { AddressInfo } from 'node:net'
import { setTimeout as delay } from 'node:timers/promises'
import { fileURLToPath } from 'node:url'
import { inject } from 'vitest'

export type Env = Readonly<Record<string, string>>

export interface Ended {
  code: number | null
  signal: NodeJS.Signals | null
}

export interface ServerProcess {
  readonly origin: string
  readonly port: number
  readonly pid: number
  readonly ended: Promise<Ended>
  /** Everything written so far. */
  stdout(): string
  stderr(): string
  logs(): Record<string, unknown>[]
  /** SIGTERM, and the end that follows. */
  stop(): Promise<Ended>
  /** Resolves when the process is gone. */
  kill(): Promise<Ended>
}

export interface StartOptions {
  args?: readonly string[]
  /** A command that runs the program, e.g. `['unshare', '-m']`; its last argument is followed by node and ours. */
  wrap?: readonly string[]
  /** Another build of the program, e.g. of an earlier release. */
  program?: string
  /** Wait until it can accept work. Default true; false waits for its address only. */
  ready?: boolean
  /** Default 30 s. */
  timeoutMs?: number
}

export const program = fileURLToPath(new URL('../dist/cli/main.js', import.meta.url))
/** A machine that is short of CPU while it runs the tests must not read as pressure, which is refused with 503. */
const serveDefaults: Env = { SPILLWAY_PORT: '0', SPILLWAY_PRESSURE_LOOP_DELAY_MS: '60000' }
const living = new Set<ChildProcess>()

process.once('exit', () => {
  for (const child of living) child.kill('SIGKILL')
})

/** With SPILLWAY_TEST_POOLER: the run's database through its pooler. */
function byWayOfPooler({ DATABASE_URL }: Env): Env {
  const port = inject('poolerPort')
  if (port === 0 || DATABASE_URL === undefined || !URL.canParse(DATABASE_URL)) return {}
  const url = new URL(DATABASE_URL)
  if (url.host !== new URL(inject('databaseUrl')).host) return {}
  url.port = String(port)
  return { DATABASE_URL: url.href }
}

function launch(env: Env, options: StartOptions) {
  const main = options.program ?? program
  if (!existsSync(main)) throw new Error('The program is not built: run `npm run build` first.')
  const [command = '', ...args] = [...(options.wrap ?? []), process.execPath, main, ...(options.args ?? ['serve'])]
  const { PATH = '', HOME = '/' } = process.env
  const child = spawn(command, args, {
    // Nothing of ours leaks in: an unknown SPILLWAY_ name would stop the start.
    env: { PATH, HOME, ...(options.args === undefined && serveDefaults), ...env, ...byWayOfPooler(env) },
    stdio: ['ignore', 'pipe', 'pipe'],
  })
  living.add(child)
  const written = { stdout: '', stderr: '' }
  const changed = new Set<() => void>()
  for (const name of ['stdout', 'stderr'] as const) {
    child[name].setEncoding('utf8').on('data', (chunk: string) => {
      written[name] += chunk
      for (const look of changed) look()
    })
  }
  const ended = new Promise<Ended>((resolve, reject) => {
    child.once('error', reject)
    // `close`, not `exit`: what it wrote last is to be seen.
    child.once('close', (code, signal) => {
      living.delete(child)
      resolve({ code, signal })
    })
  })
  return { child, written, changed, ended }
}

/** Starts the program and waits until it says where it listens. */
export async function startServer(env: Env, options: StartOptions = {}): Promise<ServerProcess> {
  const { child, written, changed, ended } = launch(env, options)
  const origin = await new Promise<string>((resolve, reject) => {
    const timer = setTimeout(() => fail('did not say where it listens in time'), options.timeoutMs ?? 30_000)
    const fail = (why: string): void => {
      clearTimeout(timer)
      child.kill('SIGKILL')
      reject(new Error(`The server ${why}.\n${written.stderr}\n${written.stdout}`))
    }
    const look = (): void => {
      const found = /listens on (http:\/\/\S+)/.exec(written.stderr)?.[1]
      if (found === undefined) return
      clearTimeout(timer)
      changed.delete(look)
      resolve(found)
    }
    changed.add(look)
    void ended.then(({ code, signal }) => fail(`ended with ${code ?? signal}`), reject)
  })
  const kill = (signal: NodeJS.Signals): Promise<Ended> => {
    child.kill(signal)
    return ended
  }
  if (options.ready !== false) await untilReady({ origin })
  // It is ready without a broker; a test that names one wants it.
  if (options.ready !== false && env.NATS_URL !== undefined) {
    await until('the broker is there', async () => (await get({ origin }, '/health')).body.checks.nats?.ok)
  }
  return {
    origin,
    port: Number(new URL(origin).port),
    pid: child.pid ?? 0,
    ended,
    stdout: () => written.stdout,
    stderr: () => written.stderr,
    logs: () => parseLines(written.stdout),
    stop: () => kill('SIGTERM'),
    kill: () => kill('SIGKILL'),
  }
}

function parseLines(text: string): Record<string, unknown>[] {
  const whole = text.slice(0, text.lastIndexOf('\n') + 1)
  return whole.split('\n').flatMap((line) => (line === '' ? [] : [JSON.parse(line) as Record<string, unknown>]))
}

/** Runs the program to its end. */
export async function runProgram(env: Env, options: StartOptions = {}) {
  const { child, written, ended } = launch(env, options)
  const timer = setTimeout(() => child.kill('SIGKILL'), options.timeoutMs ?? 30_000)
  const end = await ended
  clearTimeout(timer)
  return { ...end, ...written }
}

/** For afterEach: ends whatever a failed test left. */
export async function endAll(): Promise<void> {
  await Promise.all(
    [...living].map(async (child) => {
      child.kill('SIGKILL')
      if (child.exitCode === null && child.signalCode === null) await once(child, 'exit')
    }),
  )
}

/** Polls a condition: what is waited for has no signal of its own on the wire. */
export async function until<T>(
  what: string,
  look: () => T | undefined | null | false | Promise<T | undefined | null | false>,
  ms = 15_000,
): Promise<T> {
  const deadline = performance.now() + ms
  for (;;) {
    const found = await look()
    if (found !== undefined && found !== null && found !== false) return found
    if (performance.now() > deadline) throw new Error(`Timed out after ${ms} ms: ${what}`)
    await delay(15)
  }
}

/** Every member that an answer may have; which ones it must have, the assertions say. */
export interface Body {
  id: string
  status: string | number
  code: string
  type: string
  title: string
  detail: string
  instance: string
  trace_id: string
  retry_after_seconds: number
  errors: { path: string; message: string }[]
  failing: string[]
  checks: Record<string, { ok: boolean; detail?: string }>
  operationId: string
  operation_type: string
  queuePosition: number
  estimatedWaitSeconds: number
  estimatedWait: string
  reason: string
  result: { status: number; headers: Record<string, string>; body: unknown; truncated?: boolean }
  error_message: string
  created_at: string
  processing_started_at: string
  processed_at: string
  attempt: number
  retry_count: number
  latency_seconds: number
  items: Body[]
  next_cursor: string | null
  moved: number
  skipped: number
  purged: number
  stats: { operation_type: string; priority: number; status: string; count: number; avg_latency_seconds: number }[]
  systemHealth: Record<string, number>
  openapi: string
  paths: Record<string, Record<string, unknown>>
  [member: string]: unknown
}

export interface Answer {
  status: number
  headers: Headers
  text: string
  /** Empty when the answer is no JSON. */
  body: Body
  ms: number
}

export interface CallOptions {
  headers?: Record<string, string>
  /** A value is sent as JSON; a string as it is. */
  body?: unknown
  timeoutMs?: number
}

export async function call(
  server: { origin: string },
  method: string,
  path: string,
  options: CallOptions = {},
): Promise<Answer> {
  const { headers = {}, body } = options
  const began = performance.now()
  const answer = await fetch(`${server.origin}${path}`, {
    method,
    redirect: 'manual',
    headers: { ...(body !== undefined && { 'content-type': 'application/json' }), ...headers },
    ...(body !== undefined && { body: typeof body === 'string' ? body : JSON.stringify(body) }),
    signal: AbortSignal.timeout(options.timeoutMs ?? 20_000),
  })
  const text = await answer.text()
  const json = answer.headers.get('content-type')?.includes('json') === true && text !== ''
  return {
    status: answer.status,
    headers: answer.headers,
    text,
    body: (json ? JSON.parse(text) : {}) as Body,
    ms: performance.now() - began,
  }
}

export const get = (server: { origin: string }, path: string, headers: Record<string, string> = {}) =>
  call(server, 'GET', path, { headers })
export const post = (server: { origin: string }, path: string, body?: unknown, headers: Record<string, string> = {}) =>
  call(server, 'POST', path, { headers, ...(body !== undefined && { body }) })

export const untilReady = (server: { origin: string }, ms = 30_000) =>
  until('the server is ready', async () => (await get(server, '/health/ready')).status === 200, ms)

export interface Order {
  queue?: unknown
  partition?: unknown
  [member: string]: unknown
}

/** Hands over an `http.request`. */
export function submit(
  server: { origin: string },
  url: string,
  order: Order = {},
  headers: Record<string, string> = {},
) {
  const { payload, ...rest } = order
  const body = { type: 'http.request', queue: 'q', ...rest, payload: { url, ...(payload as object | undefined) } }
  return post(server, '/api/v1/operations', body, headers)
}

export async function operation(server: { origin: string }, id: string, headers: Record<string, string> = {}) {
  return (await get(server, `/api/v1/operations/${id}`, headers)).body
}

export const finishes = (server: { origin: string }, id: string, ms = 20_000) =>
  until(
    `operation ${id} is finished`,
    async () => {
      const seen = (await get(server, `/api/v1/operations/${id}?wait=1`)).body
      return ['completed', 'failed', 'cancelled'].includes(String(seen.status)) && seen
    },
    ms,
  )

const atOnce = 20

/** `count` calls, some at a time: one after the other they mostly wait for the way there and back. */
export async function inBatches<T>(count: number, work: (n: number) => Promise<T>): Promise<T[]> {
  const all: T[] = []
  for (let from = 0; from < count; from += atOnce) {
    const batch = Array.from({ length: Math.min(atOnce, count - from) }, (_, n) => work(from + n))
    all.push(...(await Promise.all(batch)))
  }
  return all
}

export const allFinish = (server: { origin: string }, ids: readonly string[], ms?: number) =>
  inBatches(ids.length, (n) => finishes(server, ids[n] ?? '', ms))

export interface Call {
  path: string
  method: string
  headers: IncomingMessage['headers']
  body: string
  at: number
}

export interface Target {
  readonly origin: string
  /** In the order in which they came. */
  readonly calls: Call[]
  close(): Promise<void>
}

export type Handle = (call: Call, response: ServerResponse) => void | Promise<void>

const agree: Handle = (_, response) => {
  response.writeHead(200, { 'content-type': 'application/json' }).end('{"ok":true}')
}

/** A service that the server calls. */
export async function startTarget(handle: Handle = agree): Promise<Target> {
  const calls: Call[] = []
  const server = createServer((request, response) => {
    let body = ''
    request.setEncoding('utf8').on('data', (chunk: string) => {
      body += chunk
    })
    request.on('end', () => {
      const { url: path = '', method = '', headers } = request
      const received: Call = { path, method, headers, body, at: performance.now() }
      calls.push(received)
      void handle(received, response)
    })
  })
  server.listen(0, '127.0.0.1')
  await once(server, 'listening')
  const { port } = server.address() as AddressInfo
  return {
    origin: `http://127.0.0.1:${port}`,
    calls,
    close: async () => {
      server.closeAllConnections()
      server.close()
      await once(server, 'close')
    },
  }
}

/** A gate that a target's handler waits at until the test opens it. */
export function latch(): { readonly opened: Promise<void>; open(): void } {
  let open: () => void = () => undefined
  const opened = new Promise<void>((resolve) => {
    open = resolve
  })
  return { opened, open }
}

/** The value of one series, or undefined when it is not there. Labels in any order. */
export function sample(metrics: string, name: string, labels: Record<string, string> = {}): number | undefined {
  for (const line of metrics.split('\n')) {
    const parsed = /^([\w:]+)(?:\{(.*)\})? (\S+)/.exec(line)
    if (parsed?.[1] !== name) continue
    const found = Object.fromEntries([...(parsed[2] ?? '').matchAll(/(\w+)="([^"]*)"/g)].map((m) => [m[1], m[2]]))
    if (Object.entries(labels).every(([label, value]) => found[label] === value)) return Number(parsed[3])
  }
  return undefined
}
