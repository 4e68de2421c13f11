/** The ledger: in one transaction with what it records, gapless, chained, and verified by anyone with its export alone. */
import { createHash, randomUUID } from 'node:crypto'
import { SignJWT } from 'jose'
import { afterAll, beforeAll, describe, expect, it } from 'vitest'
import {
  at,
  type Entry,
  exportLedger,
  type Fleet,
  halt,
  move,
  petitionsPath,
  resume,
  startFleet,
  submitPetition,
  times,
  verify,
} from '../petitions-fleet.js'
import { type Answer, post, until } from '../server-process.js'

const genesis = '0'.repeat(64)
let f: Fleet
const server = () => at(f.servers, 0)

/** RFC 8785, written from the RFC: nothing of ours. */
function canonical(value: unknown): string {
  if (Array.isArray(value)) return `[${value.map(canonical).join(',')}]`
  if (value === null || typeof value !== 'object') return JSON.stringify(value)
  const members = Object.entries(value).sort(([a], [b]) => (a < b ? -1 : a > b ? 1 : 0))
  return `{${members.map(([name, member]) => `${JSON.stringify(name)}:${canonical(member)}`).join(',')}}`
}

/** As a stranger with the export would: the hash at its end. Fails at the first row that does not follow. */
function strangersHead(entries: readonly Entry[]): string {
  let previous = genesis
  for (const [i, { hash, ...rest }] of entries.entries()) {
    expect({ seq: rest.seq, prev: rest.prev_hash }).toEqual({ seq: i + 1, prev: previous })
    expect(createHash('sha256').update(canonical(rest)).digest('hex')).toBe(hash)
    previous = hash
  }
  return previous
}

describe('in the transaction of the change they record', () => {
  beforeAll(async () => {
    f = await startFleet({
      env: { PETITION_QUEUE_THRESHOLD: '3', PETITION_QUEUE_HYSTERESIS: '1', PETITION_QUEUE_CACHE_TTL: '0' },
    })
  })
  afterAll(() => f.close())

  const last = async (type: string) => {
    const [row] = await f.sql<{ xmin: string }>(
      'SELECT xmin::text FROM spillway.ledger WHERE type = $1 ORDER BY seq DESC LIMIT 1',
      [type],
    )
    return row?.xmin ?? 'no such event'
  }
  const writerOf = async (table: string, where: string, values: unknown[] = []) =>
    (await f.sql<{ xmin: string }>(`SELECT xmin::text FROM spillway.${table} WHERE ${where}`, values))[0]?.xmin
  const submitted = async () => {
    const answer = await until('there is a place', async () => {
      const tried = await submitPetition(server())
      return tried.status === 201 && tried
    })
    return String(answer.body.petition_id)
  }

  it('a receipt, a transition and a withdrawal', async () => {
    const id = await submitted()
    expect(await last('petition.submission.received')).toBe(await writerOf('petitions', 'id = $1', [id]))
    await move(server(), id, 'DELIBERATING')
    expect(await last('petition.submission.deliberating')).toBe(await writerOf('petitions', 'id = $1', [id]))
    const requester_id = randomUUID()
    const own = (await submitPetition(server(), { submitter_id: requester_id })).body.petition_id
    await post(server(), `${petitionsPath}/${own}/withdraw`, { requester_id })
    expect(await last('petition.submission.withdrawn')).toBe(await writerOf('petitions', 'id = $1', [own]))
  })

  it('the start and the end of an overflow', async () => {
    const ids = [await submitted(), await submitted(), await submitted()]
    expect(await last('petition.queue.overflow.started')).toBe(await writerOf('gates', "name = 'petitions'"))
    for (const id of ids.slice(0, 2)) await move(server(), id, 'ESCALATED')
    expect(await last('petition.queue.overflow.ended')).toBe(await writerOf('gates', "name = 'petitions'"))
    await move(server(), ids[2], 'ESCALATED')
  })

  it('a halt', async () => {
    await halt(server(), 'flood')
    expect(await last('system.halted')).toBe(await writerOf('halts', "scope = 'system'"))
    await resume(server())
  })

  it('a block', async () => {
    const submitter_id = randomUUID()
    const strict = await f.start({ PETITION_RATE_LIMIT_PER_HOUR: '1' })
    await submitPetition(strict, { submitter_id })
    expect((await submitPetition(strict, { submitter_id })).status).toBe(429)
    expect(await last('petition.rate_limit.blocked')).toBe(
      await writerOf('petition_blocks', 'submitter = $1', [submitter_id]),
    )
    await strict.stop()
  })

  /** What must not happen without its witness: the ledger refuses the event, and nothing is left of the rest. */
  const without = async (type: string, act: () => Promise<Answer>) => {
    await f.sql(`CREATE FUNCTION public.no_witness() RETURNS trigger LANGUAGE plpgsql AS $$ BEGIN
      IF NEW.type = '${type}' THEN RAISE EXCEPTION 'no' USING ERRCODE = 'check_violation'; END IF; RETURN NEW; END $$`)
    await f.sql(
      'CREATE TRIGGER no_witness BEFORE INSERT ON spillway.ledger FOR EACH ROW EXECUTE FUNCTION public.no_witness()',
    )
    const state = () =>
      f.sql(`SELECT (SELECT json_agg(json_build_array(p.id, p.state, p.version) ORDER BY p.id) FROM spillway.petitions p)::text AS petitions,
        (SELECT json_agg(json_build_array(g.held, g.overflowing)) FROM spillway.gates g)::text AS gates,
        (SELECT json_agg(s ORDER BY s.state) FROM spillway.petition_states s)::text AS states,
        (SELECT json_agg(h) FROM spillway.halts h)::text AS halts, (SELECT seq FROM spillway.ledger_head) AS head,
        (SELECT sum(sums[cardinality(sums)]) FROM spillway.rates) AS used`)
    try {
      const before = await state()
      expect((await act()).status).toBeGreaterThanOrEqual(500)
      expect(await state()).toEqual(before)
    } finally {
      await f.sql('DROP FUNCTION public.no_witness() CASCADE')
    }
  }

  it('no petition without its receipt', () => without('petition.submission.received', () => submitPetition(server())))

  it('no transition without its event', async () => {
    const id = await submitted()
    await without('petition.submission.acknowledged', () => move(server(), id, 'ACKNOWLEDGED'))
    await move(server(), id, 'ACKNOWLEDGED')
  })

  it('no halt and no end of one without its event', async () => {
    await without('system.halted', () => halt(server(), 'unseen'))
    await halt(server(), 'seen')
    await without('system.resumed', () => resume(server()))
    await resume(server())
  })

  it('the last place is not taken without the start of the overflow', async () => {
    await until('two are held', async () => {
      const [gate] = await f.sql<{ held: number }>('SELECT held::int FROM spillway.gates')
      if (gate?.held === 2) return true
      await submitted()
      return false
    })
    await without('petition.queue.overflow.started', () => submitPetition(server()))
  })
})

describe('four instances at once', () => {
  beforeAll(async () => {
    f = await startFleet({ instances: 4, env: { PETITION_RATE_LIMIT_PER_HOUR: '5' } })
  })
  afterAll(() => f.close())

  it('one chain without gaps, which a stranger verifies to the same head', async () => {
    const submitters = Array.from({ length: 20 }, () => randomUUID())
    await times(240, async (i) => {
      const { status, body } = await submitPetition(f.next(), { submitter_id: at(submitters, i % 20) })
      if (status === 201 && i % 3 === 0) await move(f.next(), body.petition_id, 'ESCALATED')
      if (i % 60 === 0) await Promise.all([halt(f.next(), `drill ${i}`), resume(f.next())])
    })
    await resume(f.next())
    const entries = await exportLedger(server())
    expect(await verify(server())).toEqual({
      ...{ ok: true, from: 1, to: entries.length, head_hash: strangersHead(entries) },
    })
    const receipts = entries.filter(({ type }) => type === 'petition.submission.received')
    const ids = receipts.map(({ payload }) => String(payload.petition_id))
    const there = await f.sql<{ id: string }>('SELECT id FROM spillway.petitions')
    expect(ids.sort()).toEqual(there.map(({ id }) => id).sort())
    expect(await f.audit()).toEqual([])
  })
})

describe('blocks, and what a refusal contains', () => {
  beforeAll(async () => {
    f = await startFleet({ env: { PETITION_RATE_LIMIT_PER_HOUR: '1' } })
  })
  afterAll(() => f.close())

  const counts = async (submitter: string) =>
    (
      await f.sql<{ n: number }>(
        `SELECT (payload::json->>'count')::int AS n FROM spillway.ledger WHERE type = 'petition.rate_limit.blocked' AND actor = $1 ORDER BY seq`,
        [`submitter:${submitter}`],
      )
    ).map(({ n }) => n)
  const submitAt = async (time: string, submitter_id: string, n: number) => {
    await f.setClock(`2031-05-10T${time}Z`)
    return Promise.all(Array.from({ length: n }, () => submitPetition(server(), { submitter_id })))
  }

  it('one event per submitter and minute: the first at once, the rest with the next minute’s', async () => {
    const who = randomUUID()
    await submitAt('10:00:00', who, 1)
    await submitAt('10:00:01', who, 1)
    expect(await counts(who)).toEqual([1])
    await submitAt('10:00:59.999', who, 20)
    expect(await counts(who)).toEqual([1])
    await submitAt('10:01:00', who, 30)
    expect(await counts(who)).toEqual([1, 21])
    await submitAt('10:02:00', who, 1)
    expect(await counts(who)).toEqual([1, 21, 30])
  })

  it('counts each submitter by itself', async () => {
    const [ann, bob] = [randomUUID(), randomUUID()]
    const together = (...submitters: string[]) =>
      Promise.all(submitters.map((submitter_id) => submitPetition(server(), { submitter_id })))
    await f.setClock('2031-05-10T10:10:00Z')
    await together(ann, bob)
    await together(ann, bob, ann, bob, ann, ann)
    await f.setClock('2031-05-10T10:11:00Z')
    await together(bob, ann)
    expect([await counts(ann), await counts(bob)]).toEqual([
      [1, 4],
      [1, 2],
    ])
  })

  it('the rest is reported when no further block comes', async () => {
    const who = randomUUID()
    await submitAt('10:20:00', who, 8)
    const record = () => f.sql('SELECT spillway.petitions_record_blocks(1000)')
    await record()
    expect(await counts(who)).toEqual([1])
    await f.setClock('2031-05-10T10:21:00Z')
    await record()
    expect(await counts(who)).toEqual([1, 6])
    await record()
    expect(await counts(who)).toEqual([1, 6])
    // That was this minute's event: what comes now waits for the next.
    await submitAt('10:21:30', who, 2)
    expect(await counts(who)).toEqual([1, 6])
    await submitAt('10:22:00', who, 1)
    expect(await counts(who)).toEqual([1, 6, 3])
  })

  it('as_of_seq is the head of the ledger in which the refusal is', async () => {
    const who = randomUUID()
    await submitAt('10:30:00', who, 1)
    const head = async () => (await f.sql<{ seq: number }>('SELECT seq::int FROM spillway.ledger_head'))[0]?.seq
    const [witnessed] = await submitAt('10:30:01', who, 1)
    expect(witnessed?.body.as_of_seq).toBe(await head())
    expect(await counts(who)).toEqual([1])
    await submitAt('10:30:02', randomUUID(), 3)
    const [summed] = await submitAt('10:30:03', who, 1)
    expect(summed?.body.as_of_seq).toBe(await head())
  })

  it.each([
    ['2031-03-31T23:59:59.999Z', '2031-Q1'],
    ['2031-04-01T00:00:00Z', '2031-Q2'],
    ['2031-12-31T23:59:59.999Z', '2031-Q4'],
    ['2032-01-01T00:00:00Z', '2032-Q1'],
  ])('at %s of the database’s clock the cycle is %s', async (time, cycle) => {
    const submitter_id = randomUUID()
    await f.setClock(time)
    await submitPetition(server(), { submitter_id })
    const { status, body } = await submitPetition(server(), { submitter_id })
    expect({ status, cycle: body.cycle_id }).toEqual({ status: 429, cycle })
  })
})

describe('texts of every kind', () => {
  const secret = 'a-shared-secret-of-more-than-thirty-two-bytes'
  const odd =
    'quote " slash \\ / controls \u0001\u0008\t\n\f\r\u001f del \u007f nel \u0085 ls \u2028\u2029 é 漢 😀 \ufffd \ud83d\ude00'
  beforeAll(async () => {
    f = await startFleet({ env: { SPILLWAY_JWT_SECRET: secret } })
  })
  afterAll(() => f.close())

  it('a stranger gets the same head, whatever submitters, realms and reasons are made of', async () => {
    const bearer = async (sub: string, roles: string[]) => {
      const claims = new SignJWT({ sub, roles }).setProtectedHeader({ alg: 'HS256' }).setExpirationTime('5m')
      return { authorization: `Bearer ${await claims.sign(new TextEncoder().encode(secret))}` }
    }
    const operator = await bearer('operator', ['operate'])
    for (const sub of [odd, '😀', '"', '\\u0041', 'ann']) {
      const body = { type: 'META', text: odd, realm: `realm ${sub}`.slice(0, 90).toWellFormed() }
      const answer = await post(server(), petitionsPath, body, await bearer(sub, ['submit']))
      expect(answer.status).toBe(201)
      expect((await move(server(), answer.body.petition_id, 'DELIBERATING', `${sub}${odd}`, operator)).status).toBe(200)
    }
    const entries = await exportLedger(server(), operator)
    expect(entries.map(({ actor }) => actor)).toContain(`submitter:${odd}`)
    expect(await verify(server(), operator)).toMatchObject({ ok: true, head_hash: strangersHead(entries) })
  })
})
