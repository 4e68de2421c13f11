/** The parts of docs/guides/frameworks/fetch.md that Node does not start by itself: Next's route handlers, Bun and Deno. */
import { freePort } from '@spillway/embedded-postgres/internal'
import { afterAll, beforeAll, describe, expect, it } from 'vitest'
import { freshDatabase, type TestDatabase } from '../../../spillway/test/setup/database.js'
import { findRuntime, type RuntimeName } from '../../../spillway/test/setup/javascript-runtimes.js'
import { blocksOf } from '../docs-page.js'
import { fileOf, makeFolder, startProgram, writeFiles } from '../docs-programs.js'

const blocks = await blocksOf('frameworks/fetch.md')

let folder: Awaited<ReturnType<typeof makeFolder>>
let database: TestDatabase
let port: number

beforeAll(async () => {
  folder = await makeFolder()
  database = await freshDatabase()
  port = await freePort()
  await writeFiles(folder.path, blocks, port)
})
afterAll(async () => {
  await folder.remove()
  await database.drop()
})

it('shows files that are all run, here or by docs-library.test.ts', () => {
  expect(blocks.flatMap((block) => fileOf(block) ?? [])).toEqual([
    'app.mjs',
    'intake.js',
    'app/orders/route.js',
    'app/api/v1/[...path]/route.js',
    'deno-or-bun.mjs',
  ])
})

it('the route handlers answer as Next calls them', async () => {
  process.env.DATABASE_URL = database.url
  const { intake } = await import(`${folder.path}/intake.js`)
  try {
    const orders = await import(`${folder.path}/app/orders/route.js`)
    const tickets = await import(`${folder.path}/app/api/v1/[...path]/route.js`)
    const headers = { 'content-type': 'application/json', 'x-customer': 'ann', prefer: 'respond-async' }
    const request = new Request('http://shop/orders', { method: 'POST', headers, body: '{"item":"tea"}' })
    const queued: Response = await orders.POST(request, { params: Promise.resolve({}) })
    expect(queued.status).toBe(202)
    const { pathname } = new URL(queued.headers.get('location') ?? '', 'http://shop')
    const read = async (customer: string): Promise<unknown> => {
      const asked = new Request(`http://shop${pathname}?wait=20`, { headers: { 'x-customer': customer } })
      const path = pathname.split('/').slice(3)
      return (await tickets.GET(asked, { params: Promise.resolve({ path }) })).json()
    }
    expect(await read('ann')).toMatchObject({ status: 'completed', result: { shipped: 'tea' } })
    expect(await read('bob')).toMatchObject({ code: 'not_found' })
    expect(Object.keys(tickets).sort()).toEqual(['DELETE', 'GET', 'POST'])
  } finally {
    delete process.env.DATABASE_URL
    await intake.close()
  }
})

const runtimes: readonly [RuntimeName, string[]][] = [
  ['bun', ['run', 'deno-or-bun.mjs']],
  ['deno', ['run', '--allow-all', '--no-lock', 'deno-or-bun.mjs']],
]

describe.each(runtimes)('%s', (runtime, args) => {
  // The first run unpacks the runtime.
  it('runs an order, and gives its ticket to the address that placed it', { timeout: 120_000 }, async ({ skip }) => {
    const found = await findRuntime(runtime)
    if ('missing' in found) return skip(found.missing)
    const command = [found.program, ...args] as const
    const program = await startProgram(folder.path, { command, port, env: { DATABASE_URL: database.url } })
    try {
      const headers = { 'content-type': 'application/json' }
      const placed = await fetch(`http://127.0.0.1:${port}/orders`, { method: 'POST', headers, body: '{"item":"tea"}' })
      expect(placed.status, program.written()).toBe(201)
      const { operationId } = (await placed.json()) as { operationId: string }
      const ticket = await fetch(`http://127.0.0.1:${port}/api/v1/operations/${operationId}`)
      expect(await ticket.json()).toMatchObject({ status: 'completed', result: { shipped: 'tea' } })
    } finally {
      await program.stop()
    }
  })
})
