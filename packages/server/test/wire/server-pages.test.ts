/** No list is unbounded: long payloads are left out, a page ends at its bytes, and pages lead through to the end. */
import { afterAll, afterEach, beforeAll, describe, expect, it } from 'vitest'
import { freshDatabase, type TestDatabase } from '../../../spillway/test/setup/database.js'
import {
  type Answer,
  type Body,
  call,
  endAll,
  finishes,
  get,
  post,
  type ServerProcess,
  startServer,
  startTarget,
  submit,
  type Target,
} from '../server-process.js'

const listedBytes = 4_096
const pageBytes = 4_194_304
const smallPage = 65_536
/** What stands around the items. */
const envelope = 1_024

let database: TestDatabase
let server: ServerProcess
/** On the same database, with the smallest pages that can be set. */
let small: ServerProcess
let target: Target
let isBroken = true

beforeAll(async () => {
  database = await freshDatabase()
  target = await startTarget(({ path, body }, response) => {
    if (path.startsWith('/broken') && isBroken) response.writeHead(400).end('no')
    else if (path.startsWith('/long')) response.writeHead(200).end('r'.repeat(60_000))
    else response.writeHead(200).end(String(body.length))
  })
  const env = {
    ...{ DATABASE_URL: database.url, SPILLWAY_FORWARD_ALLOW: target.origin, PETITION_RATE_LIMIT_PER_HOUR: '100000' },
  }
  ;[server, small] = await Promise.all([
    startServer(env),
    startServer({ ...env, SPILLWAY_PAGE_BYTES_MAX: String(smallPage) }),
  ])
})
afterEach(() => {
  isBroken = true
})
afterAll(async () => {
  await endAll()
  await target.close()
  await database.drop()
})

async function die(queue: string, body: unknown): Promise<string> {
  const answer = await submit(server, `${target.origin}/broken`, { queue, payload: { body } })
  expect(answer.body.status, answer.text).toBe('failed')
  return answer.body.operationId
}

/** Every page of a list, by its cursor. */
async function pagesOf(from: ServerProcess, path: string, name = 'cursor'): Promise<Answer[]> {
  const pages: Answer[] = []
  for (let cursor: string | null = ''; cursor !== null; ) {
    const page = await get(from, `${path}${cursor === '' ? '' : `&${name}=${encodeURIComponent(cursor)}`}`)
    expect(page.status, page.text).toBe(200)
    expect(page.body.items.length).toBeGreaterThan(0)
    pages.push(page)
    cursor = page.body.next_cursor
  }
  return pages
}

const idsOf = (pages: readonly Answer[], member = 'id'): unknown[] =>
  pages.flatMap(({ body }) => body.items.map((item) => item[member]))

function expectBounded(pages: readonly Answer[], bytesMax: number): void {
  for (const { text } of pages) expect(Buffer.byteLength(text)).toBeLessThanOrEqual(bytesMax + envelope)
}

describe('dead letters', () => {
  it('of a megabyte each are listed without their payloads; a single one is complete, and is redriven completely', async () => {
    const body = 'x'.repeat(1_000_000)
    const ids: string[] = []
    for (let n = 0; n < 12; n++) ids.unshift(await die('large', body))
    const list = await get(server, '/api/v1/dead-letters?queue=large&limit=200')
    expect(Buffer.byteLength(list.text)).toBeLessThan(pageBytes + envelope)
    expect(list.body.items.map(({ id }) => id)).toEqual(ids)
    expect(list.body.next_cursor).toBeNull()
    for (const letter of list.body.items) {
      expect(letter).toMatchObject({ payload: null, payload_bytes: expect.any(Number), truncated: true })
      expect(letter.payload_bytes).toBeGreaterThan(1_000_000)
    }
    const [id = ''] = ids
    const { body: whole } = await get(server, `/api/v1/dead-letters/${id}`)
    expect(whole).toMatchObject({ id, queue: 'large', status: 'failed', payload: { payload: { body } } })
    expect(whole).not.toHaveProperty('truncated')
    expect(Buffer.byteLength(JSON.stringify(whole.payload))).toBe(list.body.items[0]?.payload_bytes)

    isBroken = false
    expect((await post(server, '/api/v1/dead-letters/redrive', { ids: [id] })).body).toEqual({ moved: 1, skipped: 0 })
    expect((await finishes(server, id)).result.body).toBe(String(JSON.stringify(body).length))
    expect((await get(server, `/api/v1/dead-letters/${id}`)).status).toBe(404)
  })

  it.each(['not-a-uuid', '00000000-0000-0000-0000-000000000000'])('%s is none', async (id) => {
    expect(await get(server, `/api/v1/dead-letters/${id}`)).toMatchObject({ status: 404, body: { code: 'not_found' } })
  })

  it('of others look like none', async () => {
    const id = await die('foreign', 'x')
    const other = { 'x-user-id': 'somebody' }
    expect((await get(server, `/api/v1/dead-letters/${id}`, other)).status).toBe(404)
    const own = await submit(server, `${target.origin}/broken`, { queue: 'foreign', payload: {} }, other)
    expect((await get(server, `/api/v1/dead-letters/${own.body.operationId}`, other)).status).toBe(200)
  })

  it.each(['x', 'ä', '😀'])('are listed completely up to 4,096 bytes (of %s), and not beyond', async (letter) => {
    const queue = `edge ${letter}`
    const empty = { type: 'http.request', queue, payload: { url: `${target.origin}/broken`, body: '' } }
    const frame = Buffer.byteLength(JSON.stringify(empty))
    const room = listedBytes - frame
    const filled = letter.repeat(Math.floor(room / Buffer.byteLength(letter)))
    const fits = filled + 'x'.repeat(room - Buffer.byteLength(filled))
    await die(queue, fits)
    await die(queue, `${fits}y`)
    const { items } = (await get(server, `/api/v1/dead-letters?queue=${encodeURIComponent(queue)}`)).body
    expect(items).toMatchObject([
      { payload: null, payload_bytes: 4_097, truncated: true },
      { payload: { payload: { body: fits } } },
    ])
    expect(items[1]).not.toHaveProperty('payload_bytes')
    expect(items[1]).not.toHaveProperty('truncated')
  })

  it('fill pages up to their bytes, and the pages lead through all of them', async () => {
    const ids: string[] = []
    for (let n = 0; n < 40; n++) ids.unshift(await die('pages', 'x'.repeat(3_000 + n)))
    const path = '/api/v1/dead-letters?queue=pages&limit=200'
    const pages = await pagesOf(small, path)
    expect(idsOf(pages)).toEqual(ids)
    expect(pages.length).toBeGreaterThan(2)
    expectBounded(pages, smallPage)
    // The next item would not have fitted: no page is shorter than it has to be.
    for (const [i, page] of pages.slice(0, -1).entries()) {
      const next = pages[i + 1]?.body.items[0]
      const more = Buffer.byteLength(JSON.stringify(page.body.items)) - 2 + 1 + Buffer.byteLength(JSON.stringify(next))
      expect(more).toBeGreaterThan(smallPage)
    }
    expect((await get(server, path)).body.items).toHaveLength(40)
    expect(idsOf(await pagesOf(small, `${path.replace('200', '7')}`))).toEqual(ids)
  })
})

describe('operations', () => {
  it('with long results are listed without them; a single one has it', async () => {
    const { body } = await submit(server, `${target.origin}/long`, { queue: 'results' })
    expect(body.status).toBe('executed')
    await submit(server, `${target.origin}/short`, { queue: 'results' })
    const { items } = (await get(server, '/api/v1/operations?queue=results')).body
    expect(items).toMatchObject([
      { result: { status: 200 } },
      { id: body.operationId, result: null, result_bytes: expect.any(Number), truncated: true },
    ])
    expect(items[1]?.result_bytes).toBeGreaterThan(60_000)
    const whole = (await get(server, `/api/v1/operations/${body.operationId}`)).body
    expect(String(whole.result.body)).toHaveLength(60_000)
    expect(whole).not.toHaveProperty('truncated')
  })

  it('with long names fill pages up to their bytes', async () => {
    // Six bytes each on the wire.
    const partition = '\u0001'.repeat(255)
    const ids: string[] = []
    for (let n = 0; n < 60; n++) {
      const answer = await submit(server, `${target.origin}/short`, { queue: 'names', partition: partition.slice(n) })
      ids.unshift(answer.body.operationId)
    }
    const pages = await pagesOf(small, '/api/v1/operations?queue=names&limit=200')
    expect(idsOf(pages)).toEqual(ids)
    expect(pages.length).toBeGreaterThan(1)
    expectBounded(pages, smallPage)
  })
})

describe('other lists', () => {
  it('petitions and the ledger', async () => {
    const ids: unknown[] = []
    for (let n = 0; n < 12; n++) {
      const text = `${n} ${'ö'.repeat(9_990)}`
      const answer = await post(server, '/api/v1/petition-submissions', { type: 'GENERAL', text })
      expect(answer.status, answer.text).toBe(201)
      ids.push(answer.body.petition_id)
    }
    const pages = await pagesOf(small, '/api/v1/petition-submissions?state=RECEIVED&limit=200')
    expect(idsOf(pages, 'petition_id')).toEqual(ids)
    expect(pages.length).toBeGreaterThan(3)
    expectBounded(pages, smallPage)
    expect(String(pages[0]?.body.items[0]?.text)).toHaveLength(9_992)

    for (let n = 0; n < 12; n++) {
      const reason = '\u0001'.repeat(1_000)
      expect((await post(server, '/api/v1/admin/halt', { reason })).status).toBe(200)
      expect((await call(server, 'DELETE', '/api/v1/admin/halt')).status).toBe(200)
    }
    const ledger = await pagesOf(small, '/api/v1/ledger?limit=200', 'after')
    const seqs = idsOf(ledger, 'seq')
    expect(seqs).toEqual(seqs.map((_, i) => i + 1))
    expect(ledger.length).toBeGreaterThan(1)
    expectBounded(ledger, smallPage)
  })

  it('policies and blocks', async () => {
    const names: string[] = []
    for (let n = 10; n < 16; n++) {
      const name = `n${n}`
      names.push(name)
      const block = { type: name, version: '1.0.0', metadata: { text: 'm'.repeat(30_000) } }
      expect((await post(server, '/api/v1/registry/blocks', block)).status).toBe(201)
      const provider = { expected_latency_ms: 1, expected_cost: 1 }
      const providers = Array.from({ length: 90 }, (_, i) => ({ provider_id: `${i}${'p'.repeat(200)}`, ...provider }))
      const policy = await post(server, '/api/v1/policies', { policy_id: name, providers })
      expect(policy.status, policy.text).toBe(201)
    }
    for (const [path, member] of [
      ['/api/v1/registry/blocks', 'type'],
      ['/api/v1/policies', 'policy_id'],
    ] as const) {
      const pages = await pagesOf(small, `${path}?limit=200`)
      expect(idsOf(pages, member)).toEqual(names)
      expect(pages.length).toBeGreaterThan(2)
      expectBounded(pages, smallPage)
      expect((await get(server, `${path}?limit=200`)).body.items).toHaveLength(names.length)
    }
  })
})

it('the setting has a least value', async () => {
  const wrong = startServer({ DATABASE_URL: database.url, SPILLWAY_PAGE_BYTES_MAX: '65535' })
  await expect(wrong).rejects.toThrow(/SPILLWAY_PAGE_BYTES_MAX/)
})

it('the API description says what a list leaves out', async () => {
  const { body } = await get(server, '/openapi.json')
  const described = JSON.stringify((body.paths['/api/v1/dead-letters'] as Record<string, Body>).get)
  expect(described).toContain('payload_bytes')
  expect(body.paths).toHaveProperty('/api/v1/dead-letters/{id}')
})
