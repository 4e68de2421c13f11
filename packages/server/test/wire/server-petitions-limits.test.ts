/** The answers when the queue is full or a rate is used up, and what an operator sees. */
import { randomUUID } from 'node:crypto'
import { afterAll, beforeAll, describe, expect, it, onTestFinished } from 'vitest'
import { freshDatabase, type TestDatabase } from '../../../spillway/test/setup/database.js'
import {
  expectProblem,
  instantForm,
  openTables,
  petitionsPath,
  received,
  submitPetition,
  type Tables,
  transition,
} from '../petition-calls.js'
import { type Answer, endAll, finishes, get, post, type ServerProcess, startServer, until } from '../server-process.js'

afterAll(endAll)

/** A database of its own, and servers on it. */
async function serving(env: Record<string, string>, count = 1) {
  const database: TestDatabase = await freshDatabase()
  const servers = await Promise.all(
    Array.from({ length: count }, () => startServer({ DATABASE_URL: database.url, ...env })),
  )
  const [server, other = server] = servers
  if (server === undefined || other === undefined) throw new Error('none was started')
  const tables: Tables = openTables(database.url)
  return {
    url: database.url,
    server,
    other,
    tables,
    close: async () => {
      await Promise.all(servers.map((one) => one.kill()))
      await tables.close()
      await database.drop()
    },
  }
}

/** For one test. */
async function servingOnce(env: Record<string, string>) {
  const made = await serving(env)
  onTestFinished(made.close)
  return made
}

describe('capacity', () => {
  let bench: Awaited<ReturnType<typeof serving>>
  let server: ServerProcess
  const held: string[] = []

  beforeAll(async () => {
    bench = await serving(
      { PETITION_QUEUE_THRESHOLD: '4', PETITION_QUEUE_HYSTERESIS: '2', PETITION_QUEUE_CACHE_TTL: '0.2' },
      2,
    )
    server = bench.server
    for (let n = 0; n < 4; n++) held.push((await received(server)).id)
  })

  afterAll(() => bench.close())

  const known = (on: ServerProcess) =>
    until('it knows that the queue is full', async () => (await post(on, petitionsPath, '{')).status === 503, 5_000)

  it('is refused with the problem that callers build on', async () => {
    for (const on of [server, bench.other]) {
      const refused = await submitPetition(on)
      expectProblem(refused, 503, 'capacity_exceeded')
      expect(refused.body).toMatchObject({
        type: 'https://archon72.io/errors/queue-overflow',
        title: 'Queue Overflow',
        detail: 'Petition queue capacity exceeded. Please retry later.',
        instance: petitionsPath,
      })
    }
    expect(await bench.tables.held()).toBe(4)
  })

  it('has a Retry-After of 60 to 66 s, spread', async () => {
    const seen = new Set<number>()
    for (let n = 0; n < 60; n++) seen.add((await submitPetition(server)).body.retry_after_seconds)
    expect(Math.min(...seen)).toBeGreaterThanOrEqual(60)
    expect(Math.max(...seen)).toBeLessThanOrEqual(66)
    expect(seen.size).toBeGreaterThan(2)
  })

  it.each([
    ['no JSON', '{', {}],
    ['an invalid petition', { type: 'NONE', text: '' }, {}],
    ['another media type', 'text', { 'content-type': 'text/plain' }],
    ['a body that is too large', JSON.stringify('x'.repeat(1_100_000)), {}],
  ])('comes before the body: %s is 503 too', async (_, body, headers) => {
    await known(server)
    expectProblem(await post(server, petitionsPath, body, headers), 503, 'capacity_exceeded')
  })

  it('reaches an instance that was never asked, without a query of its callers', async () => {
    await known(bench.other)
  })

  it('comes before the repetition of an accepted submission', async () => {
    const own = await servingOnce({ PETITION_QUEUE_THRESHOLD: '1' })
    const key = { 'idempotency-key': randomUUID() }
    const submitter = { submitter_id: randomUUID() }
    const first = await submitPetition(own.server, submitter, key)
    expect(first.status).toBe(201)
    await known(own.server)
    expectProblem(await submitPetition(own.server, submitter, key), 503, 'capacity_exceeded')
    await transition(own.server, String(first.body.petition_id), 'ACKNOWLEDGED')
    const again = await until('there is a place', async () => {
      const answer = await submitPetition(own.server, submitter, key)
      return answer.status === 201 && answer
    })
    expect(again.body).toEqual(first.body)
  })

  it('stays until fewer than threshold − hysteresis are held, then ends, on all instances', async () => {
    const [one = '', two = '', three = ''] = held
    for (const id of [one, two]) {
      expect((await transition(server, id, 'ACKNOWLEDGED')).status).toBe(200)
      for (const on of [server, bench.other]) expectProblem(await submitPetition(on), 503, 'capacity_exceeded')
    }
    expect(await bench.tables.held()).toBe(2)
    await transition(server, three, 'ACKNOWLEDGED')
    for (const on of [server, bench.other]) {
      await until('it takes petitions again', async () => (await submitPetition(on)).status === 201, 5_000)
    }
    expect(await bench.tables.faults()).toEqual([])
  })

  /** Each overflow event: its number, what it is, depth and threshold. */
  type Overflow = [seq: number, what: string, depth: number, threshold: number]
  const logged = (on: ServerProcess): Overflow[] =>
    on.logs().flatMap(({ msg, seq, depth, threshold }) => {
      const what = /^petition queue overflow (.*)/.exec(String(msg))?.[1]
      return what === undefined ? [] : [[Number(seq), what, Number(depth), Number(threshold)]]
    })
  const witnessed = async (tables: Tables): Promise<Overflow[]> => {
    const rows = await tables.query<{ seq: string; type: string; payload: string }>(
      `SELECT seq, type, payload FROM ledger WHERE type LIKE 'petition.queue.%' ORDER BY seq`,
    )
    return rows.map(({ seq, type, payload }) => {
      const { depth, threshold } = JSON.parse(payload)
      return [Number(seq), type.replace('petition.queue.overflow.', ''), depth, threshold]
    })
  }
  const logsAll = async (on: ServerProcess, all: Overflow[]) => {
    await until('all are logged', () => logged(on).length >= all.length)
    expect(logged(on)).toEqual(all)
  }

  it('logs and witnesses each start and end', async () => {
    const all = await witnessed(bench.tables)
    expect(all.slice(0, 2)).toMatchObject([
      [expect.any(Number), 'started', 4, 4],
      [expect.any(Number), 'ended', 1, 4],
    ])
    for (const on of [server, bench.other]) await logsAll(on, all)
  })

  it('logs short ones too, those before it not again, and the end that a new threshold makes', async () => {
    const env = { PETITION_QUEUE_THRESHOLD: '1', PETITION_QUEUE_HYSTERESIS: '0', PETITION_QUEUE_CACHE_TTL: '3600' }
    const own = await servingOnce(env)
    const fill = () =>
      until('there is a place', async () => {
        const { status, body } = await submitPetition(own.server)
        return status === 201 && String(body.petition_id)
      })
    for (let n = 0; n < 3; n++) await transition(own.server, await fill(), 'ACKNOWLEDGED')
    await fill()
    const before = await witnessed(own.tables)
    expect(before).toHaveLength(7)
    await logsAll(own.server, before)

    const same = await startServer({ DATABASE_URL: own.url, ...env })
    const raised = await startServer({ DATABASE_URL: own.url, ...env, PETITION_QUEUE_THRESHOLD: '9' })
    const all = await witnessed(own.tables)
    expect(all.slice(7)).toMatchObject([[expect.any(Number), 'ended', 1, 9]])
    await logsAll(own.server, all)
    for (const on of [same, raised]) await logsAll(on, all.slice(7))
    for (const on of [same, raised]) await on.kill()
  })

  it('counts operations requested with respond-async, also after they ran', async () => {
    const own = await servingOnce({ PETITION_QUEUE_THRESHOLD: '2' })
    const later = { prefer: 'respond-async' }
    for (let n = 0; n < 2; n++) {
      const { status, body } = await submitPetition(own.server, {}, later)
      expect(status).toBe(202)
      await finishes(own.server, body.operationId)
    }
    expectProblem(await submitPetition(own.server, {}, later), 503, 'capacity_exceeded')
    expectProblem(await submitPetition(own.server), 503, 'capacity_exceeded')
    expect((await get(own.server, `${petitionsPath}?state=RECEIVED`)).body.total).toBe(2)
  })
})

describe('rate', () => {
  let bench: Awaited<ReturnType<typeof serving>>
  let server: ServerProcess

  beforeAll(async () => {
    bench = await serving({ PETITION_RATE_LIMIT_PER_HOUR: '3' }, 2)
    server = bench.server
  })

  afterAll(() => bench.close())

  const headersOf = ({ headers }: Answer) => ({
    policy: headers.get('ratelimit-policy'),
    rate: headers.get('ratelimit'),
    limit: headers.get('x-ratelimit-limit'),
    remaining: headers.get('x-ratelimit-remaining'),
    reset: Number(headers.get('x-ratelimit-reset')),
  })
  /** Uses up a submitter's hour, and is refused once more. */
  async function usedUp(submitter = randomUUID()) {
    for (let n = 0; n < 3; n++) expect((await submitPetition(server, { submitter_id: submitter })).status).toBe(201)
    return { submitter, refused: await submitPetition(bench.other, { submitter_id: submitter }) }
  }

  it('is in the headers of 201, and the remaining count falls to 0', async () => {
    const submitter = randomUUID()
    for (const left of [2, 1, 0]) {
      const answer = await submitPetition(left === 1 ? bench.other : server, { submitter_id: submitter })
      expect(answer.status).toBe(201)
      const limits = headersOf(answer)
      expect(limits).toMatchObject({ policy: '"petitions";q=3;w=3600', limit: '3', remaining: String(left) })
      const seconds = Number(/^"petitions";r=(\d+);t=(\d+)$/.exec(limits.rate ?? '')?.[2])
      expect(limits.rate).toBe(`"petitions";r=${left};t=${seconds}`)
      // A bucket is a whole minute: the first one leaves the window 59 to 60 minutes from now.
      expect(seconds).toBeGreaterThan(3_480)
      expect(seconds).toBeLessThanOrEqual(3_600)
      expect(Math.abs(limits.reset - Date.now() / 1_000 - seconds)).toBeLessThan(5)
    }
  })

  it('is in the headers of a repetition, which takes nothing', async () => {
    const submitter = { submitter_id: randomUUID() }
    const key = { 'idempotency-key': randomUUID() }
    const first = await submitPetition(server, submitter, key)
    await submitPetition(server, submitter)
    for (const on of [bench.other, server]) {
      const again = await submitPetition(on, submitter, key)
      expect(again.headers.get('idempotent-replayed')).toBe('true')
      expect(headersOf(again)).toMatchObject({ policy: '"petitions";q=3;w=3600', limit: '3', remaining: '1' })
      expect(headersOf(again).reset).toBe(headersOf(first).reset)
    }
    const next = await submitPetition(server, submitter)
    expect(headersOf(next)).toMatchObject({ remaining: '0' })
  })

  it('is in the headers of 202', async () => {
    const answer = await submitPetition(server, {}, { prefer: 'respond-async' })
    expect(answer.status).toBe(202)
    expect(headersOf(answer)).toMatchObject({ policy: '"petitions";q=3;w=3600', remaining: '2' })
  })

  it('is refused with the problem that callers build on and every member that governs', async () => {
    const { submitter, refused } = await usedUp()
    expectProblem(refused, 429, 'rate_limited')
    expect(refused.body).toMatchObject({
      type: 'urn:archon72:petition:rate-limit-exceeded',
      title: 'Rate Limit Exceeded',
      detail: 'Maximum 3 petitions per hour exceeded',
      instance: petitionsPath,
      actor: `submitter:${submitter}`,
      rate_limit_remaining: 0,
      rate_limit_limit: 3,
      rate_limit_reset: expect.stringMatching(instantForm),
    })
    expect(headersOf(refused)).toMatchObject({ policy: '"petitions";q=3;w=3600', limit: '3', remaining: '0' })
  })

  it('returns the quarter of the database’s clock, and the ledger’s head', async () => {
    const { refused } = await usedUp()
    const [expected] = await bench.tables.query<{ cycle: string; seq: string }>(
      `SELECT to_char(clock() AT TIME ZONE 'UTC', 'YYYY') || '-Q' || extract(quarter FROM clock() AT TIME ZONE 'UTC') AS cycle, seq FROM ledger_head`,
    )
    expect(refused.body.cycle_id).toMatch(/^\d{4}-Q[1-4]$/)
    expect(refused.body.cycle_id).toBe(expected?.cycle)
    expect(refused.body.as_of_seq).toBe(Number(expected?.seq))
    const [row] = await bench.tables.query<{ type: string; actor: string }>(
      'SELECT type, actor FROM ledger WHERE seq = $1',
      [refused.body.as_of_seq],
    )
    expect(row).toEqual({ type: 'petition.rate_limit.blocked', actor: refused.body.actor })
  })

  it('has a Retry-After from the time until a slot is free to a tenth more, and the same reset', async () => {
    const { refused } = await usedUp()
    const seconds = (Date.parse(String(refused.body.rate_limit_reset)) - Date.now()) / 1_000
    expect(seconds).toBeGreaterThan(3_470)
    expect(seconds).toBeLessThanOrEqual(3_601)
    expect(refused.body.retry_after_seconds).toBeGreaterThanOrEqual(Math.floor(seconds))
    expect(refused.body.retry_after_seconds).toBeLessThanOrEqual(Math.ceil((seconds + 5) * 1.1))
    expect(headersOf(refused).reset).toBe(Date.parse(String(refused.body.rate_limit_reset)) / 1_000)
  })

  it('stores nothing of a refused petition except the block', async () => {
    const { submitter } = await usedUp()
    const before = await bench.tables.all()
    expect((await submitPetition(server, { submitter_id: submitter })).status).toBe(429)
    const after = await bench.tables.all()
    const strip = (text: string) => text.replaceAll(/^(petition_blocks|rates) .*$/gm, '$1')
    expect(strip(after)).toBe(strip(before))
    const counted = await bench.tables.query('SELECT pending FROM petition_blocks WHERE submitter = $1', [submitter])
    expect(counted).toHaveLength(1)
  })

  it('does not hold one submitter’s use against another, nor capitals for another submitter', async () => {
    const { submitter } = await usedUp()
    expect((await submitPetition(server)).status).toBe(201)
    expect((await submitPetition(server, { submitter_id: submitter.toUpperCase() })).status).toBe(429)
  })

  it('comes after the checks of the body: an invalid one is 400', async () => {
    const { submitter } = await usedUp()
    expectProblem(await submitPetition(server, { submitter_id: submitter, text: ' ' }), 400, 'invalid_request')
  })

  it.each([
    ['realm', { PETITION_RATE_LIMIT_REALM_PER_HOUR: '2' }, { realm: 'dock' }, /^Maximum 2 petitions per hour\b.*dock/],
    ['global', { PETITION_RATE_LIMIT_GLOBAL_PER_HOUR: '2' }, {}, /^Maximum 2 petitions per hour\b.*all/],
    ['type', { PETITION_RATE_LIMIT_META_PER_HOUR: '2' }, { type: 'META' }, /^Maximum 2 petitions per hour\b.*META/],
  ])('of the %s names that limit, and takes nothing from the submitter', async (_, env, members, detail) => {
    const own = await servingOnce(env)
    for (let n = 0; n < 2; n++) expect((await submitPetition(own.server, members)).status).toBe(201)
    const submitter = randomUUID()
    const refused = await submitPetition(own.server, { ...members, submitter_id: submitter })
    expectProblem(refused, 429, 'rate_limited')
    expect(refused.body.detail).toMatch(detail)
    expect(refused.body).toMatchObject({
      actor: `submitter:${submitter}`,
      rate_limit_limit: 2,
      rate_limit_remaining: 0,
    })
    const [counted] = await own.tables.query('SELECT count(*) AS n FROM petitions WHERE submitter = $1', [submitter])
    expect(Number(counted?.n)).toBe(0)
    if ('realm' in members) {
      const elsewhere = await submitPetition(own.server, { realm: 'mill', submitter_id: submitter })
      expect(elsewhere.headers.get('x-ratelimit-remaining')).toBe('1')
      const plain = await submitPetition(own.server, { submitter_id: submitter })
      expect(plain.headers.get('x-ratelimit-remaining')).toBe('8')
    }
  })

  it('says another window by its minutes', async () => {
    const own = await servingOnce({ PETITION_RATE_LIMIT_PER_HOUR: '1', PETITION_RATE_LIMIT_WINDOW_MINUTES: '5' })
    const submitter = { submitter_id: randomUUID() }
    const first = await submitPetition(own.server, submitter)
    expect(first.headers.get('ratelimit-policy')).toBe('"petitions";q=1;w=300')
    const refused = await submitPetition(own.server, submitter)
    expect(refused.body.detail).toBe('Maximum 1 petitions per 5 minutes exceeded')
    expect(refused.body.retry_after_seconds).toBeLessThanOrEqual(330)
  })
})
