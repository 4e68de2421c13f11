/** Petitions are read, listed and waited for through any instance. */
import { randomUUID } from 'node:crypto'
import { afterAll, beforeAll, describe, expect, it } from 'vitest'
import { freshDatabase, type TestDatabase } from '../../../spillway/test/setup/database.js'
import {
  expectProblem,
  hashOf,
  instantForm,
  petitionsPath,
  readPetition,
  received,
  transition,
  withdraw,
} from '../petition-calls.js'
import { endAll, get, type ServerProcess, startServer } from '../server-process.js'

let database: TestDatabase
let server: ServerProcess
let other: ServerProcess

beforeAll(async () => {
  database = await freshDatabase()
  const env = { DATABASE_URL: database.url }
  ;[server, other] = await Promise.all([startServer(env), startServer(env)])
})

afterAll(async () => {
  await endAll()
  await database.drop()
})

const faultsIn = (from: ServerProcess) => from.logs().filter(({ level }) => level === 'error' || level === 'fatal')
const list = (query: string, from = server) => get(from, `${petitionsPath}?${query}`)
const idsOf = (answer: Awaited<ReturnType<typeof list>>): unknown[] => answer.body.items.map((item) => item.petition_id)

describe('one petition', () => {
  it('has the members of its receipt and what became of it', async () => {
    const { id, submitter, answer } = await received(server, { realm: 'harbour', text: 'Mind the tide.' })
    const found = await readPetition(other, id)
    expect(found.status).toBe(200)
    expect(found.body).toEqual({
      ...answer.body,
      text: 'Mind the tide.',
      content_hash: hashOf('Mind the tide.'),
      submitter_id: submitter,
      fate_reason: null,
      version: 1,
      updated_at: answer.body.created_at,
    })
  })

  it('returns its fate, and that it changed', async () => {
    const { id } = await received(server)
    await transition(server, id, 'DELIBERATING')
    await transition(server, id, 'REFERRED', 'to the harbour master')
    const { body } = await readPetition(other, id)
    expect(body).toMatchObject({
      state: 'REFERRED',
      fate_reason: 'to the harbour master',
      version: 3,
      updated_at: expect.stringMatching(instantForm),
    })
    expect(String(body.updated_at) > body.created_at).toBe(true)
  })

  it('is found by its id in capitals', async () => {
    const { id } = await received(server)
    expect((await readPetition(server, id.toUpperCase())).body.petition_id).toBe(id)
  })

  it("is the client's address without a name", async () => {
    const { id } = await received(server, { submitter_id: undefined })
    expect((await readPetition(server, id)).body.submitter_id).toBe('127.0.0.1')
  })
})

describe('the list', () => {
  it('goes through a state page by page, oldest first, each once, with the total of all', async () => {
    const made: string[] = []
    for (let n = 0; n < 5; n++) {
      const { id } = await received(server)
      await transition(server, id, 'DELIBERATING')
      made.push(id)
    }
    const seen: unknown[] = []
    let cursor = ''
    for (let page = 0; page < 3; page++) {
      const answer = await list(`state=DELIBERATING&limit=2${cursor}`, page % 2 === 0 ? server : other)
      expect(answer.status).toBe(200)
      expect(answer.body.total).toBe(5)
      seen.push(...idsOf(answer))
      cursor = `&cursor=${answer.body.next_cursor}`
      expect(answer.body.next_cursor === null).toBe(page === 2)
    }
    expect(seen).toEqual(made)
  })

  it('skips none when items of the first page leave the state before the second is read', async () => {
    const made: string[] = []
    for (let n = 0; n < 4; n++) made.push((await received(server)).id)
    const start = await list('limit=200')
    const before = start.body.items.length - made.length
    const first = await list(`limit=${before + 2}`)
    expect(idsOf(first).slice(-2)).toEqual(made.slice(0, 2))
    for (const id of made.slice(0, 2)) await transition(server, id, 'ESCALATED')
    const { id: later } = await received(server)
    const rest = await list(`limit=200&cursor=${first.body.next_cursor}`)
    expect(idsOf(rest)).toEqual([...made.slice(2), later])
  })

  it('is of RECEIVED when no state is named', async () => {
    const { id } = await received(server)
    const all = await list('limit=200')
    expect(idsOf(all)).toContain(id)
    expect(new Set(all.body.items.map((item) => item.state))).toEqual(new Set(['RECEIVED']))
    expect(all.body.total).toBe(all.body.items.length)
  })

  it('has complete petitions', async () => {
    const { id } = await received(server)
    const found = (await list('limit=200')).body.items.find((item) => item.petition_id === id)
    expect(found).toEqual((await readPetition(server, id)).body)
  })

  it('is empty with total 0 for a state that none is in', async () => {
    expect((await list('state=NO_RESPONSE')).body).toEqual({ items: [], next_cursor: null, total: 0 })
  })

  it.each([
    ['state=UNKNOWN', '/state'],
    ['limit=0', '/limit'],
    ['limit=201', '/limit'],
    ['limit=x', '/limit'],
  ])('refuses %s', async (query, path) => {
    const answer = await list(query)
    expectProblem(answer, 400, 'invalid_request')
    expect(answer.body.errors[0]?.path).toBe(path)
  })
})

describe('status', () => {
  const status = (from: ServerProcess, id: string, query = '') =>
    get(from, `${petitionsPath}/${id}/status${query === '' ? '' : `?${query}`}`)
  /** Asks, and comes back when it waits in the server: what was asked behind it on that instance has been answered. */
  async function begin(from: ServerProcess, id: string, query: string) {
    const answer = status(from, id, query).then((received) => ({ ...received, at: performance.now() }))
    for (let n = 0; n < 5; n++) await readPetition(from, id)
    return { answer }
  }

  it('is answered at once without a version, and with another version', async () => {
    const { id, answer } = await received(server)
    const now = {
      petition_id: id,
      state: 'RECEIVED',
      fate_reason: null,
      version: 1,
      updated_at: answer.body.created_at,
    }
    for (const query of ['', 'wait=30', 'version=0&wait=30', 'version=2&wait=30']) {
      const answer = await status(other, id, query)
      expect(answer.status).toBe(200)
      expect(answer.body).toEqual(now)
      expect(answer.ms).toBeLessThan(5_000)
    }
  })

  it('waits for a change that another instance commits, and returns it at once', async () => {
    const lateMs: number[] = []
    for (let n = 0; n < 5; n++) {
      const { id } = await received(server)
      const waits = await begin(other, id, 'version=1&wait=30')
      await transition(server, id, 'DELIBERATING')
      const committed = performance.now()
      const answer = await waits.answer
      expect(answer.status).toBe(200)
      expect(answer.body).toMatchObject({ petition_id: id, state: 'DELIBERATING', version: 2 })
      lateMs.push(answer.at - committed)
    }
    // The look that is repeated each second would be late by half a second in the middle.
    lateMs.sort((a, b) => a - b)
    expect(lateMs[2], lateMs.join(' ')).toBeLessThan(100)
  })

  it('wakes all that wait for it', async () => {
    const { id, submitter } = await received(server)
    const waits = await Promise.all(
      Array.from({ length: 8 }, (_, n) => begin(n % 2 === 0 ? server : other, id, 'version=1&wait=30')),
    )
    await withdraw(server, id, submitter)
    for (const answer of await Promise.all(waits.map((wait) => wait.answer))) {
      expect(answer.body).toMatchObject({ state: 'ACKNOWLEDGED', fate_reason: 'WITHDRAWN', version: 2 })
      expect(answer.ms).toBeLessThan(10_000)
    }
  })

  it('is not woken by the change of another petition', async () => {
    const [waited, changed] = [await received(server), await received(server)]
    const waits = await begin(other, waited.id, 'version=1&wait=0.5')
    await transition(server, changed.id, 'ESCALATED')
    expect((await waits.answer).status).toBe(304)
  })

  it('is 304 without a body when nothing changes in time', async () => {
    const { id } = await received(server)
    const answer = await status(other, id, 'version=1&wait=0.4')
    expect(answer.status).toBe(304)
    expect(answer.text).toBe('')
    expect(answer.ms).toBeGreaterThan(390)
    expect(answer.ms).toBeLessThan(5_000)
  })

  it('is 304 at once with wait=0', async () => {
    const { id } = await received(server)
    const answer = await status(server, id, 'version=1&wait=0')
    expect(answer.status).toBe(304)
    expect(answer.ms).toBeLessThan(5_000)
  })

  it.each(['version=-1', 'version=x', 'version=1.5', 'version=1&wait=61', 'version=1&wait=-1'])(
    'refuses %s',
    async (query) => {
      const { id } = await received(server)
      expectProblem(await status(server, id, query), 400, 'invalid_request')
    },
  )

  it('is 404 for a petition that is not there', async () => {
    expectProblem(await status(server, randomUUID(), 'version=1&wait=30'), 404, 'not_found')
  })

  it('of a caller that left costs nothing: the instance stops at once', async () => {
    const leaving = await startServer({ DATABASE_URL: database.url })
    const { id } = await received(server)
    const gone = new AbortController()
    const waits = fetch(`${leaving.origin}${petitionsPath}/${id}/status?version=1&wait=60`, { signal: gone.signal })
    for (let look = 0; look < 5; look++) await readPetition(leaving, id)
    gone.abort()
    await expect(waits).rejects.toThrow()
    const began = performance.now()
    expect(await leaving.stop()).toEqual({ code: 0, signal: null })
    expect(performance.now() - began).toBeLessThan(10_000)
    expect(faultsIn(leaving)).toEqual([])
  })

  it('that is waited for does not hold up the stop of an instance, and is no fault', async () => {
    const stopping = await startServer({ DATABASE_URL: database.url })
    const { id } = await received(server)
    const waits = status(stopping, id, 'version=1&wait=60').catch(() => null)
    for (let look = 0; look < 5; look++) await readPetition(stopping, id)
    const began = performance.now()
    expect(await stopping.stop()).toEqual({ code: 0, signal: null })
    expect(performance.now() - began).toBeLessThan(10_000)
    const answer = await waits
    if (answer !== null) expect([304, 503]).toContain(answer.status)
    expect(faultsIn(stopping)).toEqual([])
  })
})
