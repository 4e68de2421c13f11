/** Whose petition it is and who may do what with it: with API keys, and behind proxies without them. */
import { createHash, randomUUID } from 'node:crypto'
import { mkdtemp, rm, writeFile } from 'node:fs/promises'
import { tmpdir } from 'node:os'
import { join } from 'node:path'
import { afterAll, beforeAll, describe, expect, it } from 'vitest'
import { freshDatabase, type TestDatabase } from '../../../spillway/test/setup/database.js'
import {
  expectProblem,
  openTables,
  petition,
  petitionsPath,
  readPetition,
  submitPetition,
  type Tables,
} from '../petition-calls.js'
import { call, endAll, finishes, get, post, type ServerProcess, startServer } from '../server-process.js'

/** Subjects are UUIDs, one of them written in capitals, and names. */
const subjects = {
  ann: randomUUID(),
  bob: randomUUID(),
  cap: randomUUID().toUpperCase(),
  dora: 'dora@example.com',
  ops: 'ops',
  meter: 'meter',
}
type Who = keyof typeof subjects
const roles: Record<Who, string[]> = {
  ...{ ann: ['submit'], bob: ['submit', 'consume'], cap: ['submit'], dora: ['submit'] },
  ...{ ops: ['operate'], meter: ['metrics'] },
}
const keyOf = (who: Who): string => `key-of-${who}`
const as = (who: Who) => ({ authorization: `Bearer ${keyOf(who)}` })

let database: TestDatabase
let dir: string

beforeAll(async () => {
  database = await freshDatabase()
  dir = await mkdtemp(join(tmpdir(), 'spillway-petitions-'))
})

afterAll(async () => {
  await endAll()
  await database.drop()
  await rm(dir, { recursive: true, force: true })
})

describe('with API keys', () => {
  let server: ServerProcess
  let tables: Tables

  beforeAll(async () => {
    const file = join(dir, 'keys.json')
    const entries = (Object.keys(subjects) as Who[]).map((who) => [
      `sha256:${createHash('sha256').update(keyOf(who)).digest('hex')}`,
      { identity: subjects[who], roles: roles[who] },
    ])
    await writeFile(file, JSON.stringify(Object.fromEntries(entries)))
    server = await startServer({
      DATABASE_URL: database.url,
      SPILLWAY_API_KEYS: file,
      PETITION_RATE_LIMIT_PER_HOUR: '1000',
    })
    tables = openTables(database.url)
  })

  afterAll(() => tables.close())

  const submit = (who: Who, submitter?: string, headers: Record<string, string> = {}) =>
    submitPetition(server, { submitter_id: submitter }, { ...as(who), ...headers })
  const idOf = async (who: Who): Promise<string> => String((await submit(who)).body.petition_id)

  describe('submitting', () => {
    it.each<Who>(['ann', 'cap', 'dora', 'ops'])('makes the subject of %s the submitter', async (who) => {
      const { status, body } = await submit(who)
      expect(status).toBe(201)
      const found = await readPetition(server, String(body.petition_id), as('ops'))
      // A UUID has no case.
      expect(String(found.body.submitter_id).toLowerCase()).toBe(subjects[who].toLowerCase())
    })

    it('takes the own submitter_id, in any case of its letters', async () => {
      expect((await submit('ann', subjects.ann)).status).toBe(201)
      expect((await submit('ann', subjects.ann.toUpperCase())).status).toBe(201)
    })

    it.each<Who>(['ann', 'dora', 'ops'])('refuses another submitter_id from %s, storing nothing', async (who) => {
      const before = await tables.all()
      expectProblem(await submit(who, subjects.bob), 403, 'forbidden')
      expectProblem(await submit(who, randomUUID(), { origin: 'https://example.com' }), 403, 'forbidden')
      expectProblem(await submit(who, subjects.bob, { prefer: 'respond-async' }), 403, 'forbidden')
      expect(await tables.all()).toBe(before)
    })

    it('is not for X-User-ID to say who it is', async () => {
      const { body } = await submit('ann', undefined, { 'x-user-id': subjects.bob })
      expect((await readPetition(server, String(body.petition_id), as('ops'))).body.submitter_id).toBe(subjects.ann)
    })

    it('is 401 without a key and 403 without the role, before anything is said of the body', async () => {
      expectProblem(await post(server, petitionsPath, '{'), 401, 'unauthenticated')
      expectProblem(await post(server, petitionsPath, '{', as('meter')), 403, 'forbidden')
    })

    it('one subject is one submitter, however its own id is written', async () => {
      const first = await submit('cap')
      const left = Number(first.headers.get('x-ratelimit-remaining'))
      const named = await submit('cap', subjects.cap)
      expect(named.headers.get('x-ratelimit-remaining')).toBe(String(left - 1))
      const lower = await submit('cap', subjects.cap.toLowerCase())
      expect(lower.headers.get('x-ratelimit-remaining')).toBe(String(left - 2))
      for (const { body } of [first, named, lower]) {
        expect((await readPetition(server, String(body.petition_id), as('cap'))).status).toBe(200)
      }
    })

    it('one Idempotency-Key of two subjects makes two petitions', async () => {
      const key = { 'idempotency-key': randomUUID() }
      const [ann, bob] = [await submit('ann', undefined, key), await submit('bob', undefined, key)]
      expect(bob.status).toBe(201)
      expect(bob.body.petition_id).not.toBe(ann.body.petition_id)
    })

    it('gives a ticket that is the subject’s alone', async () => {
      const { status, body } = await submit('ann', undefined, { prefer: 'respond-async' })
      expect(status).toBe(202)
      expect((await get(server, `/api/v1/operations/${body.operationId}`, as('bob'))).status).toBe(404)
      expect((await get(server, `/api/v1/operations/${body.operationId}?wait=20`, as('ann'))).body.status).toBe(
        'completed',
      )
    })
  })

  describe('reading', () => {
    const reads = ['', '/status', '/status?version=1&wait=0']

    it.each<Who>(['ann', 'ops'])('is for the submitter and for operate: %s', async (who) => {
      const id = await idOf('ann')
      for (const read of reads) {
        expect([200, 304]).toContain((await get(server, `${petitionsPath}/${id}${read}`, as(who))).status)
      }
    })

    it.each<Who>(['bob', 'meter'])('is 404 for %s, as if it were not there', async (who) => {
      const id = await idOf('ann')
      for (const read of reads) {
        const hidden = await get(server, `${petitionsPath}/${id}${read}`, as(who))
        const absent = await get(server, `${petitionsPath}/${randomUUID()}${read}`, as(who))
        expectProblem(hidden, 404, 'not_found')
        expect(hidden.body.detail).toBe(absent.body.detail)
      }
    })

    it('is 401 without a key', async () => {
      expectProblem(await readPetition(server, await idOf('ann')), 401, 'unauthenticated')
    })
  })

  it.each<[string, string, unknown?]>([
    ['GET', petitionsPath],
    ['GET', '/v1/petition-submissions?state=RECEIVED'],
    ['POST', `${petitionsPath}/:id/transitions`, { to: 'ESCALATED' }],
    ['GET', '/api/v1/admin/halt'],
    ['POST', '/api/v1/admin/halt', { reason: 'drill' }],
    ['DELETE', '/api/v1/admin/halt'],
    ['GET', '/api/v1/ledger'],
    ['GET', '/api/v1/ledger/verify'],
  ])('%s %s needs operate', async (method, path, body) => {
    const id = await idOf('ann')
    const ask = (headers: Record<string, string>) =>
      call(server, method, path.replace(':id', id), { headers, ...(body !== undefined && { body }) })
    expectProblem(await ask({}), 401, 'unauthenticated')
    for (const who of ['ann', 'bob', 'meter'] as const) expectProblem(await ask(as(who)), 403, 'forbidden')
    expect((await ask(as('ops'))).status).toBe(200)
    await call(server, 'DELETE', '/api/v1/admin/halt', { headers: as('ops') })
  })

  it('an operator is named in the ledger by subject', async () => {
    const id = await idOf('ann')
    await post(server, `${petitionsPath}/${id}/transitions`, { to: 'ESCALATED' }, as('ops'))
    const [event] = await tables.query(`SELECT type, actor FROM ledger ORDER BY seq DESC LIMIT 1`)
    expect(event).toEqual({ type: 'petition.submission.escalated', actor: 'operator:ops' })
  })

  describe('withdrawing', () => {
    const withdraw = (id: string, who: Who, requester: string) =>
      post(server, `${petitionsPath}/${id}/withdraw`, { requester_id: requester }, as(who))

    it.each<Who>(['ann', 'cap', 'dora'])('is for %s, whose own it is', async (who) => {
      const taken = await withdraw(await idOf(who), who, subjects[who])
      expect(taken.status).toBe(200)
      expect(taken.body).toMatchObject({ state: 'ACKNOWLEDGED', fate_reason: 'WITHDRAWN' })
    })

    it('takes a subject that names itself in other letters', async () => {
      expect((await withdraw(await idOf('ann'), 'ann', subjects.ann.toUpperCase())).status).toBe(200)
      expect((await withdraw(await idOf('cap'), 'cap', subjects.cap.toLowerCase())).status).toBe(200)
    })

    it('is 403 in another’s name, also for operate', async () => {
      const id = await idOf('ann')
      const before = await tables.all()
      expectProblem(await withdraw(id, 'bob', subjects.ann), 403, 'forbidden')
      expectProblem(await withdraw(id, 'ops', subjects.ann), 403, 'forbidden')
      expect(await tables.all()).toBe(before)
    })

    it('of another’s petition in one’s own name is refused', async () => {
      const id = await idOf('ann')
      const before = await tables.all()
      expectProblem(await withdraw(id, 'bob', subjects.bob), 403, 'forbidden')
      expectProblem(await withdraw(id, 'ops', subjects.ops), 403, 'forbidden')
      expect(await tables.all()).toBe(before)
    })

    it('needs the role submit', async () => {
      expectProblem(await withdraw(await idOf('ann'), 'meter', subjects.meter), 403, 'forbidden')
    })
  })
})

describe('without authentication', () => {
  const env = () => ({ DATABASE_URL: database.url, PETITION_RATE_LIMIT_PER_HOUR: '1' })
  const anonymous = (on: ServerProcess, headers: Record<string, string> = {}) =>
    submitPetition(on, { submitter_id: undefined }, headers)
  const from = (...hops: string[]) => ({ 'x-forwarded-for': hops.join(', ') })

  it('an anonymous caller behind a trusted proxy is its own address', async () => {
    const server = await startServer({
      ...env(),
      SPILLWAY_DB_SCHEMA: 'proxied',
      SPILLWAY_TRUSTED_PROXIES: '127.0.0.0/8,10.0.0.0/8',
    })
    expect((await anonymous(server, from('203.0.113.9'))).status).toBe(201)
    const refused = await anonymous(server, from('203.0.113.9', '10.1.2.3'))
    expectProblem(refused, 429, 'rate_limited')
    expect(refused.body.actor).toBe('submitter:203.0.113.9')
    expect((await anonymous(server, from('203.0.113.10'))).status).toBe(201)
    // What stands left of the first hop that is not trusted was written by the caller.
    expectProblem(await anonymous(server, from('198.51.100.1', '203.0.113.10')), 429, 'rate_limited')
    const { body } = await get(server, `${petitionsPath}?state=RECEIVED`)
    expect(body.items.map((item) => item.submitter_id)).toEqual(['203.0.113.9', '203.0.113.10'])
  })

  it('X-Forwarded-For changes nothing where no proxy is trusted', async () => {
    const server = await startServer({ ...env(), SPILLWAY_DB_SCHEMA: 'direct' })
    expect((await anonymous(server, from('203.0.113.9'))).status).toBe(201)
    const refused = await anonymous(server, from('203.0.113.10'))
    expectProblem(refused, 429, 'rate_limited')
    expect(refused.body.actor).toBe('submitter:127.0.0.1')
  })

  it('X-User-ID names the submitter, submitter_id before it, and all may read all', async () => {
    const server = await startServer({ ...env(), SPILLWAY_DB_SCHEMA: 'named' })
    const named = await anonymous(server, { 'x-user-id': 'eve' })
    const found = await readPetition(server, String(named.body.petition_id), { 'x-user-id': 'mallory' })
    expect(found.body.submitter_id).toBe('eve')
    const body = petition()
    const other = await post(server, petitionsPath, body, { 'x-user-id': 'eve' })
    expect(other.status).toBe(201)
    expect((await readPetition(server, String(other.body.petition_id))).body.submitter_id).toBe(body.submitter_id)
    expect((await get(server, petitionsPath, { 'x-user-id': 'mallory' })).status).toBe(200)
  })

  it('a queued petition is its submitter’s, not the worker’s', async () => {
    const server = await startServer({ ...env(), SPILLWAY_DB_SCHEMA: 'queued' })
    const { body } = await anonymous(server, { 'x-user-id': 'eve', prefer: 'respond-async' })
    await finishes(server, body.operationId)
    const { items } = (await get(server, petitionsPath)).body
    expect(items.map((item) => item.submitter_id)).toEqual(['eve'])
  })
})
