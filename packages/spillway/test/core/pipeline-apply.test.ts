import Type from 'typebox'
import { afterEach, beforeEach, describe, expect, it } from 'vitest'
import type { ApplyItem, Tx } from '../../src/index.js'
import type { Intake } from '../../src/intake/intake.js'
import { type Bench, bench, eventually } from '../pipeline-fixture.js'

const Note = Type.Object({ lane: Type.String(), n: Type.Integer() })
type NoteItem = ApplyItem<{ lane: string; n: number }>

let b: Bench
beforeEach(async () => {
  b = await bench()
  await b.sql(
    'CREATE TABLE notes (at bigserial, lane text, n int NOT NULL CHECK (n <> 13), seq bigint, op uuid UNIQUE)',
  )
})
afterEach(() => b.close())

async function insert(tx: Tx, items: readonly NoteItem[]): Promise<number[]> {
  await tx.query(
    'INSERT INTO notes (lane, n, seq, op) SELECT * FROM unnest($1::text[], $2::int[], $3::bigint[], $4::uuid[])',
    [items.map((i) => i.body.lane), items.map((i) => i.body.n), items.map((i) => i.seq), items.map((i) => i.id)],
  )
  return items.map((i) => i.body.n * 10)
}

/** `calls` gets the size of each batch. */
function notes(intake: Intake, calls: number[] = []) {
  return intake.define('notes.add', {
    body: Note,
    lane: (note) => ['notes', note.lane],
    maxRetries: 0,
    apply: async (tx, items) => {
      calls.push(items.length)
      return insert(tx, items)
    },
  })
}

const written = async (lane?: string) =>
  (await b.sql<{ n: number }>('SELECT n FROM notes WHERE $1::text IS NULL OR lane = $1 ORDER BY at', [lane])).map(
    (r) => r.n,
  )

const idOf = (answer: { kind: string; operationId?: string }): string => {
  if (answer.operationId === undefined) throw new Error(`expected an operation, not ${answer.kind}`)
  return answer.operationId
}

/** Makes something pending in the lane by holding it. */
async function behindPaused(intake: Intake, lane: string, submit: () => Promise<void>): Promise<void> {
  await intake.store.pause('notes', lane)
  const blocker = intake.find('block')
    ? { type: 'block' }
    : intake.define('block', { body: Note, lane: (note) => ['notes', note.lane], run: () => undefined })
  await intake.submit(blocker, { lane, n: 0 }, { respondAsync: true })
  await submit()
  await eventually(
    async () => ((await b.sql('SELECT 1 FROM spillway.parked')).length > 0 ? true : undefined),
    'the lane to be held',
  )
  await intake.store.resume('notes', lane)
  intake.wakeAll()
}

describe('apply', () => {
  it('writes in the accepting transaction and leaves no operation', async () => {
    const intake = await b.intake()
    const add = notes(intake)
    expect(await intake.submit(add, { lane: 'a', n: 1 })).toMatchObject({ kind: 'done', result: 10 })
    expect(await written()).toEqual([1])
    expect(await b.sql('SELECT 1 FROM spillway.ops')).toEqual([])
    expect(await b.audit()).toEqual([])
  })

  it('is called once for items that arrived together', async () => {
    const intake = await b.intake()
    const calls: number[] = []
    const add = notes(intake, calls)
    await intake.submit(add, { lane: 'warm', n: 1 })
    calls.length = 0
    const answers = await Promise.all(
      Array.from({ length: 200 }, (_, n) => intake.submit(add, { lane: `l${n % 7}`, n: n + 20 })),
    )
    expect(answers.map((a) => a.kind === 'done' && a.result)).toEqual(answers.map((_, n) => (n + 20) * 10))
    expect(calls.length).toBeLessThan(10)
    expect(calls.reduce((sum, n) => sum + n, 0)).toBe(200)
  })

  it('lets a poisoned item fail alone; its neighbours pass, once each', async () => {
    const intake = await b.intake()
    const add = notes(intake)
    await intake.submit(add, { lane: 'warm', n: 1 })
    const numbers = [20, 21, 13, 22, 23, 24, 25]
    const answers = await Promise.all(numbers.map((n) => intake.submit(add, { lane: 'a', n })))
    expect(answers.map((a) => a.kind)).toEqual(['done', 'done', 'refused', 'done', 'done', 'done', 'done'])
    expect(await written('a')).toEqual([20, 21, 22, 23, 24, 25])
    expect(await b.audit()).toEqual([])
  })

  it('refuses an answer of the wrong length and writes nothing', async () => {
    const intake = await b.intake()
    const add = intake.define('notes.add', {
      body: Note,
      apply: async (tx, items) => (await insert(tx, items)).slice(1),
    })
    expect(await intake.submit(add, { lane: 'a', n: 1 })).toMatchObject({
      kind: 'refused',
      refusal: { code: 'internal_error' },
    })
    expect(await written()).toEqual([])
  })

  it('behind something pending is queued, and applied by the worker in order', async () => {
    const intake = await b.intake()
    const add = notes(intake)
    const ids: string[] = []
    await behindPaused(intake, 'a', async () => {
      for (const n of [1, 2, 3]) {
        const answer = await intake.submit(add, { lane: 'a', n })
        expect(answer).toMatchObject({ kind: 'queued', reason: 'maintaining_order' })
        ids.push(idOf(answer))
      }
    })
    for (const id of ids) expect(await b.finished(id)).toMatchObject({ status: 'completed' })
    await intake.submit(add, { lane: 'a', n: 4 })
    expect(await written('a')).toEqual([1, 2, 3, 4])
    expect(await b.audit()).toEqual([])
  })

  it('by the worker lets a poisoned item die alone, and the lane continues', async () => {
    const intake = await b.intake()
    const add = notes(intake)
    const ids: string[] = []
    await behindPaused(intake, 'a', async () => {
      for (const n of [1, 13, 3])
        ids.push(idOf(await intake.submit(add, { lane: 'a', n }, { idempotencyKey: String(n) })))
    })
    const statuses = []
    for (const id of ids) statuses.push((await b.finished(id)).status)
    expect(statuses).toEqual(['completed', 'failed', 'completed'])
    expect(await written('a')).toEqual([1, 3])
    expect(await b.audit()).toEqual([])
  })

  it('gives each item its place in the lane, the same numbers direct and queued', async () => {
    const intake = await b.intake()
    const add = notes(intake)
    await intake.submit(add, { lane: 'a', n: 1 })
    await intake.submit(add, { lane: 'a', n: 2 })
    let id = ''
    await behindPaused(intake, 'a', async () => {
      id = idOf(await intake.submit(add, { lane: 'a', n: 3 }))
    })
    await b.finished(id)
    await intake.submit(add, { lane: 'a', n: 4 })
    const rows = await b.sql<{ seq: string }>("SELECT seq FROM notes WHERE lane = 'a' ORDER BY n")
    const seqs = rows.map((r) => Number(r.seq))
    expect(seqs).toEqual([...seqs].sort((x, y) => x - y))
    expect(new Set(seqs).size).toBe(4)
  })

  it('waits in a lane that is paused, like everything else', async () => {
    const intake = await b.intake()
    const add = notes(intake)
    await intake.store.pause('notes', null)
    const answer = await intake.submit(add, { lane: 'a', n: 1 })
    expect(answer.kind).toBe('queued')
    expect(await written()).toEqual([])
    await eventually(
      async () => ((await b.sql('SELECT 1 FROM spillway.parked')).length > 0 ? true : undefined),
      'the lane to be held',
    )
    await intake.store.resume('notes', null)
    intake.wakeAll()
    await b.finished(idOf(answer))
    expect(await written()).toEqual([1])
  })

  it('is queued when the caller asks for that', async () => {
    const intake = await b.intake()
    const add = notes(intake)
    const answer = await intake.submit(add, { lane: 'a', n: 1 }, { respondAsync: true })
    expect(answer).toMatchObject({ kind: 'queued', reason: 'requested' })
    await b.finished(idOf(answer))
    expect(await written()).toEqual([1])
  })

  it('is not done before its delay', async () => {
    const intake = await b.intake()
    const add = intake.define('notes.later', { body: Note, delayMs: () => 400, apply: insert })
    const answer = await intake.submit(add, { lane: 'a', n: 1 })
    expect(answer).toMatchObject({ kind: 'queued', reason: 'requested' })
    expect(await written()).toEqual([])
    await b.finished(idOf(answer))
    expect(await written()).toEqual([1])
  })

  it('keeps its answer for the Idempotency-Key with the effect', async () => {
    const intake = await b.intake()
    const add = notes(intake)
    const first = await intake.submit(add, { lane: 'a', n: 1 }, { idempotencyKey: 'k' })
    const again = await intake.submit(add, { lane: 'a', n: 1 }, { idempotencyKey: 'k' })
    expect(again).toEqual({ ...first, replayed: true })
    expect(await intake.submit(add, { lane: 'a', n: 2 }, { idempotencyKey: 'k' })).toMatchObject({
      refusal: { code: 'idempotency_mismatch' },
    })
    expect(await written()).toEqual([1])
  })

  it('with many at once of one key writes once', async () => {
    const one = await b.intake()
    const two = await b.intake()
    const submits = [notes(one), notes(two)].flatMap((add, i) =>
      Array.from({ length: 20 }, () => (i === 0 ? one : two).submit(add, { lane: 'a', n: 1 }, { idempotencyKey: 'k' })),
    )
    const answers = await Promise.all(submits)
    expect(new Set(answers.map((a) => a.kind))).toEqual(new Set(['done']))
    expect(answers.filter((a) => a.kind === 'done' && !a.replayed)).toHaveLength(1)
    expect(await written()).toEqual([1])
  })
})
