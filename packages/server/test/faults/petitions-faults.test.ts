/** Petitions while things break: what was answered is true, what was not is found by its key, and nothing is there twice. */
import { randomUUID } from 'node:crypto'
import { chmod, mkdtemp, rm } from 'node:fs/promises'
import { tmpdir } from 'node:os'
import { join } from 'node:path'
import { type EmbeddedServer, startEmbedded } from '@spillway/embedded-postgres'
import { afterAll, afterEach, beforeAll, beforeEach, describe, expect, it } from 'vitest'
import { addressOf, type HalfOpenProxy, startHalfOpenProxy, through } from '../../../spillway/test/half-open-proxy.js'
import { at, type Fleet, startFleet, submitPetition, verify } from '../petitions-fleet.js'
import {
  type Answer,
  endAll,
  get,
  type ServerProcess,
  sample,
  startServer,
  until,
  untilReady,
} from '../server-process.js'

const connections = 64

/** One submission of a client with its key, and its last answer; null: none, the connection broke. */
interface Sent {
  key: string
  answer: Answer | null
}

const send = async (server: ServerProcess, key: string): Promise<Sent> => {
  const headers = { 'idempotency-key': key, 'x-user-id': key }
  // The text identifies the submission, whatever id it gets.
  const answer = await submitPetition(server, { text: key, submitter_id: undefined }, headers).catch(() => null)
  return { key, answer }
}

/** The ids of what is there, by key. */
async function stored(f: Fleet): Promise<Map<string, string[]>> {
  const rows = await f.sql<{ text: string; ids: string[] }>(
    'SELECT text, array_agg(id::text) AS ids FROM spillway.petitions GROUP BY text',
  )
  return new Map(rows.map(({ text, ids }) => [text, ids]))
}

/** After 201 it is stored once. After any other answer it is stored at most once, and its key finds it. */
async function expectTrue(f: Fleet, server: ServerProcess, sent: readonly Sent[]): Promise<void> {
  const before = await stored(f)
  const uncertain: string[] = []
  for (const { key, answer } of sent) {
    if (answer?.status === 201) {
      expect(before.get(key)).toEqual([answer.body.petition_id])
      continue
    }
    if (answer !== null) expectAway(answer)
    uncertain.push(key)
  }
  const again = await Promise.all(uncertain.map((key) => send(server, key)))
  const after = await stored(f)
  for (const { key, answer } of again) {
    expect(answer?.status).toBe(201)
    expect(answer?.headers.get('idempotent-replayed')).toBe(before.has(key) ? 'true' : null)
    expect(after.get(key)).toEqual([answer?.body.petition_id])
    expect(after.get(key)).toEqual(before.get(key) ?? after.get(key))
  }
}

function expectAway({ status, body, headers }: Answer): void {
  expect(status).toBe(503)
  // The store did not answer, or too many writes wait for it already.
  expect(['store_unavailable', 'overloaded']).toContain(body.code)
  expect(body.retry_after_seconds).toBeGreaterThanOrEqual(1)
  expect(headers.get('retry-after')).toBe(String(body.retry_after_seconds))
}

async function expectSound(f: Fleet, server: ServerProcess): Promise<void> {
  expect(await f.audit()).toEqual([])
  expect(await verify(server)).toMatchObject({ ok: true })
  const [counted] = await f.sql(`SELECT (SELECT count(*)::int FROM spillway.petitions) AS petitions,
    (SELECT count(*)::int FROM spillway.ledger WHERE type = 'petition.submission.received') AS receipts,
    (SELECT sum(sums[cardinality(sums)])::int FROM spillway.rates) AS used`)
  expect(counted).toMatchObject({ receipts: counted?.petitions, used: counted?.petitions })
}

/** Makes the transactions of petitions wait for the test, at their insert or at their commit; one named first by itself. */
async function holdPetitions(f: Fleet, when: 'insert' | 'commit') {
  const [first, others] = [4_242, 4_243]
  await f.sql(`CREATE FUNCTION public.hold() RETURNS trigger LANGUAGE plpgsql AS $$ BEGIN
    PERFORM pg_advisory_xact_lock_shared(CASE NEW.text WHEN 'first' THEN ${first} ELSE ${others} END); RETURN NULL; END $$`)
  const deferred = when === 'commit' ? 'DEFERRABLE INITIALLY DEFERRED' : 'NOT DEFERRABLE'
  await f.sql(
    `CREATE CONSTRAINT TRIGGER hold AFTER INSERT ON spillway.petitions ${deferred} FOR EACH ROW EXECUTE FUNCTION public.hold()`,
  )
  const holder = await f.session()
  // It may be killed with its server.
  holder.on('error', () => undefined)
  await holder.query('SELECT pg_advisory_lock($1), pg_advisory_lock($2)', [first, others])
  return {
    waiting: (which: 'first' | 'others') =>
      untilWaiting(f, { where: `l.locktype = 'advisory' AND l.objid = ${which === 'first' ? first : others}` }),
    release: (which: 'first' | 'others') =>
      holder.query('SELECT pg_advisory_unlock($1)', [which === 'first' ? first : others]),
    remove: () =>
      until('the database answers', () => f.sql('DROP FUNCTION IF EXISTS public.hold() CASCADE').catch(() => null)),
  }
}

/** Sessions of this database that wait for a lock. */
const untilWaiting = (f: Fleet, { where = 'true', sessions = 1 }: { where?: string; sessions?: number } = {}) =>
  until(`${sessions} sessions wait (${where})`, async () => {
    const [found] = await f.sql<{ n: number }>(
      `SELECT count(DISTINCT l.pid)::int AS n FROM pg_locks l JOIN pg_stat_activity a ON a.pid = l.pid
       WHERE NOT l.granted AND a.datname = current_database() AND ${where}`,
    )
    return (found?.n ?? 0) >= sessions
  })

/** Submissions whose body is about to be, or was, read; the next flush takes them together. */
async function untilAdmitted<T>(server: ServerProcess, n: number, begin: () => T): Promise<T> {
  const admitted = async () => {
    const { text } = await get(server, '/metrics')
    return sample(text, 'spillway_admission_duration_seconds_count', { gate: 'capacity' }) ?? 0
  }
  const before = await admitted()
  const begun = begin()
  await until(`${n} more are there`, async () => (await admitted()) >= before + n)
  return begun
}

describe('PostgreSQL killed', () => {
  let dir: string
  let own: EmbeddedServer
  let f: Fleet
  const log = { info: () => undefined, warn: () => undefined, error: () => undefined }

  beforeAll(async () => {
    dir = await mkdtemp(join(tmpdir(), 'spillway-petitions-'))
    await chmod(dir, 0o755)
    const settings = { min_wal_size: '80MB', shared_buffers: '16MB' }
    own = await startEmbedded({ dataDir: join(dir, 'data'), log, settings })
    f = await startFleet({
      url: own.url,
      env: { SPILLWAY_STORE_TIMEOUT_MS: '2000', PETITION_QUEUE_THRESHOLD: '1000000' },
    })
  })

  afterAll(async () => {
    await f.close()
    await own.stop()
    await rm(dir, { recursive: true, force: true })
  })

  const kill = async (): Promise<void> => {
    const { pid } = own
    process.kill(pid, 'SIGKILL')
    await until('PostgreSQL runs again', () => own.pid !== pid, 30_000)
  }

  it(`in the middle of ${connections} that go on and on: every answer was true`, { timeout: 90_000 }, async () => {
    const server = f.next()
    const sent: Sent[] = []
    let stop = false
    const load = Array.from({ length: connections }, async () => {
      while (!stop) sent.push(await send(server, randomUUID()))
    })
    const accepted = () => sent.filter(({ answer }) => answer?.status === 201).length
    await until('some are accepted', () => accepted() > 2 * connections)
    const killing = kill()
    await until('some are refused', () => sent.some(({ answer }) => answer?.status === 503))
    await killing
    const before = accepted()
    await until('they are accepted again', () => accepted() > before + connections, 20_000)
    stop = true
    await Promise.all(load)
    await expectTrue(f, server, sent)
    await expectSound(f, server)
  })

  it(`with ${connections} in one transaction, before its commit: none is there, and their keys are free`, async () => {
    const server = f.next()
    const hold = await holdPetitions(f, 'insert')
    const first = send(server, 'first')
    await hold.waiting('first')
    const keys = Array.from({ length: connections }, () => randomUUID())
    const sending = await untilAdmitted(server, connections, () => keys.map((key) => send(server, key)))
    await hold.release('first')
    expect((await first).answer?.status).toBe(201)
    await hold.waiting('others')
    await kill()
    const sent = await Promise.all(sending)
    for (const { answer } of sent) expect(answer?.status).toBe(503)
    await hold.remove()
    const there = await stored(f)
    expect(keys.filter((key) => there.has(key))).toEqual([])
    await untilReady(server)
    await expectTrue(f, server, sent)
    await expectSound(f, server)
  })
})

describe('a server killed', () => {
  let f: Fleet
  beforeAll(async () => {
    f = await startFleet({ instances: 2 })
  })
  afterAll(() => f.close())

  it('between commit and answer: the same keys find the petitions elsewhere, each once', async () => {
    const [doomed, other] = [f.next(), f.next()]
    const hold = await holdPetitions(f, 'commit')
    const first = send(doomed, 'first')
    await hold.waiting('first')
    const keys = Array.from({ length: 8 }, () => randomUUID())
    const sending = await untilAdmitted(doomed, keys.length, () => keys.map((key) => send(doomed, key)))
    await hold.release('first')
    expect((await first).answer?.status).toBe(201)
    // The database got the COMMIT. It commits even if no client is connected any more.
    await hold.waiting('others')
    await doomed.kill()
    const sent = await Promise.all(sending)
    expect(sent).toEqual(keys.map((key) => ({ key, answer: null })))
    await hold.release('others')
    await until('they are committed', async () => (await stored(f)).size === 1 + keys.length)
    await expectTrue(f, other, sent)
    expect((await stored(f)).size).toBe(1 + keys.length)
    await hold.remove()
    await expectSound(f, other)
  })
})

describe('the store away', () => {
  let f: Fleet
  let proxy: HalfOpenProxy
  let server: ServerProcess

  beforeAll(async () => {
    f = await startFleet({ instances: 0 })
  })
  beforeEach(async () => {
    proxy = await startHalfOpenProxy(addressOf(f.url))
    server = await startServer({ DATABASE_URL: through(proxy, f.url), PETITION_RATE_LIMIT_PER_HOUR: '1' })
  })
  afterEach(async () => {
    await endAll()
    await proxy.close()
  })
  afterAll(() => f.close())

  it.each(['refuse', 'stall'] as const)('%s: 503 with Retry-After, never admitted', async (fault) => {
    // One who has nothing left, and one who has: neither may pass unseen.
    const limited = { 'x-user-id': randomUUID() }
    const anonymous = { submitter_id: undefined }
    expect((await submitPetition(server, anonymous, limited)).status).toBe(201)
    await proxy[fault]()
    const keys = Array.from({ length: 20 }, () => randomUUID())
    const blocked = submitPetition(server, anonymous, limited)
    const sent = await Promise.all(keys.map((key) => send(server, key)))
    for (const answer of [await blocked, ...sent.map((one) => one.answer)]) {
      if (answer === null) throw new Error('the connection broke')
      expectAway(answer)
    }
    const there = await stored(f)
    expect(keys.filter((key) => there.has(key))).toEqual([])
    await proxy.pass()
    await untilReady(server)
    await expectTrue(f, server, sent)
    expect((await submitPetition(server, anonymous, limited)).status).toBe(429)
    await expectSound(f, server)
  })
})

/** Two transactions that take locks in different orders: PostgreSQL would end one of them after a second. */
describe('transactions that meet', () => {
  const carl = randomUUID()
  const usedKey = { 'idempotency-key': randomUUID() }
  let f: Fleet
  const server = () => at(f.servers, 0)

  beforeEach(async () => {
    f = await startFleet({ env: { PETITION_RATE_LIMIT_PER_HOUR: '3' } })
    expect((await submitPetition(server(), { submitter_id: carl }, usedKey)).status).toBe(201)
  })
  afterEach(() => f.close())

  const lock = async (rows: string) => {
    const session = await f.session()
    await session.query('BEGIN')
    await session.query(`SELECT FROM spillway.${rows} FOR UPDATE`)
    return () => session.query('COMMIT')
  }

  /** Sent while a flush is held, so that they share the next one; when this resolves, that one waits for a lock. */
  const inOneFlush = async (alreadyWaiting: number, n: number, submit: () => Promise<Answer>[]) => {
    const release = await lock("gates WHERE name = 'petitions'")
    // Its key was used for another text: it waits for the gate, and for nothing behind it.
    const held = submitPetition(server(), { submitter_id: carl, text: 'another' }, usedKey)
    await untilWaiting(f, { sessions: alreadyWaiting + 1 })
    const together = await untilAdmitted(server(), n, submit)
    await release()
    expect((await held).status).toBe(422)
    await untilWaiting(f, { sessions: alreadyWaiting + 1 })
    return { answers: Promise.all(together) }
  }

  it('one that runs from the queue, and the flush with the next of its lane', async () => {
    const ann = { submitter_id: randomUUID() }
    const release = await lock('ledger_head')
    expect((await submitPetition(server(), ann, { prefer: 'respond-async' })).status).toBe(202)
    await untilWaiting(f)
    const flush = await inOneFlush(1, 2, () => [submitPetition(server(), ann), submitPetition(server())])
    await release()
    // Whether its turn has come at once or not, it is taken.
    expect((await flush.answers).filter(({ status }) => status >= 300)).toEqual([])
    await until('all are received', async () => (await f.sql('SELECT FROM spillway.petitions')).length === 4)
    expect(await f.sql('SELECT attempts FROM spillway.history WHERE attempts > 1')).toEqual([])
    await expectSound(f, server())
  })

  it('the report of blocks, and the flush that accepts one and blocks another', async () => {
    const ann = { submitter_id: randomUUID() }
    for (let i = 0; i < 5; i++) await submitPetition(server(), ann)
    // The second of the two blocks is not reported yet, and its minute is over.
    await f.sql('UPDATE spillway.petition_blocks SET minute = minute - 1')
    const release = await lock('ledger_head')
    const flush = await inOneFlush(0, 2, () => [submitPetition(server()), submitPetition(server(), ann)])
    const recording = f.sql('SELECT spillway.petitions_record_blocks(1000)')
    await untilWaiting(f, { sessions: 2 })
    await release()
    expect((await flush.answers).map(({ status }) => status)).toEqual([201, 429])
    await recording
  })
})
