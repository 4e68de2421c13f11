/** The database refuses changes to the ledger. Changes by its owner are detected, in a short and in a long ledger. */
import { readFile } from 'node:fs/promises'
import { afterAll, beforeAll, describe, expect, it } from 'vitest'
import { at, type Fleet, startFleet, submitPetition, verify } from '../petitions-fleet.js'
import { get } from '../server-process.js'

let f: Fleet
const server = () => at(f.servers, 0)

describe('a chain that was changed', () => {
  const rows = 12
  const middle = 6
  beforeAll(async () => {
    f = await startFleet()
    for (let i = 0; i < rows; i++) await submitPetition(server())
    await f.sql('CREATE TABLE public.rows_kept AS SELECT * FROM spillway.ledger')
    await f.sql('CREATE TABLE public.head_kept AS SELECT * FROM spillway.ledger_head')
  })
  afterAll(() => f.close())

  it.each(['UPDATE spillway.ledger SET actor = actor', 'DELETE FROM spillway.ledger', 'TRUNCATE spillway.ledger'])(
    'the database refuses %s',
    async (statement) => {
      await expect(f.sql(statement)).rejects.toMatchObject({ code: '42501' })
      await expect(f.sql(`${statement.replace('TRUNCATE', 'TRUNCATE TABLE')}`)).rejects.toMatchObject({ code: '42501' })
      expect(await f.sql('SELECT FROM spillway.ledger')).toHaveLength(rows)
    },
  )

  /** By one who owns the database, against whom no trigger helps. */
  const tampered = (...statements: string[]) => seen(() => verify(server()), ...statements)
  const seen = async <T>(look: () => Promise<T>, ...statements: string[]): Promise<T> => {
    await f.sql('ALTER TABLE spillway.ledger DISABLE TRIGGER ledger_append_only')
    try {
      for (const statement of statements) await f.sql(statement)
      return await look()
    } finally {
      await f.sql('DELETE FROM spillway.ledger')
      await f.sql('INSERT INTO spillway.ledger SELECT * FROM public.rows_kept')
      await f.sql('DELETE FROM spillway.ledger_head')
      await f.sql('INSERT INTO spillway.ledger_head SELECT * FROM public.head_kept')
      await f.sql('ALTER TABLE spillway.ledger ENABLE TRIGGER ledger_append_only')
    }
  }
  const rehash = (seq: number) => `UPDATE spillway.ledger SET hash = encode(sha256(convert_to(
    spillway.ledger_form_before(spillway.ledger_time(at), actor, payload) || prev_hash || spillway.ledger_form_behind(seq, type, trace_id), 'UTF8')), 'hex') WHERE seq = ${seq}`

  it('is intact before', async () => {
    expect(await tampered()).toMatchObject({ ok: true, from: 1, to: rows })
  })

  describe.each([1, middle, rows])('row %i', (seq) => {
    it.each([
      ['at', "at + interval '1 ms'"],
      ['type', "'petition.submission.referred'"],
      ['actor', "'submitter:somebody else'"],
      ['trace_id', "''"],
      ['payload', "replace(payload, 'GENERAL', 'META')"],
      ['prev_hash', "repeat('a', 64)"],
      ['hash', "repeat('b', 64)"],
    ])('another %s is found', async (column, value) => {
      const verdict = await tampered(`UPDATE spillway.ledger SET ${column} = ${value} WHERE seq = ${seq}`)
      expect(verdict).toMatchObject({ ok: false, broken_at: seq })
    })

    it('another text with a hash that fits it is found', async () => {
      const verdict = await tampered(`UPDATE spillway.ledger SET actor = 'system' WHERE seq = ${seq}`, rehash(seq))
      // The next one, or the head, remembers the old hash.
      expect(verdict).toMatchObject({ ok: false, broken_at: Math.min(rows, seq + 1) })
    })

    it('its absence is found', async () => {
      const verdict = await tampered(`DELETE FROM spillway.ledger WHERE seq = ${seq}`)
      expect(verdict).toMatchObject({ ok: false, broken_at: seq })
    })
  })

  describe('a time that the form of the hash has no place for', () => {
    const dropCheck = 'ALTER TABLE spillway.ledger DROP CONSTRAINT IF EXISTS ledger_at_check'
    const set = (time: string) => `UPDATE spillway.ledger SET at = ${time} WHERE seq = ${middle}`

    it.each(["'infinity'", "'-infinity'", "at + interval '1 microsecond'"])('%s is refused', async (time) => {
      await expect(tampered(set(time))).rejects.toMatchObject({ code: '23514' })
    })

    it.each([
      "'infinity'",
      "'-infinity'",
      "at + interval '1 microsecond'",
      "(to_char(at AT TIME ZONE 'UTC', 'YYYY-MM-DD HH24:MI:SS.MS') || 'Z BC')::timestamptz",
      "at + interval '10000 years'",
      "'294000-01-01'",
    ])('%s is found, and shown', async (time) => {
      expect(await tampered(dropCheck, set(time))).toMatchObject({ ok: false, broken_at: middle })
      const shown = await seen(() => get(server(), '/api/v1/ledger'), dropCheck, set(time))
      expect(shown.status).toBe(200)
      expect(shown.body.items).toHaveLength(rows)
      expect(shown.body.items[middle - 1]?.at).not.toMatch(/^\d{4}-\d\d-\d\dT\d\d:\d\d:\d\d\.\d{3}Z$/)
    })
  })

  it('a payload that is no JSON is found, and shown as its text', async () => {
    const change = `UPDATE spillway.ledger SET payload = '{"broken' WHERE seq = ${middle}`
    expect(await tampered(change)).toMatchObject({ ok: false, broken_at: middle })
    const shown = await seen(() => get(server(), '/api/v1/ledger'), change)
    expect(shown.status).toBe(200)
    expect(shown.body.items[middle - 1]).toMatchObject({ seq: middle, payload: '{"broken' })
  })

  it('a row between two others is found', async () => {
    const verdict = await tampered(
      `UPDATE spillway.ledger SET seq = seq + 1000 WHERE seq > ${middle}`,
      `UPDATE spillway.ledger SET seq = seq - 999 WHERE seq > 1000`,
      `INSERT INTO spillway.ledger SELECT ${middle + 1}, at, type, actor, trace_id, payload, hash, hash FROM spillway.ledger WHERE seq = ${middle}`,
      rehash(middle + 1),
    )
    expect(verdict).toMatchObject({ ok: false, broken_at: middle + 2 })
  })

  it('a row behind the last is found, though it fits', async () => {
    const verdict = await tampered(
      `INSERT INTO spillway.ledger SELECT ${rows + 1}, at, type, actor, trace_id, payload, hash, hash FROM spillway.ledger WHERE seq = ${rows}`,
      rehash(rows + 1),
    )
    expect(verdict).toMatchObject({ ok: false, broken_at: rows + 1 })
  })

  it('a missing head is found, and a broken row before it', async () => {
    const remove = 'DELETE FROM spillway.ledger_head'
    expect(await tampered(remove)).toEqual({ ok: false, from: 1, to: rows, head_hash: null, broken_at: rows + 1 })
    const change = `UPDATE spillway.ledger SET trace_id = '' WHERE seq = ${middle}`
    expect(await tampered(change, remove)).toMatchObject({ ok: false, head_hash: null, broken_at: middle })
  })

  it.each([
    ['of another hash', `hash = repeat('c', 64)`, rows],
    ['that is ahead', 'seq = seq + 1', rows + 1],
    [
      'that is set back',
      `seq = ${middle}, hash = (SELECT hash FROM spillway.ledger WHERE seq = ${middle})`,
      middle + 1,
    ],
  ])('a head %s is found', async (_, change, brokenAt) => {
    expect(await tampered(`UPDATE spillway.ledger_head SET ${change}`)).toMatchObject({
      ok: false,
      broken_at: brokenAt,
    })
  })
})

describe('many rows', () => {
  const total = 200_000
  const perBatch = 10_000
  beforeAll(async () => {
    f = await startFleet()
    for (let n = 0; n < total; n += perBatch) {
      await f.sql(
        `SELECT spillway.ledger_append(array_agg('petition.submission.received'::text), array_agg('submitter:' || i), array_agg(md5(i::text)),
           array_agg('{"petition_id":"' || i || '","text":"' || repeat('x', 100) || '"}')) FROM generate_series($1::int, $2::int) i`,
        [n + 1, n + perBatch],
      )
    }
  }, 120_000)
  afterAll(() => f.close())

  it('are verified without loading them: the server stays small, and answers meanwhile', {
    timeout: 90_000,
  }, async () => {
    const rssMb = async () =>
      Number(/VmRSS:\s+(\d+)/.exec(await readFile(`/proc/${server().pid}/status`, 'utf8'))?.[1]) / 1_024
    // A first time, so that what grows is not the warming up.
    expect(await verify(server())).toMatchObject({ ok: true, to: total })
    const before = await rssMb()
    let largest = before
    let slowest = 0
    let looks = 0
    const verifying = verify(server()).finally(() => {
      looks = -looks
    })
    while (looks >= 0) {
      slowest = Math.max(slowest, (await get(server(), '/health')).ms)
      largest = Math.max(largest, await rssMb())
      if (looks >= 0) looks++
    }
    expect(await verifying).toMatchObject({ ok: true, to: total })
    expect(-looks).toBeGreaterThan(3)
    expect(largest - before).toBeLessThan(48)
    expect(slowest).toBeLessThan(1_000)
  })

  it('a changed one among them is found', { timeout: 60_000 }, async () => {
    const seq = 123_457
    await f.sql('ALTER TABLE spillway.ledger DISABLE TRIGGER ledger_append_only')
    await f.sql(`UPDATE spillway.ledger SET trace_id = 'another' WHERE seq = $1`, [seq])
    expect(await verify(server())).toMatchObject({ ok: false, broken_at: seq })
  })
})
