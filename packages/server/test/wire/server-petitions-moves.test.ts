/** Moving petitions on, taking them back, and halting their intake, as callers and operators see it. */
import { randomUUID } from 'node:crypto'
import { afterAll, afterEach, beforeAll, describe, expect, it, onTestFinished } from 'vitest'
import { freshDatabase, type TestDatabase } from '../../../spillway/test/setup/database.js'
import {
  expectProblem,
  instantForm,
  openTables,
  petitionsPath,
  readPetition,
  received,
  submitPetition,
  type Tables,
  transition,
  withdraw,
} from '../petition-calls.js'
import { call, endAll, get, post, type ServerProcess, startServer, until } from '../server-process.js'

let database: TestDatabase
let tables: Tables
let server: ServerProcess
let other: ServerProcess

beforeAll(async () => {
  database = await freshDatabase()
  const env = { DATABASE_URL: database.url }
  ;[server, other] = await Promise.all([startServer(env), startServer(env)])
  tables = openTables(database.url)
})

afterAll(async () => {
  await endAll()
  await tables.close()
  await database.drop()
})

const finals = ['ACKNOWLEDGED', 'REFERRED', 'ESCALATED', 'DEFERRED', 'NO_RESPONSE']
const states = ['RECEIVED', 'DELIBERATING', ...finals]
const legal: Record<string, string[]> = {
  RECEIVED: ['DELIBERATING', 'ACKNOWLEDGED', 'ESCALATED'],
  DELIBERATING: finals,
}

/** A petition in this state. */
async function petitionIn(state: string) {
  const made = await received(server)
  if (state !== 'RECEIVED') expect((await transition(server, made.id, 'DELIBERATING')).status).toBe(200)
  if (finals.includes(state)) expect((await transition(server, made.id, state)).status).toBe(200)
  return made
}

const eventsOf = (id: string) =>
  tables.query<{ type: string; actor: string; trace_id: string; payload: string }>(
    `SELECT type, actor, trace_id, payload FROM ledger WHERE payload::json->>'petition_id' = $1 ORDER BY seq`,
    [id],
  )

describe('transitions', () => {
  for (const from of ['RECEIVED', 'DELIBERATING']) {
    it.each(legal[from] ?? [])(`${from} → %s is returned, stored and recorded in the ledger`, async (to) => {
      const { id } = await petitionIn(from)
      const version = Number((await readPetition(server, id)).body.version)
      const moved = await transition(other, id, to, 'because')
      expect(moved.status).toBe(200)
      expect(moved.body).toMatchObject({ petition_id: id, state: to, fate_reason: 'because', version: version + 1 })
      expect((await readPetition(server, id)).body).toEqual(moved.body)
      const last = (await eventsOf(id)).pop()
      expect(last).toMatchObject({
        type: `petition.submission.${to.toLowerCase()}`,
        actor: 'operator:127.0.0.1',
        trace_id: moved.headers.get('x-request-id'),
      })
      expect(JSON.parse(last?.payload ?? '')).toEqual({ petition_id: id, from, to, reason: 'because' })
    })
  }

  for (const from of states) {
    it(`${from} → all others is 409 with the current state, and nothing moves`, async () => {
      const { id } = await petitionIn(from)
      const before = { petition: (await readPetition(server, id)).body, tables: await tables.all() }
      for (const to of states.filter((state) => !(legal[from] ?? []).includes(state))) {
        const refused = await transition(server, id, to)
        expectProblem(refused, 409, 'conflict')
        expect(refused.body.state).toBe(from)
      }
      expect({ petition: (await readPetition(server, id)).body, tables: await tables.all() }).toEqual(before)
    })
  }

  it('needs no reason', async () => {
    const { id } = await received(server)
    expect((await transition(server, id, 'ACKNOWLEDGED')).body.fate_reason).toBeNull()
  })

  it('of two at once, one wins and the other is 409', async () => {
    const { id } = await received(server)
    const answers = await Promise.all(
      Array.from({ length: 10 }, (_, n) => transition(n % 2 === 0 ? server : other, id, 'ESCALATED', `number ${n}`)),
    )
    const [won, ...more] = answers.filter((answer) => answer.status === 200)
    expect(more).toEqual([])
    expect(answers.filter((answer) => answer.status === 409)).toHaveLength(9)
    expect((await readPetition(server, id)).body).toMatchObject({ fate_reason: won?.body.fate_reason, version: 2 })
    expect(await eventsOf(id)).toHaveLength(2)
    expect(await tables.faults()).toEqual([])
  })

  it('is an operator’s: 403 for a caller with a name', async () => {
    const { id } = await received(server)
    const path = `${petitionsPath}/${id}/transitions`
    expectProblem(await post(server, path, { to: 'ESCALATED' }, { 'x-user-id': 'ann' }), 403, 'forbidden')
    expect((await readPetition(server, id)).body.state).toBe('RECEIVED')
  })
})

describe('withdrawal', () => {
  it('by its submitter makes it ACKNOWLEDGED, WITHDRAWN, and is witnessed with the reason', async () => {
    const { id, submitter } = await received(server)
    const taken = await post(other, `${petitionsPath}/${id}/withdraw`, { requester_id: submitter, reason: 'solved' })
    expect(taken.status).toBe(200)
    expect(taken.body).toMatchObject({ state: 'ACKNOWLEDGED', fate_reason: 'WITHDRAWN', version: 2 })
    expect((await readPetition(server, id)).body).toEqual(taken.body)
    const last = (await eventsOf(id)).pop()
    expect(last).toMatchObject({ type: 'petition.submission.withdrawn', actor: `submitter:${submitter}` })
    expect(JSON.parse(last?.payload ?? '')).toMatchObject({ to: 'ACKNOWLEDGED', reason: 'solved' })
  })

  it('gives the place back', async () => {
    const { id, submitter } = await received(server)
    const before = await tables.held()
    await withdraw(server, id, submitter)
    expect(await tables.held()).toBe(before - 1)
    expect(await tables.faults()).toEqual([])
  })

  it('knows its submitter in capitals too', async () => {
    const { id, submitter } = await received(server, {})
    expect((await withdraw(server, id, submitter.toUpperCase())).status).toBe(200)
  })

  it('by its submitter whose id was sent in capitals', async () => {
    const submitter = randomUUID()
    const { id } = await received(server, { submitter_id: submitter.toUpperCase() })
    expect((await withdraw(server, id, submitter)).status).toBe(200)
  })

  it('by another is 403', async () => {
    const { id } = await received(server)
    const before = await tables.all()
    expectProblem(await withdraw(server, id, randomUUID()), 403, 'forbidden')
    expect(await tables.all()).toBe(before)
  })

  it.each(['DELIBERATING', ...finals])('in %s is 409', async (state) => {
    const { id, submitter } = await petitionIn(state)
    const before = await tables.all()
    const refused = await withdraw(server, id, submitter)
    expectProblem(refused, 409, 'conflict')
    expect(refused.body.state).toBe(state)
    expect(await tables.all()).toBe(before)
  })

  it('of an unknown one is 404', async () => {
    expectProblem(await withdraw(server, randomUUID(), randomUUID()), 404, 'not_found')
  })
})

describe('halt', () => {
  const path = '/api/v1/admin/halt'
  const halt = (reason = 'flood') => post(server, path, { reason })
  const resume = (on = server) => call(on, 'DELETE', path)
  const halts = () =>
    tables.query<{ type: string; actor: string; payload: string }>(
      `SELECT type, actor, payload FROM ledger WHERE type LIKE 'system.%' ORDER BY seq`,
    )
  const accepts = (on: ServerProcess) =>
    until('it takes petitions again', async () => (await submitPetition(on)).status === 201, 5_000)

  afterEach(async () => {
    await resume()
    await Promise.all([accepts(server), accepts(other)])
  })

  it('is refused with its problem and a Retry-After of an hour, spread', async () => {
    expect((await halt()).status).toBe(200)
    const seen = new Set<number>()
    for (let n = 0; n < 20; n++) {
      const refused = await submitPetition(server)
      expectProblem(refused, 503, 'halted')
      expect(refused.body).toMatchObject({
        type: 'https://archon72.io/errors/system-halted',
        title: 'System Halted',
        instance: petitionsPath,
      })
      seen.add(refused.body.retry_after_seconds)
    }
    expect(Math.min(...seen)).toBeGreaterThanOrEqual(3_600)
    expect(Math.max(...seen)).toBeLessThanOrEqual(3_960)
    expect(seen.size).toBeGreaterThan(1)
  })

  it('is returned by setting it and by reading it', async () => {
    const halted = await halt('high water')
    expect(halted.body).toEqual({ halted: true, reason: 'high water', since: expect.stringMatching(instantForm) })
    expect((await get(other, path)).body).toEqual(halted.body)
    expect((await resume(other)).body).toEqual({ halted: false, reason: null, since: null })
    expect((await get(server, path)).body).toEqual({ halted: false, reason: null, since: null })
  })

  it('holds for the very next submission on another instance, which stores nothing', async () => {
    expect((await submitPetition(other)).status).toBe(201)
    await halt()
    const before = await tables.all()
    expectProblem(await submitPetition(other), 503, 'halted')
    expectProblem(await submitPetition(other, {}, { prefer: 'respond-async' }), 503, 'halted')
    expect(await tables.all()).toBe(before)
  })

  it('comes before the body is parsed', async () => {
    await halt()
    expectProblem(await post(server, petitionsPath, '{"type":'), 503, 'halted')
  })

  it('lets reads continue', async () => {
    const { id } = await received(server)
    await halt()
    for (const on of [server, other]) {
      expect((await readPetition(on, id)).body.petition_id).toBe(id)
      expect((await get(on, `${petitionsPath}/${id}/status?version=1&wait=0`)).status).toBe(304)
      expect((await get(on, `${petitionsPath}?limit=1`)).status).toBe(200)
      expect((await get(on, '/api/v1/ledger?limit=1')).status).toBe(200)
      expect((await get(on, '/api/v1/ledger/verify')).body.ok).toBe(true)
      expect((await get(on, '/health/ready')).status).toBe(200)
    }
  })

  it('is recorded once, and its end once, with the actor and the reason', async () => {
    const before = (await halts()).length
    await halt('first')
    await halt('again')
    expect((await get(server, path)).body.reason).toBe('first')
    await resume()
    await resume()
    const events = (await halts()).slice(before)
    expect(events.map(({ type, actor, payload }) => [type, actor, JSON.parse(payload)])).toEqual([
      ['system.halted', 'operator:127.0.0.1', { reason: 'first' }],
      ['system.resumed', 'operator:127.0.0.1', {}],
    ])
  })

  it('outlives every process', async () => {
    const own = await freshDatabase()
    onTestFinished(own.drop)
    const env = { DATABASE_URL: own.url }
    const first = await startServer(env)
    expect((await post(first, path, { reason: 'night' })).status).toBe(200)
    await first.kill()
    const second = await startServer(env)
    expectProblem(await submitPetition(second), 503, 'halted')
    expect((await get(second, path)).body).toMatchObject({ halted: true, reason: 'night' })
    await resume(second)
    expect((await submitPetition(second)).status).toBe(201)
    await second.stop()
  })

  it.each([
    ['no reason', {}],
    ['an empty one', { reason: '' }],
    ['one that is too long', { reason: 'x'.repeat(1_001) }],
    ['an unknown member', { reason: 'x', scope: 'all' }],
  ])('refuses %s', async (_, body) => {
    expectProblem(await post(server, path, body), 400, 'invalid_request')
    expect((await get(server, path)).body.halted).toBe(false)
  })

  it('is an operator’s: 403 for a caller with a name', async () => {
    const named = { 'x-user-id': 'ann' }
    expectProblem(await post(server, path, { reason: 'mine' }, named), 403, 'forbidden')
    expectProblem(await call(server, 'DELETE', path, { headers: named }), 403, 'forbidden')
    expect((await get(server, path)).body.halted).toBe(false)
  })
})
