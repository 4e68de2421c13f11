/** Input that is refused: the right problem document, nothing stored, nothing counted. By either way into the server. */
import { randomUUID } from 'node:crypto'
import { afterAll, afterEach, beforeAll, beforeEach, describe, expect, it } from 'vitest'
import { freshDatabase, type TestDatabase } from '../../../spillway/test/setup/database.js'
import {
  expectProblem,
  hashOf,
  openTables,
  petition,
  petitionSeries,
  petitionsPath,
  received,
  type Tables,
  transition,
  withdraw,
} from '../petition-calls.js'
import {
  type Answer,
  call,
  endAll,
  get,
  post,
  type ServerProcess,
  sample,
  startServer,
  until,
} from '../server-process.js'

let database: TestDatabase
let tables: Tables
let server: ServerProcess
/** One of each kind, made before anything is compared. */
let open: { id: string; submitter: string }
let final: { id: string; submitter: string }

const look = async () => ({ tables: await tables.all(), series: await petitionSeries(server) })

beforeAll(async () => {
  database = await freshDatabase()
  server = await startServer({
    DATABASE_URL: database.url,
    PETITION_REALMS: 'north,süd',
    PETITION_QUEUE_CACHE_TTL: '0.1',
  })
  tables = openTables(database.url)
  open = await received(server)
  final = await received(server)
  await transition(server, final.id, 'ESCALATED')
})

afterAll(async () => {
  await endAll()
  await tables.close()
  await database.drop()
})

/** Calls that are to leave no trace: what is stored and counted is the same behind them. */
function leavesNothing(): void {
  let before: Awaited<ReturnType<typeof look>>
  beforeEach(async () => {
    // The gauges follow the tables in the background; from here on they stand still.
    await until('the gauges have followed', async () => {
      const rows = await tables.query<{ state: string; n: string }>('SELECT state, n FROM petition_states')
      const series = await petitionSeries(server)
      return rows.every(({ state, n }) => sample(series, 'petition_queue_depth', { state }) === Number(n))
    })
    before = await look()
  })
  afterEach(async () => {
    expect(await look()).toEqual(before)
  })
}

/** The short path takes ordinary requests; one with a query or an Origin goes through the framework. */
const ways: [string, (body: unknown, headers?: Record<string, string>) => Promise<Answer>][] = [
  ['at once', (body, headers) => post(server, petitionsPath, body, headers)],
  ['through the framework', (body, headers) => post(server, `${petitionsPath}?way=other`, body, headers)],
  ['without /api', (body, headers) => post(server, '/v1/petition-submissions', body, headers)],
]

/** Two UTF-16 units each, one code point. */
const astral = '🜁'

describe.each(ways)('a submission %s', (_, send) => {
  describe('that is not valid', () => {
    leavesNothing()

    it.each<[string, string, Record<string, unknown>]>([
      ['empty text', '/text', { text: '' }],
      ['blank text', '/text', { text: ' \t\r\n ' }],
      ['text of spaces beyond ASCII', '/text', { text: '\u00a0\u2003\u3000' }],
      ['text of 10,001 characters', '/text', { text: 'x'.repeat(10_001) }],
      ['text of 10,001 characters beyond the basic plane', '/text', { text: astral.repeat(10_001) }],
      ['text that is no string', '/text', { text: 7 }],
      ['no text', '/text', { text: undefined }],
      ['an unknown type', '/type', { type: 'COMPLAINT' }],
      ['a type in small letters', '/type', { type: 'general' }],
      ['no type', '/type', { type: undefined }],
      ['a realm that is not in the list', '/realm', { realm: 'south' }],
      ['an empty realm', '/realm', { realm: '' }],
      ['a realm of 101 characters', '/realm', { realm: 'r'.repeat(101) }],
      ['a realm that is null', '/realm', { realm: null }],
      ['a submitter_id that is no UUID', '/submitter_id', { submitter_id: 'ann' }],
      ['a submitter_id one digit short', '/submitter_id', { submitter_id: randomUUID().slice(1) }],
      ['a submitter_id in braces', '/submitter_id', { submitter_id: `{${randomUUID()}}` }],
      ['an unknown member', '/state', { state: 'ACKNOWLEDGED' }],
      ['a NUL in its text', '/text', { text: 'a\0b' }],
      ['half a surrogate pair', '/text', { text: 'a\ud83d' }],
    ])('%s is 400 and says where', async (_name, path, members) => {
      const answer = await send(petition(members))
      expectProblem(answer, 400, 'invalid_request')
      expect(answer.body.errors.map((error) => error.path)).toContain(path)
      for (const error of answer.body.errors) expect(error.message).toMatch(/./)
    })

    it.each([
      ['no JSON', '{"type":'],
      ['a list', '[]'],
      ['null', 'null'],
      ['a text', '"GENERAL"'],
      ['__proto__', '{"type":"GENERAL","text":"a","__proto__":{}}'],
      ['nesting', `{"type":"GENERAL","text":${'['.repeat(65)}${']'.repeat(65)}}`],
    ])('%s is 400', async (_name, body) => {
      expectProblem(await send(body), 400, 'invalid_request')
    })

    it('several faults are reported together', async () => {
      const { body } = await send({ type: 'NONE', text: '', colour: 'red' })
      expect(body.errors.map((error) => error.path).sort()).toEqual(['/colour', '/text', '/type'])
    })

    it.each(['text/plain', 'application/x-www-form-urlencoded', 'application/xml'])('%s is 415', async (type) => {
      expectProblem(await send(JSON.stringify(petition()), { 'content-type': type }), 415, 'unsupported_media_type')
    })

    it('a body over 1 MiB is 413', async () => {
      expectProblem(await send(petition({ text: 'x'.repeat(1_048_577) })), 413, 'body_too_large')
    })

    it.each(['', 'k'.repeat(256)])('an Idempotency-Key of the wrong length is 400', async (key) => {
      expectProblem(await send(petition(), { 'idempotency-key': key }), 400, 'invalid_request')
    })
  })

  it.each([
    ['a letter', 'x'],
    ['a character beyond the basic plane', astral],
  ])('of exactly 10,000 times %s is taken', async (_name, character) => {
    const text = character.repeat(10_000)
    const answer = await send(petition({ text, realm: 'süd' }))
    expect(answer.status).toBe(201)
    expect(answer.body.content_hash).toBe(hashOf(text))
  })
})

describe('a petition', () => {
  leavesNothing()

  it.each<[string, (id: string) => string]>([
    ['no UUID', () => 'nonsense'],
    ['a blank', () => '%20'],
    ['one digit too long', (id) => `${id}0`],
    ['without its hyphens', (id) => id.replaceAll('-', '')],
    ['in braces', (id) => `%7B${id}%7D`],
    ['a piece of SQL', (id) => encodeURIComponent(`${id}' OR '1'='1`)],
  ])('is 404 by an id that is %s', async (_, made) => {
    const id = made(open.id)
    const at = `${petitionsPath}/${id}`
    expectProblem(await get(server, at), 404, 'not_found')
    expectProblem(await get(server, `${at}/status?version=1&wait=30`), 404, 'not_found')
    expectProblem(await transition(server, id, 'ESCALATED'), 404, 'not_found')
    expectProblem(await withdraw(server, id, open.submitter), 404, 'not_found')
  })

  it('that does not exist is 404 on every route', async () => {
    const at = `${petitionsPath}/${randomUUID()}`
    expectProblem(await get(server, at), 404, 'not_found')
    expectProblem(await get(server, `${at}/status`), 404, 'not_found')
    expectProblem(await post(server, `${at}/transitions`, { to: 'ESCALATED' }), 404, 'not_found')
    expectProblem(await post(server, `${at}/withdraw`, { requester_id: randomUUID() }), 404, 'not_found')
  })

  it('of another cannot be withdrawn: 403', async () => {
    expectProblem(await withdraw(server, open.id, final.submitter), 403, 'forbidden')
    expectProblem(await withdraw(server, open.id, '127.0.0.1'), 403, 'forbidden')
  })

  it('in a final state stays in it: 409', async () => {
    expectProblem(await transition(server, final.id, 'ACKNOWLEDGED'), 409, 'conflict')
    expectProblem(await withdraw(server, final.id, final.submitter), 409, 'conflict')
  })

  it.each<[string, unknown]>([
    ['no state', {}],
    ['an unknown state', { to: 'CLOSED' }],
    ['an unknown member', { to: 'ESCALATED', by: 'me' }],
    ['an empty reason', { to: 'ESCALATED', reason: '' }],
    ['a reason of 1,001 characters', { to: 'ESCALATED', reason: 'x'.repeat(1_001) }],
    ['a NUL in the reason', { to: 'ESCALATED', reason: 'a\0' }],
    ['no JSON', '{'],
  ])('is not moved by %s: 400', async (_, body) => {
    expectProblem(await post(server, `${petitionsPath}/${open.id}/transitions`, body), 400, 'invalid_request')
  })

  it.each<[string, unknown]>([
    ['nobody', {}],
    ['an empty name', { requester_id: '' }],
    ['a name of 256 characters', { requester_id: 'x'.repeat(256) }],
    ['an unknown member', { requester_id: 'x', force: true }],
  ])('is not withdrawn by %s: 400', async (_, body) => {
    expectProblem(await post(server, `${petitionsPath}/${open.id}/withdraw`, body), 400, 'invalid_request')
  })

  it('is not moved by a body of another media type: 415', async () => {
    const path = `${petitionsPath}/${open.id}/transitions`
    const headers = { 'content-type': 'text/plain' }
    expectProblem(await call(server, 'POST', path, { body: 'ESCALATED', headers }), 415, 'unsupported_media_type')
  })
})

describe('a cursor', () => {
  it.each<[string, () => Promise<string> | string]>([
    ['that is garbage', () => 'garbage'],
    ['that is not base64url', () => '%21%21'],
    ['with the right form and no id', () => Buffer.from('RECEIVED 7').toString('base64url')],
    ['with more than it should have', () => Buffer.from(`RECEIVED ${open.id} x`).toString('base64url')],
    ['of another state', () => firstCursor('ESCALATED')],
    ['of the ledger', async () => String((await get(server, '/api/v1/ledger?limit=1')).body.next_cursor)],
    ['of the operations', () => operationsCursor()],
  ])('%s is 400', async (_, made) => {
    const cursor = await made()
    expect(cursor).not.toMatch(/^(null|undefined|)$/)
    const answer = await get(server, `${petitionsPath}?state=RECEIVED&cursor=${cursor}`)
    expectProblem(answer, 400, 'invalid_request')
    expect(answer.body.errors.map((error) => error.path)).toEqual(['/cursor'])
  })

  /** Of a state that has more than one page. */
  async function firstCursor(state: string): Promise<string> {
    for (let n = 0; n < 2; n++) await transition(server, (await received(server)).id, state)
    return String((await get(server, `${petitionsPath}?state=${state}&limit=1`)).body.next_cursor)
  }

  async function operationsCursor(): Promise<string> {
    for (let n = 0; n < 2; n++) {
      await post(server, '/api/v1/operations', {
        ...{ type: 'http.request', queue: 'cursors', delay_seconds: 600 },
        payload: { url: `${server.origin}/demo/echo` },
      })
    }
    return String((await get(server, '/api/v1/operations?limit=1')).body.next_cursor)
  }
})

describe('the ledger', () => {
  it.each(['after=-1', 'after=x', 'after=1.5', 'limit=0', 'limit=201'])('refuses %s', async (query) => {
    expectProblem(await get(server, `/api/v1/ledger?${query}`), 400, 'invalid_request')
  })
})

it('no answer above was a fault of the server', () => {
  expect(server.logs().filter(({ level }) => level === 'error' || level === 'fatal')).toEqual([])
})
