/** Submitting a petition, as its caller sees it: receipts, repetition, tickets. */
import { randomUUID } from 'node:crypto'
import { afterAll, beforeAll, describe, expect, it } from 'vitest'
import { freshDatabase, type TestDatabase } from '../../../spillway/test/setup/database.js'
import {
  expectProblem,
  hashOf,
  instantForm,
  openTables,
  petition,
  petitionsPath,
  readPetition,
  received,
  submitPetition,
  type Tables,
  transition,
  uuidForm,
} from '../petition-calls.js'
import { call, endAll, finishes, get, post, type ServerProcess, startServer, until } from '../server-process.js'

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

const countOf = async (submitter: string): Promise<number> =>
  Number((await tables.query('SELECT count(*) AS n FROM petitions WHERE submitter = $1', [submitter]))[0]?.n)

describe('a receipt', () => {
  it('is 201 with exactly the members that callers build on', async () => {
    const { status, body } = await submitPetition(server, { type: 'GRIEVANCE', realm: 'harbour' })
    expect(status).toBe(201)
    expect(body).toEqual({
      petition_id: expect.stringMatching(uuidForm),
      state: 'RECEIVED',
      type: 'GRIEVANCE',
      content_hash: hashOf('Let the fountain run again.'),
      realm: 'harbour',
      created_at: expect.stringMatching(instantForm),
    })
  })

  it('names no realm as null', async () => {
    expect((await submitPetition(server)).body.realm).toBeNull()
  })

  it('has the time of the database, to the millisecond that is stored', async () => {
    const { body } = await submitPetition(server)
    const [row] = await tables.query<{ at: Date; near: boolean }>(
      `SELECT created_at AS at, created_at BETWEEN clock_timestamp() - interval '1 minute' AND clock_timestamp() AS near FROM petitions WHERE id = $1`,
      [body.petition_id],
    )
    expect(row?.at.toISOString()).toBe(body.created_at)
    expect(row?.near).toBe(true)
  })

  it.each([
    ['spaces at its ends', '  as it was typed \n'],
    ['letters beyond ASCII', 'Größe, 水, 🜁'],
    ['a composed and a decomposed letter', 'é\u0065\u0301'],
  ])('hashes the UTF-8 of a text with %s, unchanged', async (_, text) => {
    const { body } = await submitPetition(server, { text })
    expect(body.content_hash).toBe(hashOf(text))
    expect((await readPetition(server, String(body.petition_id))).body.text).toBe(text)
  })

  it.each(['GENERAL', 'CESSATION', 'GRIEVANCE', 'COLLABORATION', 'META'])('is given for type %s', async (type) => {
    const { status, body } = await submitPetition(server, { type })
    expect(status).toBe(201)
    expect(body.type).toBe(type)
  })

  it('has a Location at which the petition is', async () => {
    const { headers, body } = await submitPetition(server)
    expect(headers.get('location')).toBe(`${petitionsPath}/${body.petition_id}`)
    const found = await get(other, headers.get('location') ?? '')
    expect(found.status).toBe(200)
    expect(found.body.petition_id).toBe(body.petition_id)
  })

  it('is witnessed in the ledger, with its trace', async () => {
    const trace = randomUUID().replaceAll('-', '')
    const submitter = randomUUID()
    const { body, headers } = await submitPetition(
      server,
      { submitter_id: submitter },
      { traceparent: `00-${trace}-00f067aa0ba902b7-01` },
    )
    expect(headers.get('x-request-id')).toBe(trace)
    const rows = await tables.query<{ payload: string }>(
      `SELECT type, actor, payload FROM ledger WHERE trace_id = $1`,
      [trace],
    )
    expect(rows).toMatchObject([{ type: 'petition.submission.received', actor: `submitter:${submitter}` }])
    expect(JSON.parse(rows[0]?.payload ?? '')).toEqual({
      petition_id: body.petition_id,
      type: 'GENERAL',
      content_hash: body.content_hash,
      realm: null,
      submitter_id: submitter,
    })
  })
})

describe('the path without /api', () => {
  const alias = '/v1/petition-submissions'

  it('takes a petition, and returns its location under /api', async () => {
    const { status, headers, body } = await post(server, alias, petition())
    expect(status).toBe(201)
    expect(headers.get('location')).toBe(`${petitionsPath}/${body.petition_id}`)
    expect((await readPetition(server, String(body.petition_id))).status).toBe(200)
  })

  it('has the same reads', async () => {
    const { id } = await received(server)
    expect((await get(server, `${alias}/${id}`)).body).toEqual((await readPetition(server, id)).body)
    expect((await get(server, `${alias}/${id}/status`)).body).toMatchObject({ petition_id: id, version: 1 })
    expect((await get(server, `${alias}?limit=1`)).body.items).toHaveLength(1)
  })

  it('has the same moves', async () => {
    const moved = await received(server)
    expect((await post(server, `${alias}/${moved.id}/transitions`, { to: 'ESCALATED' })).body.state).toBe('ESCALATED')
    const own = await received(server)
    const taken = await post(server, `${alias}/${own.id}/withdraw`, { requester_id: own.submitter })
    expect(taken.body.fate_reason).toBe('WITHDRAWN')
  })

  it('is the only one: ledger and halt have none', async () => {
    expect((await get(server, '/v1/ledger')).status).toBe(404)
    expect((await post(server, '/v1/admin/halt', { reason: 'no' })).status).toBe(404)
  })
})

describe('Idempotency-Key', () => {
  it('gives the receipt again, from any instance and prefix, and makes one petition', async () => {
    const body = petition()
    const key = { 'idempotency-key': randomUUID() }
    const first = await post(server, petitionsPath, body, key)
    expect(first.status).toBe(201)
    expect(first.headers.get('idempotent-replayed')).toBeNull()
    for (const [instance, path] of [
      [server, petitionsPath],
      [other, petitionsPath],
      [other, '/v1/petition-submissions'],
    ] as const) {
      const again = await post(instance, path, body, key)
      expect(again.status).toBe(201)
      expect(again.body).toEqual(first.body)
      expect(again.headers.get('idempotent-replayed')).toBe('true')
      expect(again.headers.get('location')).toBe(first.headers.get('location'))
    }
    expect(await countOf(String(body.submitter_id))).toBe(1)
  })

  it('gives the receipt again though the petition has moved on', async () => {
    const body = petition()
    const key = { 'idempotency-key': randomUUID() }
    const first = await post(server, petitionsPath, body, key)
    await transition(server, String(first.body.petition_id), 'ESCALATED')
    expect((await post(server, petitionsPath, body, key)).body).toEqual(first.body)
  })

  it('takes nothing from the quota when it repeats', async () => {
    const submitter = randomUUID()
    const key = { 'idempotency-key': randomUUID() }
    for (let n = 0; n < 3; n++) await submitPetition(server, { submitter_id: submitter }, key)
    const next = await submitPetition(server, { submitter_id: submitter })
    expect(next.headers.get('x-ratelimit-remaining')).toBe('8')
  })

  it('is 422 for another text, and stores nothing of it', async () => {
    const submitter = randomUUID()
    const key = { 'idempotency-key': randomUUID() }
    await submitPetition(server, { submitter_id: submitter }, key)
    const mismatch = await submitPetition(other, { submitter_id: submitter, text: 'Something else.' }, key)
    expectProblem(mismatch, 422, 'idempotency_mismatch')
    expect(await countOf(submitter)).toBe(1)
  })

  it('has one effect at any concurrency over two instances', async () => {
    const body = petition()
    const key = { 'idempotency-key': randomUUID() }
    const answers = await Promise.all(
      Array.from({ length: 30 }, (_, n) => post(n % 2 === 0 ? server : other, petitionsPath, body, key)),
    )
    const taken = answers.filter((answer) => answer.status === 201)
    expect(taken.length).toBeGreaterThan(0)
    expect(new Set(taken.map((answer) => answer.body.petition_id)).size).toBe(1)
    expect(taken.filter((answer) => answer.headers.get('idempotent-replayed') === null)).toHaveLength(1)
    for (const answer of answers) expect([201, 409]).toContain(answer.status)
    expect(await countOf(String(body.submitter_id))).toBe(1)
  })

  it('stays free when the submission was invalid', async () => {
    const submitter = randomUUID()
    const key = { 'idempotency-key': randomUUID() }
    expect((await submitPetition(server, { submitter_id: submitter, text: ' ' }, key)).status).toBe(400)
    const good = await submitPetition(server, { submitter_id: submitter }, key)
    expect(good.status).toBe(201)
    expect(good.headers.get('idempotent-replayed')).toBeNull()
  })
})

describe('Prefer: respond-async', () => {
  const async = { prefer: 'respond-async' }
  const queue = 'spillway:petitions'

  it('is 202 with a ticket, and the petition exists once the ticket is completed', async () => {
    const { status, headers, body } = await submitPetition(server, { realm: 'north' }, async)
    expect(status).toBe(202)
    expect(body).toMatchObject({ status: 'queued', reason: 'requested', queuePosition: 0 })
    expect(headers.get('location')).toBe(`/api/v1/operations/${body.operationId}`)
    expect(headers.get('preference-applied')).toBe('respond-async')
    expect(headers.get('ratelimit')).toMatch(/^"petitions";r=9;t=\d+$/)
    const done = await finishes(server, body.operationId)
    expect(done).toMatchObject({ status: 'completed', result: { state: 'RECEIVED', realm: 'north' } })
    const { petition_id: id } = done.result as unknown as { petition_id: string }
    expect((await readPetition(other, id)).body).toMatchObject({ petition_id: id, state: 'RECEIVED', version: 1 })
    expect(await tables.faults()).toEqual([])
  })

  it('gives the same ticket to the same key, and makes one petition', async () => {
    const body = petition()
    const headers = { ...async, 'idempotency-key': randomUUID() }
    const first = await post(server, petitionsPath, body, headers)
    const again = await post(other, petitionsPath, body, headers)
    expect(again.status).toBe(202)
    expect(again.body.operationId).toBe(first.body.operationId)
    await finishes(server, first.body.operationId)
    expect((await post(other, petitionsPath, body, headers)).body.operationId).toBe(first.body.operationId)
    expect(await countOf(String(body.submitter_id))).toBe(1)
  })

  it('with wait=N answers with its result', async () => {
    const { status, headers, body } = await submitPetition(server, {}, { prefer: 'respond-async, wait=20' })
    expect(status).toBe(201)
    expect(body).toMatchObject({ petition_id: expect.stringMatching(uuidForm), state: 'RECEIVED' })
    expect(headers.get('location')).toBe(`${petitionsPath}/${body.petition_id}`)
    expect(headers.get('preference-applied')).toContain('wait=20')
  })

  it('holds a place while it waits and afterwards, until the petition moves on', async () => {
    const before = await tables.held()
    await post(server, '/api/v1/lanes/pause', { queue })
    const { body } = await submitPetition(server, {}, async)
    expect(await tables.held()).toBe(before + 1)
    expect((await get(server, `/api/v1/operations/${body.operationId}`)).body.queue).toBe(queue)
    await post(server, '/api/v1/lanes/resume', { queue })
    const { result } = await finishes(server, body.operationId)
    expect(await tables.held()).toBe(before + 1)
    const { petition_id: id } = result as unknown as { petition_id: string }
    expect((await transition(server, id, 'ACKNOWLEDGED')).status).toBe(200)
    expect(await tables.held()).toBe(before)
    expect(await tables.faults()).toEqual([])
  })

  it('never deadlocks with concurrent submissions', async () => {
    const own = await startServer({ DATABASE_URL: database.url, PETITION_RATE_LIMIT_PER_HOUR: '1000000' })
    const one = randomUUID()
    const answers = await Promise.all(
      Array.from({ length: 24 }, async (_, caller) => {
        const statuses: number[] = []
        for (let n = 0; n < 20; n++) {
          // A third of them queue one behind the other, in one lane, while the others fill the same flushes.
          const submitted = caller % 3 === 0 ? submitPetition(own, { submitter_id: one }, async) : submitPetition(own)
          statuses.push((await submitted).status)
        }
        return statuses
      }),
    )
    const queued = answers.flat().filter((status) => status === 202).length
    expect(queued).toBeGreaterThan(0)
    await until('all that were queued are there', async () => (await countOf(one)) === queued)
    // Its sessions report their counts when they end.
    await own.stop()
    const [statistics] = await tables.query(`SELECT deadlocks FROM pg_stat_database WHERE datname = current_database()`)
    expect(Number(statistics?.deadlocks)).toBe(0)
    expect(await tables.faults()).toEqual([])
  })

  it('gives its place back when it is cancelled before it ran', async () => {
    const before = await tables.held()
    await post(server, '/api/v1/lanes/pause', { queue })
    const { body } = await submitPetition(server, {}, async)
    // A worker may look at it for a moment, to find that its lane is paused.
    await until('it is cancelled', async () => {
      const cancelled = await post(server, `/api/v1/operations/${body.operationId}/cancel`)
      expect(cancelled.body.code).not.toBe('operation_finished')
      return cancelled.status === 200
    })
    await post(server, '/api/v1/lanes/resume', { queue })
    expect(await tables.held()).toBe(before)
    expect(await tables.faults()).toEqual([])
  })
})

it('a wrong method is 405 with the allowed ones', async () => {
  const answer = await call(server, 'PUT', petitionsPath, { body: petition() })
  expectProblem(answer, 405, 'method_not_allowed')
  expect(answer.headers.get('allow')?.split(', ')).toEqual(expect.arrayContaining(['GET', 'POST']))
})
