/** Every petition metric moves with the event it counts, seen by scraping the real server. */
import { randomUUID } from 'node:crypto'
import { afterAll, beforeAll, describe, expect, it } from 'vitest'
import { freshDatabase, type TestDatabase } from '../../../spillway/test/setup/database.js'
import {
  openTables,
  petitionSeries,
  petitionsPath,
  received,
  submitPetition,
  type Tables,
  transition,
  withdraw,
} from '../petition-calls.js'
import { endAll, finishes, get, post, type ServerProcess, sample, startServer, until } from '../server-process.js'

const types = ['GENERAL', 'CESSATION', 'GRIEVANCE', 'COLLABORATION', 'META']
const fates = ['ACKNOWLEDGED', 'REFERRED', 'ESCALATED', 'DEFERRED', 'NO_RESPONSE']
const states = ['RECEIVED', 'DELIBERATING', ...fates]

let database: TestDatabase
let tables: Tables
let server: ServerProcess
let other: ServerProcess

beforeAll(async () => {
  database = await freshDatabase()
  const env = {
    DATABASE_URL: database.url,
    PETITION_QUEUE_THRESHOLD: '200',
    PETITION_RATE_LIMIT_PER_HOUR: '2',
    PETITION_QUEUE_CACHE_TTL: '0.2',
  }
  ;[server, other] = await Promise.all([startServer(env), startServer(env)])
  tables = openTables(database.url)
})

afterAll(async () => {
  await endAll()
  await tables.close()
  await database.drop()
})

const scrape = (on = server) => petitionSeries(on)

/** By how much each of the series grew while `act` was done. */
async function growth(name: string, labels: Record<string, string>[], act: () => Promise<unknown>): Promise<number[]> {
  const before = await scrape()
  await act()
  const after = await scrape()
  return labels.map((label) => (sample(after, name, label) ?? 0) - (sample(before, name, label) ?? 0))
}

describe('from the start', () => {
  it('has every metric, with each value of its fixed labels', async () => {
    const fresh = await startServer({ DATABASE_URL: database.url, SPILLWAY_DB_SCHEMA: 'fresh' })
    const { text } = await get(fresh, '/metrics')
    for (const type of types) expect(sample(text, 'petition_submitted_total', { type }), type).toBe(0)
    for (const fate of fates) expect(sample(text, 'petition_fate_assigned_total', { fate }), fate).toBe(0)
    for (const state of states) expect(sample(text, 'petition_queue_depth', { state }), state).toBe(0)
    for (const result of ['allowed', 'blocked']) {
      expect(sample(text, 'petition_rate_limit_checks_total', { result }), result).toBe(0)
    }
    expect(sample(text, 'petition_queue_threshold')).toBe(10_000)
    expect(sample(text, 'petition_queue_rejections_total')).toBe(0)
    for (const name of ['petition_rate_limit_hits_total counter', 'petition_rate_limit_remaining gauge']) {
      expect(text).toContain(`# TYPE ${name}`)
    }
    await fresh.kill()
  })
})

describe('petition_submitted_total', () => {
  const name = 'petition_submitted_total'
  const labels = types.map((type) => ({ type }))

  it.each(types)('counts one of type %s, and no other', async (type) => {
    const grown = await growth(name, labels, () => received(server, { type }))
    expect(grown).toEqual(types.map((one) => (one === type ? 1 : 0)))
  })

  it('does not count a repetition', async () => {
    const key = { 'idempotency-key': randomUUID() }
    const members = { submitter_id: randomUUID() }
    await submitPetition(server, members, key)
    const grown = await growth(name, labels, () => submitPetition(server, members, key))
    expect(grown).toEqual([0, 0, 0, 0, 0])
  })

  it('counts one that was queued, once, on whichever instance it was', async () => {
    const sum = async () => {
      const scrapes = await Promise.all([scrape(server), scrape(other)])
      return scrapes.reduce((total, text) => total + (sample(text, name, { type: 'META' }) ?? 0), 0)
    }
    const before = await sum()
    const { status, body } = await submitPetition(server, { type: 'META' }, { prefer: 'respond-async' })
    expect(status).toBe(202)
    await finishes(server, body.operationId)
    await until('it is counted', async () => (await sum()) > before, 5_000)
    expect(await sum()).toBe(before + 1)
  })
})

describe('petition_fate_assigned_total', () => {
  const name = 'petition_fate_assigned_total'
  const labels = fates.map((fate) => ({ fate }))

  it.each(fates)('counts %s, and no other', async (fate) => {
    const { id } = await received(server)
    expect(await growth(name, labels, () => transition(server, id, 'DELIBERATING'))).toEqual([0, 0, 0, 0, 0])
    const grown = await growth(name, labels, () => transition(server, id, fate))
    expect(grown).toEqual(fates.map((one) => (one === fate ? 1 : 0)))
  })

  it('counts a withdrawal as ACKNOWLEDGED', async () => {
    const { id, submitter } = await received(server)
    expect(await growth(name, labels, () => withdraw(server, id, submitter))).toEqual([1, 0, 0, 0, 0])
  })

  it('does not count a move that was refused', async () => {
    const { id } = await received(server)
    await transition(server, id, 'ESCALATED')
    const grown = await growth(name, labels, async () => {
      await transition(server, id, 'ACKNOWLEDGED')
      await transition(server, randomUUID(), 'ACKNOWLEDGED')
    })
    expect(grown).toEqual([0, 0, 0, 0, 0])
  })
})

describe('petition_rate_limit_*', () => {
  const results = [{ result: 'allowed' }, { result: 'blocked' }]

  it('checks_total counts allowed and blocked ones apart', async () => {
    const checks = 'petition_rate_limit_checks_total'
    const members = { submitter_id: randomUUID() }
    const act = () => submitPetition(server, members)
    expect(await growth(checks, results, act)).toEqual([1, 0])
    expect(await growth(checks, results, act)).toEqual([1, 0])
    expect(await growth(checks, results, act)).toEqual([0, 1])
    expect(await growth(checks, results, act)).toEqual([0, 1])
  })

  it('checks_total does not count what never came to the check', async () => {
    const grown = await growth('petition_rate_limit_checks_total', results, async () => {
      await submitPetition(server, { text: ' ' })
      await post(server, petitionsPath, '{')
    })
    expect(grown).toEqual([0, 0])
  })

  it('remaining falls with each submission of its submitter', async () => {
    const submitter = randomUUID()
    const remaining = async () => sample(await scrape(), 'petition_rate_limit_remaining', { submitter_id: submitter })
    expect(await remaining()).toBeUndefined()
    await submitPetition(server, { submitter_id: submitter })
    expect(await remaining()).toBe(1)
    await submitPetition(server, { submitter_id: submitter })
    expect(await remaining()).toBe(0)
    await submitPetition(server, { submitter_id: submitter })
    expect(await remaining()).toBe(0)
  })

  it('hits_total counts the blocks of each submitter', async () => {
    const hits = 'petition_rate_limit_hits_total'
    const [ann, bob] = [randomUUID(), randomUUID()]
    const labels = [{ submitter_id: ann }, { submitter_id: bob }]
    const act = () => submitPetition(server, { submitter_id: ann })
    expect(await growth(hits, labels, act)).toEqual([0, 0])
    expect(await growth(hits, labels, act)).toEqual([0, 0])
    expect(await growth(hits, labels, act)).toEqual([1, 0])
    expect(await growth(hits, labels, act)).toEqual([1, 0])
  })

  it('names an anonymous submitter by its address', async () => {
    await submitPetition(server, { submitter_id: undefined })
    expect(sample(await scrape(), 'petition_rate_limit_remaining', { submitter_id: '127.0.0.1' })).toBe(1)
  })
})

describe('petition_queue_depth', () => {
  const depths = async (on: ServerProcess) => {
    const text = await scrape(on)
    return Object.fromEntries(states.map((state) => [state, sample(text, 'petition_queue_depth', { state })]))
  }
  const counted = async () => {
    const rows = await tables.query<{ state: string; n: string }>(
      'SELECT state, count(*) AS n FROM petitions GROUP BY state',
    )
    return Object.fromEntries(states.map((state) => [state, Number(rows.find((row) => row.state === state)?.n ?? 0)]))
  }

  it('follows every state, on each instance, within its time', async () => {
    for (const [n, state] of states.entries()) {
      const { id } = await received(server)
      if (n > 1) await transition(server, id, 'DELIBERATING')
      if (n > 0) await transition(server, id, state)
      const expected = await counted()
      expect(expected[state]).toBeGreaterThan(0)
      for (const on of [server, other]) {
        await until(
          `the gauges tell ${state}`,
          async () => JSON.stringify(await depths(on)) === JSON.stringify(expected),
          5_000,
        )
      }
    }
  })
})

describe('petition_queue_rejections_total and petition_queue_threshold', () => {
  let full: ServerProcess

  beforeAll(async () => {
    full = await startServer({
      DATABASE_URL: database.url,
      SPILLWAY_DB_SCHEMA: 'full',
      PETITION_QUEUE_THRESHOLD: '2',
    })
  })

  const rejections = async () => sample(await scrape(full), 'petition_queue_rejections_total')

  it('shows the configured threshold', async () => {
    expect(sample(await scrape(full), 'petition_queue_threshold')).toBe(2)
    expect(sample(await scrape(server), 'petition_queue_threshold')).toBe(200)
  })

  it('counts each refusal, by the transaction and before the body alike, and nothing else of it', async () => {
    for (let n = 0; n < 2; n++) await received(full)
    expect(await rejections()).toBe(0)
    const before = await scrape(full)
    expect((await submitPetition(full)).status).toBe(503)
    expect(await rejections()).toBe(1)
    for (let n = 0; n < 3; n++) expect((await submitPetition(full)).status).toBe(503)
    expect(await rejections()).toBe(4)
    const rest = (text: string) => text.replaceAll(/^petition_queue_(rejections|depth).*$/gm, '')
    expect(rest(await scrape(full))).toBe(rest(before))
  })
})
