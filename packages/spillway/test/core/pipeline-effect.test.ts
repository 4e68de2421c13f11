/** `apply` as a function in the database (SqlEffect): what reaches it, what reaches its callers, and what is left of it. */
import pg from 'pg'
import Type from 'typebox'
import { afterEach, beforeEach, describe, expect, it, vi } from 'vitest'
import { laneOf } from '../../src/core/ids.js'
import type { Answer } from '../../src/index.js'
import type { Intake } from '../../src/intake/intake.js'
import { type Bench, bench, eventually, overriding } from '../pipeline-fixture.js'

const Note = Type.Object({ lane: Type.String(), n: Type.Integer() })

/** Writes what is applied, refuses 13, notes how it was called, and answers ten times the number. */
const noteFunction = (answered = 'results') => `CREATE OR REPLACE FUNCTION public.note(
    verdicts text[], seqs bigint[], ids uuid[], lanes text[], numbers int[]) RETURNS json[] LANGUAGE plpgsql AS $$
  DECLARE results json[];
  BEGIN
    IF EXISTS (SELECT FROM unnest(verdicts, numbers) u(verdict, n) WHERE u.verdict = 'apply' AND u.n = 13) THEN
      RAISE EXCEPTION '13 is not taken';
    END IF;
    INSERT INTO calls (verdicts, seqs) VALUES (verdicts, seqs);
    INSERT INTO notes (lane, n, seq, op) SELECT u.lane, u.n, u.seq, u.op
      FROM unnest(verdicts, seqs, ids, lanes, numbers) u(verdict, seq, op, lane, n) WHERE u.verdict = 'apply';
    SELECT array_agg(CASE WHEN u.verdict = 'apply' THEN to_json(u.n * 10) END) INTO results FROM unnest(verdicts, numbers) u(verdict, n);
    RETURN ${answered};
  END $$`

let b: Bench
beforeEach(async () => {
  b = await bench()
  await b.sql('CREATE TABLE notes (at bigserial, lane text, n int NOT NULL, seq bigint, op uuid UNIQUE)')
  await b.sql('CREATE TABLE calls (at bigserial, verdicts text[], seqs bigint[])')
  await b.sql(noteFunction())
})
afterEach(async () => {
  vi.restoreAllMocks()
  await b.close()
})

const define = (intake: Intake) =>
  intake.define('notes.add', {
    body: Note,
    lane: (note) => ['notes', note.lane],
    maxRetries: 0,
    apply: {
      function: 'public.note',
      values: (items) => [
        items.map(({ id }) => id),
        items.map(({ body }) => body.lane),
        items.map(({ body }) => body.n),
      ],
    },
  })

const written = async (lane?: string): Promise<number[]> =>
  (await b.sql<{ n: number }>('SELECT n FROM notes WHERE $1::text IS NULL OR lane = $1 ORDER BY at', [lane])).map(
    ({ n }) => n,
  )
const calls = async () =>
  (await b.sql<{ verdicts: string[]; seqs: string[] }>('SELECT verdicts, seqs FROM calls ORDER BY at')).map((call) => ({
    verdicts: call.verdicts,
    seqs: call.seqs.map(Number),
  }))
const results = (answers: readonly Answer[]): unknown[] => answers.map((a) => (a.kind === 'done' ? a.result : a.kind))
const idOf = (answer: Answer): string => {
  if (answer.kind !== 'queued') throw new Error(`expected a ticket, not ${answer.kind}`)
  return answer.operationId
}

/** Queues these in lane `a` while it is held, then lets it go; answers what became of them. */
async function throughTheQueue(intake: Intake, numbers: readonly number[]) {
  const add = define(intake)
  await intake.store.pause('notes', 'a')
  const ids: string[] = []
  for (const n of numbers) ids.push(idOf(await intake.submit(add, { lane: 'a', n }, { respondAsync: true })))
  await eventually(
    async () => ((await b.sql('SELECT 1 FROM spillway.parked')).length > 0 ? true : undefined),
    'the lane to be held',
  )
  await intake.store.resume('notes', 'a')
  intake.wakeAll()
  const tickets = []
  for (const id of ids) tickets.push(await b.finished(id))
  return tickets
}

describe('an effect in the database', () => {
  it('answers each caller its own result, though the store sorts by lane', async () => {
    const intake = await b.intake()
    const add = define(intake)
    const lanes = ['a', 'b', 'c', 'd', 'e', 'f', 'g']
    const sorted = lanes.map((lane) => laneOf(['notes', lane]).id)
    expect(sorted).not.toEqual([...sorted].sort())
    const answers = await Promise.all(
      Array.from({ length: 50 }, (_, n) => intake.submit(add, { lane: lanes[n % 7] ?? '', n: n + 20 })),
    )
    expect(results(answers)).toEqual(answers.map((_, n) => (n + 20) * 10))
    expect(await written('c')).toEqual([22, 29, 36, 43, 50, 57, 64])
    expect(await b.sql('SELECT 1 FROM spillway.ops')).toEqual([])
    expect(await b.audit()).toEqual([])
  })

  it('is one statement for all that came together, keys and all', async () => {
    const intake = await b.intake({ role: 'direct' })
    const add = define(intake)
    await intake.submit(add, { lane: 'warm', n: 1 })
    const query = vi.spyOn(pg.Client.prototype, 'query')
    const answers = await Promise.all(
      Array.from({ length: 50 }, (_, n) =>
        intake.submit(add, { lane: `l${n % 7}`, n: n + 20 }, { idempotencyKey: `k${n}` }),
      ),
    )
    const statements = query.mock.calls.map(([given]: unknown[]) => textOf(given))
    query.mockRestore()
    expect(results(answers)).toEqual(answers.map((_, n) => (n + 20) * 10))
    // Heartbeats go on meanwhile, on a connection of their own.
    expect(statements.filter((text) => !/\.pulse\(|pg_notify/.test(text))).toEqual([
      expect.stringMatching(/\.accept_flush\(.*public\.note\(.*\.keys_applied\(/s),
    ])
    expect(await calls()).toHaveLength(2)
  })

  it('answers a repeated Idempotency-Key with the first answer, and applies nothing', async () => {
    const intake = await b.intake()
    const add = define(intake)
    const first = await intake.submit(add, { lane: 'a', n: 1 }, { idempotencyKey: 'k' })
    expect(first).toMatchObject({ kind: 'done', result: 10, replayed: false })
    // Another answer from now on: what is returned again can only be what was stored.
    await b.sql(noteFunction(`array_fill('"another"'::json, ARRAY[cardinality(verdicts)])`))
    expect(await intake.submit(add, { lane: 'a', n: 1 }, { idempotencyKey: 'k' })).toEqual({ ...first, replayed: true })
    expect(await intake.submit(add, { lane: 'a', n: 2 }, { idempotencyKey: 'k' })).toMatchObject({
      refusal: { code: 'idempotency_mismatch' },
    })
    expect(await intake.submit(add, { lane: 'a', n: 3 })).toMatchObject({ kind: 'done', result: 'another' })
    expect(await written()).toEqual([1, 3])
    expect((await calls()).flatMap(({ verdicts }) => verdicts)).toEqual(['apply', 'replay', 'mismatch', 'apply'])
  })

  it('is called for queued items in the order of their lane, all to be applied', async () => {
    const intake = await b.intake()
    const tickets = await throughTheQueue(intake, [5, 3, 4, 1, 2])
    expect(tickets.map(({ status, result }) => [status, result])).toEqual(
      [50, 30, 40, 10, 20].map((r) => ['completed', r]),
    )
    expect(await written('a')).toEqual([5, 3, 4, 1, 2])
    // The first calls are those of the acceptances: queued (0), with nothing to write.
    const accepting = (await calls()).filter(({ verdicts }) => verdicts.includes('queue'))
    const applying = (await calls()).filter(({ verdicts }) => !verdicts.includes('queue'))
    expect(accepting.flatMap(({ verdicts }) => verdicts)).toEqual(Array(5).fill('queue'))
    expect(applying.flatMap(({ verdicts }) => verdicts)).toEqual(Array(5).fill('apply'))
    expect(applying.flatMap(({ seqs }) => seqs)).toEqual([1, 2, 3, 4, 5])
    expect(await b.audit()).toEqual([])
  })

  it('numbers a lane on, whether directly or through the queue', async () => {
    const intake = await b.intake()
    await throughTheQueue(intake, [1, 2])
    expect(await intake.submit({ type: 'notes.add' }, { lane: 'a', n: 3 })).toMatchObject({ kind: 'done', result: 30 })
    expect(await b.sql("SELECT n, seq::int FROM notes WHERE lane = 'a' ORDER BY seq")).toEqual([
      { n: 1, seq: 1 },
      { n: 2, seq: 2 },
      { n: 3, seq: 3 },
    ])
  })

  it('that refuses one value fails for that item alone; its neighbours are done, once each', async () => {
    const intake = await b.intake()
    const add = define(intake)
    const numbers = [20, 21, 13, 22, 23, 24, 25]
    const answers = await Promise.all(numbers.map((n) => intake.submit(add, { lane: 'a', n })))
    expect(results(answers)).toEqual([200, 210, 'refused', 220, 230, 240, 250])
    expect(answers[2]).toMatchObject({ refusal: { code: 'internal_error' } })
    expect(await written('a')).toEqual([20, 21, 22, 23, 24, 25])
    expect(await b.audit()).toEqual([])
  })

  it('that refuses one value from the queue lets that one die alone, and the lane continues', async () => {
    const intake = await b.intake()
    const tickets = await throughTheQueue(intake, [1, 13, 3])
    expect(tickets.map(({ status }) => status)).toEqual(['completed', 'failed', 'completed'])
    expect(await written('a')).toEqual([1, 3])
    expect(await b.audit()).toEqual([])
  })

  it.each([
    ['too few', 'results[2:]'],
    ['too many', 'results || results'],
    ['nothing at all', 'NULL'],
  ])('that answers %s is an error and stores nothing, not even the key', async (_, answered) => {
    await b.sql(noteFunction(answered))
    const intake = await b.intake()
    const add = define(intake)
    const submit = () =>
      Promise.all([1, 2].map((n) => intake.submit(add, { lane: `l${n}`, n }, { idempotencyKey: `k${n}` })))
    const broken = { kind: 'refused', refusal: { code: 'internal_error' } }
    expect(await submit()).toMatchObject([broken, broken])
    expect(await written()).toEqual([])
    expect(await b.sql('SELECT 1 FROM spillway.idempotency')).toEqual([])
    await b.sql(noteFunction())
    expect(results(await submit())).toEqual([10, 20])
    expect(await b.sql('SELECT seq::int FROM notes')).toEqual([{ seq: 1 }, { seq: 1 }])
  })

  it('that answers too few from the queue fails the operation and writes nothing', async () => {
    await b.sql(noteFunction(`CASE WHEN 'apply' = ANY (verdicts) THEN results[2:] ELSE results END`))
    const intake = await b.intake()
    const tickets = await throughTheQueue(intake, [1, 2])
    expect(tickets.map(({ status }) => status)).toEqual(['failed', 'failed'])
    expect(await written()).toEqual([])
  })

  it('may answer NULL for an applied item: the result is null, also for the key', async () => {
    await b.sql(noteFunction('array_fill(NULL::json, ARRAY[cardinality(verdicts)])'))
    const intake = await b.intake()
    const add = define(intake)
    const submit = () => intake.submit(add, { lane: 'a', n: 1 }, { idempotencyKey: 'k' })
    expect(await submit()).toMatchObject({ kind: 'done', result: null, replayed: false })
    expect(await submit()).toMatchObject({ kind: 'done', result: null, replayed: true })
  })

  it('gets texts as they are, and nulls, numbers and booleans beside them', async () => {
    await b.sql(`CREATE FUNCTION public.echo(verdicts text[], seqs bigint[], texts text[], maybe text[], halves float8[], flags boolean[])
      RETURNS json[] LANGUAGE sql AS $$ SELECT array_agg(json_build_array(u.text, u.maybe, u.half, u.flag))
        FROM unnest(texts, maybe, halves, flags) u(text, maybe, half, flag) $$`)
    const intake = await b.intake()
    const texts = ['', 'NULL', 'a,b', '{c}', 'say "no"', 'back\\slash', 'two\nlines', 'ä€😀', ' ']
    const add = intake.define('echo', {
      body: Note,
      apply: {
        function: 'public.echo',
        values: (items) => [
          items.map(({ body }) => body.lane),
          items.map(({ body }) => (body.n % 2 === 0 ? body.lane : null)),
          items.map(({ body }) => body.n / 2),
          items.map(({ body }) => body.n % 2 === 0),
        ],
      },
    })
    const answers = await Promise.all(texts.map((lane, n) => intake.submit(add, { lane, n })))
    expect(results(answers)).toEqual(texts.map((text, n) => [text, n % 2 === 0 ? text : null, n / 2, n % 2 === 0]))
  })

  it('is not called again when its answer is lost: a caller that repeats with the key gets the first result', async () => {
    let losing = true
    const intake = await b.intake({
      wrap: (store) =>
        overriding(store, {
          acceptWithEffect: async (...given) => {
            const answer = await store.acceptWithEffect(...given)
            if (losing) throw Object.assign(new Error('the answer is lost'), { code: 'unavailable' })
            return answer
          },
        }),
    })
    const add = define(intake)
    const submit = () => intake.submit(add, { lane: 'a', n: 1 }, { idempotencyKey: 'k' })
    expect(await submit()).toMatchObject({ refusal: { code: 'store_unavailable' } })
    losing = false
    expect(await submit()).toMatchObject({ kind: 'done', result: 10, replayed: true })
    expect(await written()).toEqual([1])
  })
})

function textOf(given: unknown): string {
  if (typeof given === 'string') return given
  return typeof given === 'object' && given !== null && 'text' in given ? String(given.text) : ''
}
