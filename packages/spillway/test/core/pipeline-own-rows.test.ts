/** What `apply` definitions and their owners have beside `apply`: limited, giveBack, onAnswer, transaction, ledger, notices. */
import Type from 'typebox'
import { afterEach, beforeEach, describe, expect, it } from 'vitest'
import { type Answer, capacity, halt, rate, type SqlEffect, type Tx } from '../../src/index.js'
import type { Intake } from '../../src/intake/intake.js'
import { type Bench, bench, eventually, overriding, signal } from '../pipeline-fixture.js'

const Note = Type.Object({ who: Type.String(), n: Type.Integer() })
type NoteBody = { who: string; n: number }

let b: Bench
beforeEach(async () => {
  b = await bench()
  await b.sql('CREATE TABLE notes (who text NOT NULL, n int NOT NULL CHECK (n <> 13))')
  await b.sql('CREATE TABLE refusals (who text NOT NULL, n int NOT NULL)')
})
afterEach(() => b.close())

const insert = async (tx: Tx, items: readonly { body: NoteBody }[]): Promise<number[]> => {
  await tx.query('INSERT INTO notes SELECT * FROM unnest($1::text[], $2::int[])', [
    items.map(({ body }) => body.who),
    items.map(({ body }) => body.n),
  ])
  return items.map(({ body }) => body.n)
}

const kinds = (answers: readonly Answer[]): string[] => answers.map(({ kind }) => kind).sort()
const count = async (table: string): Promise<number> =>
  Number((await b.sql<{ n: string }>(`SELECT count(*) AS n FROM ${table}`))[0]?.n)

/** Writes what is applied to `notes` and what a rate refused to `refusals`, and returns its number. */
const noteFunction = `CREATE FUNCTION public.note(verdicts text[], seqs bigint[], whos text[], numbers int[]) RETURNS json[] LANGUAGE plpgsql AS $$
  DECLARE results json[];
  BEGIN
    INSERT INTO notes SELECT u.who, u.n FROM unnest(verdicts, whos, numbers) u(verdict, who, n) WHERE u.verdict = 'apply';
    INSERT INTO refusals SELECT u.who, u.n FROM unnest(verdicts, whos, numbers) u(verdict, who, n) WHERE u.verdict = 'rate_limited';
    IF FOUND AND EXISTS (SELECT FROM broken) THEN
      RAISE EXCEPTION 'no record can be kept' USING ERRCODE = 'insufficient_resources';
    END IF;
    SELECT array_agg(CASE WHEN u.verdict IN ('apply', 'rate_limited') THEN json_build_object('number', u.n) END)
      INTO results FROM unnest(verdicts, numbers) u(verdict, n);
    RETURN results;
  END $$`

describe('limited', () => {
  beforeEach(async () => {
    await b.sql('CREATE TABLE broken ()')
    await b.sql(noteFunction)
  })

  const define = (intake: Intake, limited?: SqlEffect<NoteBody, unknown>['limited']) =>
    intake.define('notes.add', {
      body: Note,
      lane: (note) => ['notes', note.who],
      gates: [rate<NoteBody>({ limit: 2, per: '1h', by: (_, note) => note.who })],
      apply: {
        function: 'public.note',
        values: (items) => [items.map(({ body }) => body.who), items.map(({ body }) => body.n)],
        ...(limited && { limited }),
      },
    })

  it('keeps a record of what a rate refuses in the transaction that refuses it', async () => {
    const intake = await b.intake()
    const op = define(intake)
    const answers = await Promise.all([1, 2, 3, 4, 5].map((n) => intake.submit(op, { who: 'a', n })))
    expect(kinds(answers)).toEqual(['done', 'done', 'refused', 'refused', 'refused'])
    const refused = answers.flatMap(({ kind }, i) => (kind === 'refused' ? [i + 1] : []))
    expect((await b.sql<{ n: number }>('SELECT n FROM refusals ORDER BY n')).map(({ n }) => n)).toEqual(refused)
    expect(await count('notes')).toBe(2)
    // Written by one and the same transaction.
    expect(
      await b.sql('SELECT DISTINCT xmin::text FROM (SELECT xmin FROM notes UNION SELECT xmin FROM refusals) x'),
    ).toHaveLength(1)
  })

  it('adds to the problem of each what the function returned for it', async () => {
    const intake = await b.intake()
    const op = define(intake, (own, { body, limit, resetMs }) => ({ own, n: body.n, limit, late: resetMs > 0 }))
    const answers = await Promise.all([1, 2, 3, 4, 5].map((n) => intake.submit(op, { who: 'a', n })))
    const refused = answers.flatMap((answer, i) =>
      answer.kind === 'refused' ? [{ n: i + 1, extensions: answer.refusal.extensions }] : [],
    )
    expect(refused).toHaveLength(3)
    for (const { n, extensions } of refused) expect(extensions).toEqual({ own: { number: n }, n, limit: 2, late: true })
  })

  it('that throws costs only its members: the decision is answered, and written once', async () => {
    const intake = await b.intake()
    const op = define(intake, () => {
      throw new Error('no members')
    })
    const notes = [1, 2, 3].map((n) => ({ who: 'a', n }))
    const answers = await Promise.all([...notes, { who: 'b', n: 1 }].map((note) => intake.submit(op, note)))
    expect(answers).toMatchObject([
      { kind: 'done' },
      { kind: 'done' },
      { refusal: { code: 'rate_limited' } },
      { kind: 'done' },
    ])
    expect(await count('notes')).toBe(3)
    expect(b.logged).toContainEqual(expect.objectContaining({ level: 'error' }))
  })

  it('takes everything back with it when it fails, and the rate counts nothing', async () => {
    const intake = await b.intake()
    const op = define(intake)
    for (const n of [1, 2]) expect(await intake.submit(op, { who: 'a', n })).toMatchObject({ kind: 'done' })
    await b.sql('INSERT INTO broken DEFAULT VALUES')
    // Together: what would have been done goes with what could not be refused.
    const together = [
      { who: 'a', n: 3 },
      { who: 'b', n: 1 },
    ]
    const away = { kind: 'refused', refusal: { code: 'store_unavailable' } }
    expect(await Promise.all(together.map((note) => intake.submit(op, note)))).toMatchObject([away, away])
    expect(await count('notes')).toBe(2)
    expect(await count('refusals')).toBe(0)
    await b.sql('DELETE FROM broken')
    expect(await intake.submit(op, { who: 'a', n: 3 })).toMatchObject({ refusal: { code: 'rate_limited' } })
    for (const n of [1, 2]) expect(await intake.submit(op, { who: 'b', n })).toMatchObject({ kind: 'done' })
    expect(await intake.submit(op, { who: 'b', n: 3 })).toMatchObject({ refusal: { code: 'rate_limited' } })
  })
})

describe('the place of an applied item', () => {
  const define = (intake: Intake) =>
    intake.define('notes.add', {
      body: Note,
      lane: (note) => ['notes', note.who],
      gates: [capacity({ limit: 2, resumeBelow: 2 })],
      maxRetries: 0,
      apply: insert,
    })
  const held = async (): Promise<number> =>
    Number((await b.sql<{ held: string }>('SELECT held FROM spillway.gates'))[0]?.held)

  it.each([
    ['at once', {}],
    ['through the queue', { respondAsync: true }],
  ])('stays taken when it was applied %s, until its owner gives it back', async (_, options) => {
    const intake = await b.intake()
    const op = define(intake)
    for (const n of [1, 2]) {
      const answer = await intake.submit(op, { who: `w${n}`, n }, options)
      if (answer.kind === 'queued') await b.finished(answer.operationId)
    }
    expect(await count('notes')).toBe(2)
    expect(await held()).toBe(2)
    expect(await intake.submit(op, { who: 'x', n: 3 })).toMatchObject({ refusal: { code: 'capacity_exceeded' } })
    await intake.transaction(async (tx) => {
      await tx.query('DELETE FROM notes WHERE n = 1')
      await intake.releaseCapacity(tx, 'notes.add', 1)
    })
    await intake.refresh()
    expect(await intake.submit(op, { who: 'x', n: 3 })).toMatchObject({ kind: 'done' })
  })

  it('is given back when it could not be applied', async () => {
    const intake = await b.intake()
    const op = define(intake)
    const answer = await intake.submit(op, { who: 'a', n: 13 }, { respondAsync: true })
    if (answer.kind !== 'queued') throw new Error(answer.kind)
    expect(await b.finished(answer.operationId)).toMatchObject({ status: 'failed' })
    expect(await held()).toBe(0)
  })
})

describe('onAnswer', () => {
  it('reports each decision once it is durable, with its caller and key', async () => {
    const intake = await b.intake()
    const heard: [string, number, string][] = []
    const op = intake.define('notes.add', {
      body: Note,
      gates: [rate<NoteBody>({ limit: 1, per: '1h' })],
      apply: insert,
      onAnswer: (answer, { body, identity }) => heard.push([answer.kind, body.n, identity]),
    })
    await intake.submit(op, { who: 'a', n: 1 }, { identity: 'alice' })
    expect(await count('notes')).toBe(1)
    await intake.submit(op, { who: 'a', n: 2 }, { identity: 'alice' })
    expect(heard).toEqual([
      ['done', 1, 'alice'],
      ['refused', 2, 'alice'],
    ])
  })
})

describe('halting', () => {
  it('waits for submissions being accepted; later ones are refused', async () => {
    const writing = signal()
    const written = signal()
    const intake = await b.intake()
    const op = intake.define('notes.add', {
      body: Note,
      gates: [halt()],
      apply: async (tx, items) => {
        const results = await insert(tx, items)
        writing.fire()
        await written.promise
        return results
      },
    })
    const first = intake.submit(op, { who: 'a', n: 1 })
    await writing.promise
    let halted = false
    const halting = intake.halt('drill').then(() => {
      halted = true
    })
    await eventually(
      async () =>
        (await b.sql("SELECT 1 FROM pg_locks WHERE locktype = 'advisory' AND NOT granted")).length > 0
          ? true
          : undefined,
      'the halt to wait',
    )
    expect(halted).toBe(false)
    written.fire()
    expect(await first).toMatchObject({ kind: 'done' })
    await halting
    expect(await intake.submit(op, { who: 'a', n: 2 })).toMatchObject({ refusal: { code: 'halted' } })
    expect(await intake.resume()).toBe(true)
    expect(await intake.resume()).toBe(false)
    expect(await intake.submit(op, { who: 'a', n: 3 })).toMatchObject({ kind: 'done' })
  })

  it('inside a transaction takes effect with its commit, or never', async () => {
    const intake = await b.intake()
    const op = intake.define('notes.add', { body: Note, gates: [halt()], apply: insert })
    const undone = intake.transaction(async (tx) => {
      expect(await intake.halt('drill', 'system', tx)).toBe(true)
      throw new Error('changed my mind')
    })
    await expect(undone).rejects.toThrow('changed my mind')
    expect(await intake.submit(op, { who: 'a', n: 1 })).toMatchObject({ kind: 'done' })
    await intake.transaction(async (tx) => {
      expect(await intake.halt('drill', 'system', tx)).toBe(true)
      expect(await intake.halt('again', 'system', tx)).toBe(false)
    })
    expect(await intake.submit(op, { who: 'a', n: 2 })).toMatchObject({ refusal: { code: 'halted' } })
  })
})

describe('the ledger of an intake', () => {
  it('has an event if and when the transaction commits', async () => {
    const intake = await b.intake()
    const event = (n: number) => ({ type: 'note.added', actor: 'a', traceId: '', payload: { n } })
    expect(await intake.transaction((tx) => intake.ledger.append(tx, [event(1), event(2)]))).toBe(2)
    const undone = intake.transaction(async (tx) => {
      await intake.ledger.append(tx, [event(3)])
      throw new Error('no')
    })
    await expect(undone).rejects.toThrow('no')
    expect(await intake.transaction((tx) => intake.ledger.append(tx, [event(4)]))).toBe(3)
    expect((await intake.ledger.rows(0, 10)).map(({ seq, payload }) => [seq, payload])).toEqual([
      [1, '{"n":1}'],
      [2, '{"n":2}'],
      [3, '{"n":4}'],
    ])
    expect(await intake.ledger.verify()).toMatchObject({ ok: true, from: 1, to: 3 })
  })

  it('is walked in looks of a bounded size', async () => {
    const looks: number[] = []
    const intake = await b.intake({
      wrap: (store) =>
        overriding(store, {
          ledgerCheck: (after, prev, rows) => {
            looks.push(rows)
            return store.ledgerCheck(after, prev, rows)
          },
        }),
    })
    await b.sql(
      `SELECT spillway.ledger_append(array_fill('x'::text, ARRAY[25000]), array_fill('a'::text, ARRAY[25000]), array_fill(''::text, ARRAY[25000]), array_fill('{}'::text, ARRAY[25000]))`,
    )
    expect(await intake.ledger.verify()).toMatchObject({ ok: true, to: 25_000 })
    expect(looks).toEqual([10_000, 10_000, 5_000])
  })
})

describe('notices', () => {
  it('come from a commit to every instance that listens for their name', async () => {
    const [one, two] = [await b.intake(), await b.intake()]
    const heard: string[] = []
    one.onNotice('note', (text) => heard.push(`one ${text}`))
    two.onNotice('note', (text) => heard.push(`two ${text}`))
    two.onNotice('other', (text) => heard.push(`wrong ${text}`))
    await one.transaction((tx) => tx.query(`SELECT pg_notify('spillway_spillway', 'note:a:b')`))
    await eventually(() => (heard.length === 2 ? true : undefined), 'both to hear it')
    expect(heard.sort()).toEqual(['one a:b', 'two a:b'])
  })
})
