/** Petitions at the limits: real servers on one database, many at once, and the database's clock in the test's hand. */
import { randomUUID } from 'node:crypto'
import { afterAll, beforeAll, describe, expect, it } from 'vitest'
import { at, type Fleet, move, startFleet, statuses, submitPetition, times } from '../petitions-fleet.js'
import { type Answer, get, sample, until } from '../server-process.js'

const instances = 4

interface LedgerEvent extends Record<string, unknown> {
  type: string
  payload: { from?: string; depth?: number; petition_id?: string }
}

const ledgerOf = (fleet: Fleet) =>
  fleet.sql<LedgerEvent>('SELECT type, payload::json AS payload FROM spillway.ledger ORDER BY seq')
const gate = async (fleet: Fleet) =>
  (await fleet.sql("SELECT held::int, overflowing FROM spillway.gates WHERE name = 'petitions'"))[0]

describe('capacity', () => {
  const threshold = 100
  const hysteresis = 10
  let fleet: Fleet
  let accepted: string[] = []

  beforeAll(async () => {
    fleet = await startFleet({
      instances,
      env: {
        PETITION_QUEUE_THRESHOLD: String(threshold),
        PETITION_QUEUE_HYSTERESIS: String(hysteresis),
        PETITION_QUEUE_CACHE_TTL: '0.1',
      },
    })
  })
  afterAll(() => fleet.close())

  const acknowledge = (id: string) => move(fleet.next(), id, 'ACKNOWLEDGED')
  /** Every instance has looked at the database since this many are held. */
  const allKnow = (held: number) =>
    until(`all know of ${held}`, async () => {
      const seen = await Promise.all(fleet.servers.map(async (server) => (await get(server, '/metrics')).text))
      return seen.every((text) => sample(text, 'petition_queue_depth', { state: 'RECEIVED' }) === held)
    })

  it('2,000 at once on four instances: exactly the threshold is held', { timeout: 90_000 }, async () => {
    const answers = await times(2_000, () => submitPetition(fleet.next()))
    expect(statuses(answers)).toEqual({ 201: threshold, 503: 2_000 - threshold })
    for (const { status, body, headers } of answers) {
      if (status === 201) continue
      expect(body).toMatchObject({ type: 'https://archon72.io/errors/queue-overflow', title: 'Queue Overflow' })
      expect(Number(headers.get('retry-after'))).toBeGreaterThanOrEqual(60)
      expect(Number(headers.get('retry-after'))).toBeLessThanOrEqual(66)
    }
    accepted = answers.filter(({ status }) => status === 201).map(({ body }) => String(body.petition_id))
    const rows = await fleet.sql<{ id: string }>("SELECT id FROM spillway.petitions WHERE state = 'RECEIVED'")
    expect(rows.map(({ id }) => id).sort()).toEqual([...accepted].sort())
    expect(await gate(fleet)).toEqual({ held: threshold, overflowing: true })
    expect(await fleet.audit()).toEqual([])
  })

  it('refused ones do not count for any rate', async () => {
    const [counted] = await fleet.sql('SELECT sum(sums[cardinality(sums)])::int AS n FROM spillway.rates')
    expect(counted).toEqual({ n: threshold })
  })

  it('freed down to the lower bound, it stays closed on every instance', async () => {
    const freed = await Promise.all(accepted.splice(0, hysteresis).map(acknowledge))
    expect(statuses(freed)).toEqual({ 200: hysteresis })
    await allKnow(threshold - hysteresis)
    const answers = await Promise.all(fleet.servers.map((server) => submitPetition(server)))
    expect(statuses(answers)).toEqual({ 503: instances })
    expect(await gate(fleet)).toEqual({ held: threshold - hysteresis, overflowing: true })
  })

  it('below the lower bound, all accept again', async () => {
    expect((await acknowledge(at(accepted.splice(0, 1), 0))).status).toBe(200)
    await allKnow(threshold - hysteresis - 1)
    const answers = await Promise.all(fleet.servers.map((server) => submitPetition(server)))
    expect(statuses(answers)).toEqual({ 201: instances })
    accepted.push(...answers.map(({ body }) => String(body.petition_id)))
  })

  it('which was one overflow, started and ended once', async () => {
    const overflows = (await ledgerOf(fleet)).filter(({ type }) => type.startsWith('petition.queue.overflow'))
    expect(overflows).toMatchObject([
      { type: 'petition.queue.overflow.started', payload: { depth: threshold } },
      { type: 'petition.queue.overflow.ended', payload: { depth: threshold - hysteresis - 1 } },
    ])
  })

  it('submissions and transitions at once: at no moment were more held, or any taken while it was closed', {
    timeout: 90_000,
  }, async () => {
    const moves = accepted.splice(0, 60)
    await Promise.all([
      times(600, async () => {
        const { status, body } = await submitPetition(fleet.next())
        if (status === 201) moves.push(String(body.petition_id))
        const id = moves.shift()
        if (id !== undefined) await acknowledge(id)
      }),
      ...moves.splice(0, 30).map(acknowledge),
    ])
    let held = 0
    let closed = false
    for (const { type, payload } of await ledgerOf(fleet)) {
      if (type === 'petition.submission.received') {
        expect(closed).toBe(false)
        held++
        expect(held).toBeLessThanOrEqual(threshold)
      } else if (type === 'petition.queue.overflow.started') {
        expect({ closed, held, reported: payload.depth }).toEqual({
          closed: false,
          held: threshold,
          reported: threshold,
        })
        closed = true
      } else if (type === 'petition.queue.overflow.ended') {
        const reported = threshold - hysteresis - 1
        expect({ closed, held, reported: payload.depth }).toEqual({ closed: true, held: reported, reported })
        closed = false
      } else if (payload.from === 'RECEIVED') {
        held--
      }
    }
    expect(await gate(fleet)).toEqual({ held, overflowing: closed })
    expect(await fleet.audit()).toEqual([])
  })
})

describe('rate', () => {
  const realmLimit = 20
  const metaLimit = 15
  let fleet: Fleet

  beforeAll(async () => {
    fleet = await startFleet({
      instances,
      env: {
        PETITION_RATE_LIMIT_REALM_PER_HOUR: String(realmLimit),
        PETITION_RATE_LIMIT_META_PER_HOUR: String(metaLimit),
      },
    })
  })
  afterAll(() => fleet.close())

  const used = async () =>
    (
      await fleet.sql<{ n: number }>(
        'SELECT coalesce(sum(sums[cardinality(sums)] - sums[1]), 0)::int AS n FROM spillway.rates',
      )
    )[0]?.n
  const detailsOf = (answers: readonly Answer[]) =>
    new Set(answers.filter(({ status }) => status === 429).map(({ body }) => body.detail))

  it('500 of one submitter at once on four instances: exactly ten', { timeout: 90_000 }, async () => {
    const submitter_id = randomUUID()
    const before = await used()
    const answers = await times(500, () => submitPetition(fleet.next(), { submitter_id }))
    expect(statuses(answers)).toEqual({ 201: 10, 429: 490 })
    expect(detailsOf(answers)).toEqual(new Set(['Maximum 10 petitions per hour exceeded']))
    expect(await fleet.sql('SELECT FROM spillway.petitions WHERE submitter = $1', [submitter_id])).toHaveLength(10)
    // The refused ones are in no count, and hold no place.
    expect(await used()).toBe((before ?? 0) + 10)
    expect(await fleet.audit()).toEqual([])
  })

  it('returns exactly how many are left', async () => {
    const submitter_id = randomUUID()
    const answers = await times(10, () => submitPetition(fleet.next(), { submitter_id }))
    const left = answers.map(({ headers }) => Number(headers.get('x-ratelimit-remaining')))
    expect(Math.min(...left)).toBe(0)
    expect(left.every((n) => n >= 0 && n <= 9)).toBe(true)
    const another = await submitPetition(fleet.next(), { submitter_id: randomUUID() })
    expect(another.headers.get('x-ratelimit-remaining')).toBe('9')
  })

  it.each([
    ['realm', realmLimit, { realm: 'north' }, `Maximum ${realmLimit} petitions per hour for realm north exceeded`],
    ['type', metaLimit, { type: 'META' }, `Maximum ${metaLimit} petitions per hour of type META exceeded`],
  ])('of one %s: exactly %i of many submitters, and the detail names it', async (_, limit, members, detail) => {
    const submitters = Array.from({ length: 200 }, () => randomUUID())
    const answers = await times(200, (i) => submitPetition(fleet.next(), { ...members, submitter_id: submitters[i] }))
    expect(statuses(answers)).toEqual({ 201: limit, 429: 200 - limit })
    expect(detailsOf(answers)).toEqual(new Set([detail]))
    // A refusal by one limit takes nothing from the others: this submitter still has all ten.
    const spared = submitters[answers.findIndex(({ status }) => status === 429)]
    const others = await times(11, () => submitPetition(fleet.next(), { submitter_id: spared }))
    expect(statuses(others)).toEqual({ 201: 10, 429: 1 })
  })

  it('of all together: exactly the global limit, and the detail names it', async () => {
    const limit = 30
    const env = { PETITION_RATE_LIMIT_GLOBAL_PER_HOUR: String(limit), SPILLWAY_DB_SCHEMA: 'global' }
    const first = await fleet.start(env)
    const servers = [first, await fleet.start(env)]
    const answers = await times(200, (i) => submitPetition(at(servers, i % 2)))
    expect(statuses(answers)).toEqual({ 201: limit, 429: 200 - limit })
    expect(detailsOf(answers)).toEqual(new Set([`Maximum ${limit} petitions per hour from all submitters exceeded`]))
    expect(await fleet.sql('SELECT FROM global.petitions')).toHaveLength(limit)
    await Promise.all(servers.map((server) => server.stop()))
  })

  it('an item that cannot be inserted fails alone, and releases its count and capacity', async () => {
    const unlucky = randomUUID()
    await fleet.sql(`CREATE FUNCTION public.refuse_one() RETURNS trigger LANGUAGE plpgsql AS $$ BEGIN
      IF NEW.submitter = '${unlucky}' THEN RAISE EXCEPTION 'not this one' USING ERRCODE = 'check_violation'; END IF;
      RETURN NEW; END $$`)
    await fleet.sql(
      'CREATE TRIGGER refuse_one BEFORE INSERT ON spillway.petitions FOR EACH ROW EXECUTE FUNCTION public.refuse_one()',
    )
    const key = { 'idempotency-key': randomUUID() }
    const unluckyOne = { submitter_id: unlucky }
    // Into one flush with its neighbours, on one instance.
    const server = fleet.next()
    const [failed, ...neighbours] = await Promise.all([
      submitPetition(server, unluckyOne, key),
      ...Array.from({ length: 40 }, () => submitPetition(server)),
    ])
    expect(failed).toMatchObject({ status: 500, body: { code: 'internal_error' } })
    expect(statuses(neighbours)).toEqual({ 201: 40 })
    expect(await fleet.audit()).toEqual([])
    await fleet.sql('DROP TRIGGER refuse_one ON spillway.petitions')
    const again = await submitPetition(server, unluckyOne, key)
    expect(again.headers.get('idempotent-replayed')).toBeNull()
    expect(again.headers.get('x-ratelimit-remaining')).toBe('9')
  })

  it('one key, 60 at once on four instances and once more later: one petition, counted once', async () => {
    const submitter_id = randomUUID()
    const key = { 'idempotency-key': randomUUID() }
    const answers = await times(60, () => submitPetition(fleet.next(), { submitter_id }, key))
    answers.push(...(await Promise.all(fleet.servers.map((server) => submitPetition(server, { submitter_id }, key)))))
    const fresh = answers.filter(({ status, headers }) => status === 201 && headers.get('idempotent-replayed') === null)
    expect(fresh).toHaveLength(1)
    for (const { status, body } of answers) {
      expect([201, 409]).toContain(status)
      if (status === 201) expect(body).toEqual(fresh[0]?.body)
    }
    for (const later of answers.slice(-instances)) expect(later.headers.get('idempotent-replayed')).toBe('true')
    const next = await submitPetition(fleet.next(), { submitter_id })
    expect(next.headers.get('x-ratelimit-remaining')).toBe('8')
    expect(await fleet.sql('SELECT FROM spillway.petitions WHERE submitter = $1', [submitter_id])).toHaveLength(2)
  })

  it('one key and another text: 422, and nothing is stored', async () => {
    const submitter_id = randomUUID()
    const key = { 'idempotency-key': randomUUID() }
    expect((await submitPetition(fleet.next(), { submitter_id }, key)).status).toBe(201)
    const other = await submitPetition(fleet.next(), { submitter_id, text: 'Something else.' }, key)
    expect(other).toMatchObject({ status: 422, body: { code: 'idempotency_mismatch' } })
    expect(await fleet.sql('SELECT FROM spillway.petitions WHERE submitter = $1', [submitter_id])).toHaveLength(1)
  })
})

describe('the window', () => {
  let fleet: Fleet

  beforeAll(async () => {
    fleet = await startFleet({ env: { PETITION_RATE_LIMIT_TTL_HOURS: '3' } })
  })
  afterAll(() => fleet.close())

  const day = '2031-05-10T'
  const submitAt = async (time: string, submitter_id: string, n: number, server = fleet.next()) => {
    await fleet.setClock(`${day}${time}Z`)
    const answers: Answer[] = []
    for (let i = 0; i < n; i++) answers.push(await submitPetition(server, { submitter_id }))
    return answers
  }
  function expectFreeAt(answer: Answer | undefined, now: string, free: string): void {
    expect(answer?.status).toBe(429)
    expect(answer?.body.rate_limit_reset).toBe(`${day}${free}.000Z`)
    expect(answer?.headers.get('x-ratelimit-reset')).toBe(String(Date.parse(`${day}${free}Z`) / 1_000))
    const seconds = (Date.parse(`${day}${free}Z`) - Date.parse(`${day}${now}Z`)) / 1_000
    const retryAfter = Number(answer?.headers.get('retry-after'))
    expect(retryAfter).toBeGreaterThanOrEqual(Math.ceil(seconds))
    expect(retryAfter).toBeLessThanOrEqual(Math.ceil(seconds * 1.1))
  }

  it('a bucket counts until its minute is a window ago, to the millisecond', async () => {
    const who = randomUUID()
    expect(statuses(await submitAt('10:00:59.999', who, 10))).toEqual({ 201: 10 })
    expect(statuses(await submitAt('10:59:59.999', who, 1))).toEqual({ 429: 1 })
    expect(statuses(await submitAt('11:00:00.000', who, 11))).toEqual({ 201: 10, 429: 1 })
  })

  it('the reset header is the time when a slot is free, bucket after bucket', async () => {
    const who = randomUUID()
    await submitAt('10:00:30.000', who, 6)
    await submitAt('10:05:10.000', who, 4)
    expectFreeAt((await submitAt('10:06:00.000', who, 1))[0], '10:06:00.000', '11:00:00')
    expectFreeAt((await submitAt('10:59:59.250', who, 1))[0], '10:59:59.250', '11:00:00')
    const after = await submitAt('11:00:00.000', who, 7)
    expect(statuses(after)).toEqual({ 201: 6, 429: 1 })
    expectFreeAt(after[6], '11:00:00.000', '11:05:00')
    expect(statuses(await submitAt('11:05:00.000', who, 5))).toEqual({ 201: 4, 429: 1 })
  })

  it('after the limit was lowered, the reset is when enough buckets have left', async () => {
    const who = randomUUID()
    await submitAt('10:00:30.000', who, 3)
    await submitAt('10:01:30.000', who, 3)
    await submitAt('10:02:30.000', who, 4)
    const strict = await fleet.start({ PETITION_RATE_LIMIT_PER_HOUR: '5' })
    // At 11:00 seven are left, which is more than five; at 11:01 four.
    const [refused] = await submitAt('10:10:00.000', who, 1, strict)
    expectFreeAt(refused, '10:10:00.000', '11:01:00')
    expect(statuses(await submitAt('11:01:00.000', who, 2, strict))).toEqual({ 201: 1, 429: 1 })
    await strict.stop()
  })

  it('of another length counts the same petitions, on instances side by side too', async () => {
    const who = randomUUID()
    const long = fleet.next()
    const short = await fleet.start({ PETITION_RATE_LIMIT_WINDOW_MINUTES: '5' })
    expect(statuses(await submitAt('10:00:30.000', who, 6, long))).toEqual({ 201: 6 })
    const shared = await submitAt('10:02:30.000', who, 5, short)
    expect(statuses(shared)).toEqual({ 201: 4, 429: 1 })
    expectFreeAt(shared[4], '10:02:30.000', '10:05:00')
    // Six have left the short window, and none the long one.
    expect(statuses(await submitAt('10:06:00.000', who, 6, short))).toEqual({ 201: 6 })
    expectFreeAt((await submitAt('10:06:30.000', who, 1, long))[0], '10:06:30.000', '11:02:00')
    const [alone] = await submitAt('10:12:00.000', who, 1, short)
    expect(alone?.headers.get('x-ratelimit-remaining')).toBe('9')
    expect(alone?.headers.get('ratelimit')).toBe('"petitions";r=9;t=300')
    expect(statuses(await submitAt('11:01:59.000', who, 1, long))).toEqual({ 429: 1 })
    expect(statuses(await submitAt('11:02:00.000', who, 4, long))).toEqual({ 201: 3, 429: 1 })
    await short.stop()
  })

  it('counts are swept when their time is up, not before', async () => {
    await fleet.sql('DELETE FROM spillway.rates')
    await submitAt('10:00:30.000', randomUUID(), 1)
    const leftAt = async (time: string) => {
      await fleet.setClock(`${day}${time}Z`)
      await fleet.sql('SELECT spillway.sweep_rows(1000)')
      return fleet.sql('SELECT sums[cardinality(sums)]::int AS used FROM spillway.rates')
    }
    expect(await leftAt('13:00:30.000')).toEqual([{ used: 1 }])
    expect(await leftAt('13:00:30.001')).toEqual([])
  })
})
