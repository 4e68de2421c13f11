/** The fetch binding on Bun and Deno themselves: real processes, with what their servers pass to a handler. */
import { type ChildProcess, spawn } from 'node:child_process'
import { once } from 'node:events'
import { createInterface } from 'node:readline'
import { fileURLToPath } from 'node:url'
import { afterAll, beforeAll, describe, expect, it } from 'vitest'
import { chunked, eventsOf, json } from '../bindings-fixture.js'
import { freshDatabase, type TestDatabase } from '../setup/database.js'
import { findRuntime, type RuntimeName } from '../setup/javascript-runtimes.js'

const program = fileURLToPath(new URL('../bindings-runtime-process.mjs', import.meta.url))
const runtimes: readonly [RuntimeName, string[]][] = [
  ['bun', ['run', program]],
  ['deno', ['run', '--allow-all', '--no-lock', program]],
]

describe.each(runtimes)('%s', async (runtime, commandLine) => {
  const found = await findRuntime(runtime)
  let database: TestDatabase
  let child: ChildProcess
  let origin = ''
  beforeAll(async () => {
    if ('missing' in found) return
    database = await freshDatabase()
    child = spawn(found.program, commandLine, {
      env: { ...process.env, DATABASE_URL: database.url },
      stdio: ['ignore', 'pipe', 'inherit'],
    })
    for await (const line of createInterface({ input: child.stdout as NodeJS.ReadableStream })) {
      origin = `http://127.0.0.1:${line.slice('port '.length)}`
      break
    }
  })
  afterAll(async () => {
    if ('missing' in found) return
    const exited = once(child, 'exit')
    child.kill()
    await exited
    await database.drop()
  })
  const call = (path: string, init?: RequestInit) => fetch(origin + path, init)
  const bodyOf = async (response: Response) => (await response.json()) as Record<string, unknown>

  it('runs an order for the address that the runtime knows', async ({ skip }) => {
    if ('missing' in found) return skip(found.missing)
    const done = await call('/orders', json({ item: 'tea' }))
    expect(done.status).toBe(201)
    expect(await bodyOf(done)).toMatchObject({
      result: { shipped: 'tea', identity: expect.stringMatching(/127\.0\.0\.1$/) },
    })
    expect(done.headers.get('x-ratelimit-limit')).toBe('20')
    expect((await call('/orders', chunked('{"item":"tea"}'))).status).toBe(201)
    expect((await call('/orders', json({ item: 1 }))).status).toBe(400)
    expect((await call('/orders', json('a=b', { 'content-type': 'text/plain' }))).status).toBe(415)
    expect((await call('/orders', json({ item: 'x'.repeat(1_100_000) }))).status).toBe(413)
    expect((await call('/orders')).status).toBe(405)
    const key = { 'idempotency-key': 'k' }
    await call('/orders', json({ item: 'milk' }, key))
    expect((await call('/orders', json({ item: 'milk' }, key))).headers.get('idempotent-replayed')).toBe('true')
    expect((await call('/orders', json({ item: 'tea' }, key))).status).toBe(422)
  })

  it('follows a ticket to its end, and survives a client that leaves', async ({ skip }) => {
    if ('missing' in found) return skip(found.missing)
    const queued = await call('/orders', json({ item: 'held' }, { prefer: 'respond-async' }))
    expect(queued.status).toBe(202)
    const ticket = queued.headers.get('location') ?? ''
    const leaving = new AbortController()
    const left = await call(`${ticket}/stream`, { signal: leaving.signal })
    expect((await eventsOf(left).next()).value).toMatchObject({ event: 'status' })
    leaving.abort()
    const followed = await call(`${ticket}/stream`)
    const seen: unknown[] = []
    for await (const { data } of eventsOf(followed)) {
      if (seen.length === 0) await call('/release')
      seen.push(data.status)
    }
    expect(seen.at(-1)).toBe('completed')
    expect(await bodyOf(await call(ticket))).toMatchObject({ status: 'completed', result: { shipped: 'held' } })
    expect((await call('/api/v1/operations?limit=1')).status).toBe(200)
    expect((await call('/api/v1/lanes/pause', json({ queue: 'orders' }))).status).toBe(403)
  })
})
