/**
 * What every StreamLog adapter must do. `make` opens one log and a second adapter on the same data, as another process
 * would: connections of its own.
 */
import { afterEach, beforeEach, describe, expect, it } from 'vitest'
import type { Append, EndKind, StreamKey, StreamLog, StreamRecord } from '../src/streams/port.js'
import { eventually } from './pipeline-fixture.js'

export interface OpenedLog {
  log: StreamLog
  /** Another process on the same data. */
  other: StreamLog
  /** A new stream, made known where the adapter asks for that. */
  open(): Promise<StreamKey>
  /** All of the stream is gone, as after its retention. */
  lose(key: StreamKey): Promise<void>
  close(): Promise<void>
}

/** What one answer may bring: about 64 kB for a cursor, about 4 MB in all; one record more of either. */
const cursorBytesMax = 64 * 1024
const answerBytesMax = 4 * 1024 * 1024

export function streamLogConformance(name: string, make: () => Promise<OpenedLog>): void {
  describe(`the stream log in ${name}`, () => {
    let current: OpenedLog | undefined
    const opened = (): OpenedLog => {
      if (current === undefined) throw new Error('no log is open')
      return current
    }
    beforeEach(async () => {
      current = await make()
    })
    afterEach(async () => {
      const ended = current
      current = undefined
      await ended?.close()
    })
    appending(opened)
    ending(opened)
    reading(opened)
    racing(opened)
    ringing(opened)
  })
}

/** An append of numbered chunks: `{"w":"a","n":7}`. */
function append(key: StreamKey, first: number, count: number, given: Partial<Append> = {}): Append {
  const writer = given.writer ?? 'a'
  const chunks = Array.from({ length: count }, (_, i) => JSON.stringify({ w: writer, n: first + i }))
  return { key, first, chunks, end: null, writer, ring: false, ...given }
}

const one = async (log: StreamLog, given: Append): Promise<'written' | 'lost' | undefined> =>
  (await log.append([given]))[0]

/** All behind `after`, by as many calls as it takes. */
async function readAll(log: StreamLog, key: StreamKey, after = 0): Promise<StreamRecord[]> {
  const all: StreamRecord[] = []
  for (let last = after; ; ) {
    const [answer] = await log.read([{ key, after: last }])
    if (answer === undefined) throw new Error('a cursor has no answer')
    all.push(...answer.records)
    if (!answer.more) return all
    const newest = answer.records.at(-1)
    if (newest === undefined) throw new Error('there is more, but nothing came')
    last = newest.first + newest.chunks.length - 1
  }
}

const texts = (records: readonly StreamRecord[]): string[] => records.flatMap((record) => [...record.chunks])
const bytesOf = (records: readonly StreamRecord[]): number =>
  texts(records).reduce((sum, text) => sum + Buffer.byteLength(text), 0)

function appending(opened: () => OpenedLog): void {
  describe('appending', () => {
    it('keeps records as they were given', async () => {
      const { log, other, open } = opened()
      const key = await open()
      const chunks = ['{"a":"ä€😀 \\u0000 \\n"}', '["x,\\"y\\"",{}]', String.raw`"back\\slash"`, 'null']
      expect(await one(log, append(key, 1, 0, { chunks }))).toBe('written')
      expect(await readAll(other, key)).toEqual([{ first: 1, chunks, end: null }])
    })

    it('answers in the given order, for many streams at once', async () => {
      const { log, open } = opened()
      const keys = await Promise.all(Array.from({ length: 20 }, open))
      const taken = keys.filter((_, i) => i % 3 === 0)
      await log.append(taken.map((key) => append(key, 1, 1, { writer: 'earlier' })))
      const answers = await log.append(keys.map((key) => append(key, 1, 2)))
      expect(answers).toEqual(keys.map((_, i) => (i % 3 === 0 ? 'lost' : 'written')))
    })

    it('takes nothing to append', async () => {
      expect(await opened().log.append([])).toEqual([])
    })

    it('takes several records of one stream in one call', async () => {
      const { log, open } = opened()
      const key = await open()
      expect(await log.append([append(key, 1, 2), append(key, 3, 1), append(key, 4, 3)])).toEqual([
        'written',
        'written',
        'written',
      ])
      expect((await readAll(log, key)).map(({ first }) => first)).toEqual([1, 3, 4])
    })

    it('says written again to the writer whose record is stored', async () => {
      const { log, other, open } = opened()
      const key = await open()
      await log.append([append(key, 1, 2)])
      expect(await one(other, append(key, 1, 2))).toBe('written')
      expect(await readAll(log, key)).toHaveLength(1)
    })

    it('continues after a record that an unanswered try had written', async () => {
      const { log, open } = opened()
      const key = await open()
      await log.append([append(key, 1, 2)])
      expect(await log.append([append(key, 1, 2), append(key, 3, 2)])).toEqual(['written', 'written'])
      expect(texts(await readAll(log, key))).toEqual(append(key, 1, 4).chunks)
    })

    it('gives a place to one writer only', async () => {
      const { log, other, open } = opened()
      const key = await open()
      await log.append([append(key, 1, 2, { writer: 'a' })])
      expect(await one(other, append(key, 1, 2, { writer: 'b' }))).toBe('lost')
      expect(texts(await readAll(log, key))).toEqual(append(key, 1, 2, { writer: 'a' }).chunks)
    })

    it('writes nothing behind a record that was lost in the same call', async () => {
      const { log, other, open } = opened()
      const key = await open()
      await other.append([append(key, 1, 2, { writer: 'b' })])
      // Its second record would fit behind the other's: two samples in one stream.
      expect(await log.append([append(key, 1, 2), append(key, 3, 1)])).toEqual(['lost', 'lost'])
      expect(texts(await readAll(log, key))).toEqual(append(key, 1, 2, { writer: 'b' }).chunks)
    })

    it('lets another writer continue at the end of the log', async () => {
      const { log, other, open } = opened()
      const key = await open()
      await log.append([append(key, 1, 3, { writer: 'a' })])
      expect(await one(other, append(key, 4, 1, { writer: 'b', end: 'error' }))).toBe('written')
      expect(await one(log, append(key, 4, 1, { writer: 'a' }))).toBe('lost')
    })

    it('leaves no hole', async () => {
      const { log, open } = opened()
      const key = await open()
      await log.append([append(key, 1, 3)])
      expect(await one(log, append(key, 5, 1))).toBe('lost')
      expect(await log.head(key)).toEqual({ last: 3, end: null })
    })

    it('writes nothing into the middle of a record', async () => {
      const { log, open } = opened()
      const key = await open()
      await log.append([append(key, 1, 3, { writer: 'a' })])
      expect(await one(log, append(key, 2, 1, { writer: 'b' }))).toBe('lost')
      expect(await readAll(log, key)).toHaveLength(1)
    })

    it('has lost a stream that is gone', async () => {
      const { log, open, lose } = opened()
      const key = await open()
      await log.append([append(key, 1, 2)])
      await lose(key)
      expect(await one(log, append(key, 3, 1))).toBe('lost')
      expect(await log.head(key)).toEqual({ last: 0, end: null })
    })
  })
}

function ending(opened: () => OpenedLog): void {
  describe('an end', () => {
    for (const end of ['done', 'error', 'cancelled'] as const satisfies EndKind[]) {
      it(`is reported as ${end}, to readers and by the head`, async () => {
        const { log, other, open } = opened()
        const key = await open()
        await log.append([append(key, 1, 2), append(key, 3, 2, { end })])
        expect(await other.head(key)).toEqual({ last: 4, end })
        expect((await readAll(other, key)).map((record) => record.end)).toEqual([null, end])
      })
    }

    it('has nothing behind it, from whomever', async () => {
      const { log, other, open } = opened()
      const key = await open()
      await log.append([append(key, 1, 2, { end: 'done' })])
      expect(await one(log, append(key, 3, 1))).toBe('lost')
      expect(await one(other, append(key, 3, 1, { writer: 'b', end: 'error' }))).toBe('lost')
      expect(await log.head(key)).toEqual({ last: 2, end: 'done' })
    })

    it('has nothing behind it in the same call', async () => {
      const { log, open } = opened()
      const key = await open()
      expect(await log.append([append(key, 1, 1, { end: 'done' }), append(key, 2, 1)])).toEqual(['written', 'lost'])
    })

    it('of another is not passed by records that were on their way', async () => {
      const { log, other, open } = opened()
      const key = await open()
      await log.append([append(key, 1, 2)])
      await other.append([append(key, 3, 1, { writer: 'b', end: 'error' })])
      expect(await log.append([append(key, 3, 1), append(key, 4, 1)])).toEqual(['lost', 'lost'])
      expect(await log.head(key)).toEqual({ last: 3, end: 'error' })
    })

    it('is written for a writer that repeats its call', async () => {
      const { log, open } = opened()
      const key = await open()
      const last = append(key, 1, 1, { end: 'done' })
      await log.append([last])
      expect(await one(log, last)).toBe('written')
    })
  })
}

function reading(opened: () => OpenedLog): void {
  describe('reading', () => {
    it('answers in the order of the cursors, also for unknown streams', async () => {
      const { log, open, lose } = opened()
      const [a, b, gone] = [await open(), await open(), await open()]
      await log.append([append(a, 1, 1), append(b, 1, 1, { writer: 'b' })])
      await lose(gone)
      const answers = await log.read([b, gone, a, b].map((key) => ({ key, after: 0 })))
      expect(answers.map(({ records }) => texts(records))).toEqual([
        ['{"w":"b","n":1}'],
        [],
        ['{"w":"a","n":1}'],
        ['{"w":"b","n":1}'],
      ])
      expect(answers.every(({ more }) => !more)).toBe(true)
    })

    it('takes no cursors', async () => {
      expect(await opened().log.read([])).toEqual([])
    })

    it('returns the records after the cursor, and the one that contains it', async () => {
      const { log, open } = opened()
      const key = await open()
      await log.append([append(key, 1, 3), append(key, 4, 5), append(key, 9, 1)])
      const firsts = async (after: number) => (await readAll(log, key, after)).map(({ first }) => first)
      expect(await firsts(0)).toEqual([1, 4, 9])
      expect(await firsts(2)).toEqual([1, 4, 9])
      expect(await firsts(3)).toEqual([4, 9])
      expect(await firsts(5)).toEqual([4, 9])
      expect(await firsts(8)).toEqual([9])
      expect(await firsts(9)).toEqual([])
      expect(await firsts(500)).toEqual([])
    })

    it('says that there is more than one answer brings, and all of it comes', async () => {
      const { log, open } = opened()
      const key = await open()
      const records = Array.from({ length: 500 }, (_, i) => append(key, 1 + 2 * i, 2))
      for (let i = 0; i < records.length; i += 100) await log.append(records.slice(i, i + 100))
      const [answer] = await log.read([{ key, after: 0 }])
      expect(answer?.more).toBe(true)
      expect(texts(await readAll(log, key))).toEqual(append(key, 1, 1_000).chunks)
    })

    it('says no more when an answer brings just all', async () => {
      const { log, open } = opened()
      const key = await open()
      const count = 200
      for (let n = 1; n <= count; n += 50) {
        await log.append(Array.from({ length: 50 }, (_, i) => append(key, n + i, 1)))
      }
      for (let after = 0; after < count; after++) {
        const [answer] = await log.read([{ key, after }])
        expect(answer?.more).toBe((answer?.records.at(-1)?.first ?? 0) < count)
      }
    })

    it('bounds the bytes for one cursor', async () => {
      const { log, open } = opened()
      const key = await open()
      const chunks = [JSON.stringify('x'.repeat(50_000))]
      for (let first = 1; first <= 20; first++) await log.append([append(key, first, 0, { chunks })])
      const [answer] = await log.read([{ key, after: 0 }])
      expect(bytesOf(answer?.records ?? [])).toBeLessThan(cursorBytesMax + 50_010)
      expect(answer?.more).toBe(true)
      expect(await readAll(log, key)).toHaveLength(20)
    })

    it('brings a record that is larger than the bound', async () => {
      const { log, open } = opened()
      const key = await open()
      const large = JSON.stringify('y'.repeat(cursorBytesMax + 100_000))
      await log.append([append(key, 1, 0, { chunks: [large] }), append(key, 2, 0, { chunks: ['2'] })])
      expect(texts(await readAll(log, key))).toEqual([large, '2'])
    })

    it('bounds the bytes of one answer, and in the end every cursor has all', async () => {
      const { log, open } = opened()
      const keys = await Promise.all(Array.from({ length: 30 }, open))
      const chunks = [JSON.stringify('z'.repeat(120_000))]
      for (const first of [1, 2]) {
        for (const key of keys) await log.append([append(key, first, 0, { chunks })])
      }
      const got = keys.map(() => 0)
      for (let round = 0; got.some((n) => n < 2); round++) {
        if (round > 10) throw new Error('some cursors come to nothing')
        const answers = await log.read(keys.map((key, i) => ({ key, after: got[i] ?? 0 })))
        expect(bytesOf(answers.flatMap(({ records }) => records))).toBeLessThan(answerBytesMax + 120_010)
        answers.forEach(({ records, more }, i) => {
          got[i] = (got[i] ?? 0) + records.length
          expect(more).toBe((got[i] ?? 0) < 2)
        })
      }
    })
  })
}

function racing(opened: () => OpenedLog): void {
  it('is one unbroken log per stream when two writers race for all of them', async () => {
    const { log, other, open } = opened()
    const keys = await Promise.all(Array.from({ length: 12 }, open))
    const seed = Math.floor(Math.random() * 2 ** 31)
    const answered = new Map<string, 'written' | 'lost'>()
    await Promise.all([
      race(log, keys, 'left', seeded(seed), answered),
      race(other, keys, 'right', seeded(seed + 1), answered),
    ])
    const kept = new Set<string>()
    for (const key of keys) {
      const records = await readAll(log, key)
      let next = 1
      for (const [i, record] of records.entries()) {
        expect(record.first, `seed ${seed}`).toBe(next)
        expect(record.end !== null, `seed ${seed}`).toBe(i === records.length - 1)
        next += record.chunks.length
      }
      for (const text of texts(records)) kept.add(text)
    }
    const wrong = [...answered].filter(([text, answer]) => kept.has(text) !== (answer === 'written'))
    expect(wrong, `seed ${seed}`).toEqual([])
    expect([...answered.values()].filter((answer) => answer === 'lost').length, `seed ${seed}`).toBeGreaterThan(0)
  })
}

/**
 * Writes to every stream until it has ended, all that are left in one call. A writer that lost looks for the end of the log and
 * goes on there as a new writer, as an operation does that is run again.
 */
async function race(
  log: StreamLog,
  keys: readonly StreamKey[],
  name: string,
  random: () => number,
  answered: Map<string, 'written' | 'lost'>,
): Promise<void> {
  const streams = keys.map((key) => ({ key, last: 0, writer: `${name} ${random()}`, over: false }))
  let serial = 0
  for (let round = 0; streams.some(({ over }) => !over); round++) {
    const running = streams.filter(({ over }) => !over)
    const sent = running.flatMap((stream) => {
      let first = stream.last + 1
      const records = 1 + Math.floor(random() * 2)
      return Array.from({ length: records }, (_, i) => {
        const count = 1 + Math.floor(random() * 3)
        const chunks = Array.from({ length: count }, () => JSON.stringify(`${stream.writer} ${++serial}`))
        const end: EndKind | null = i === records - 1 && round > 20 && random() < 0.2 ? 'done' : null
        const given: Append = { key: stream.key, first, chunks, end, writer: stream.writer, ring: false }
        first += count
        return { stream, given }
      })
    })
    const answers = await log.append(sent.map(({ given }) => given))
    for (const [i, { stream, given }] of sent.entries()) {
      const answer = answers[i] ?? 'lost'
      for (const text of given.chunks) answered.set(text, answer)
      if (answer === 'written') {
        stream.last = given.first + given.chunks.length - 1
        stream.over ||= given.end !== null
      } else if (!stream.over) {
        const head = await log.head(given.key)
        Object.assign(stream, { last: head.last, over: head.end !== null, writer: `${name} ${random()}` })
      }
    }
  }
}

function seeded(seed: number): () => number {
  let state = seed
  return () => {
    state = (Math.imul(state, 1_664_525) + 1_013_904_223) >>> 0
    return state / 2 ** 32
  }
}

function ringing(opened: () => OpenedLog): void {
  describe('the bell', () => {
    it('notifies another process of streams that have grown, if they are to be notified', async () => {
      const { log, other, open } = opened()
      const heard: string[] = []
      other.onBell((ids) => heard.push(...(ids ?? [])))
      const [silent, loud] = [await open(), await open()]
      await log.append([append(silent, 1, 1)])
      await log.append([append(loud, 1, 1, { ring: true })])
      await eventually(() => heard.includes(loud.id), 'the bell')
      expect(heard).not.toContain(silent.id)
    })

    it('does not notify about a lost record', async () => {
      const { log, other, open } = opened()
      const heard: string[] = []
      other.onBell((ids) => heard.push(...(ids ?? [])))
      const [taken, free] = [await open(), await open()]
      await other.append([append(taken, 1, 1, { writer: 'b' })])
      await log.append([append(taken, 1, 1, { ring: true }), append(free, 1, 1, { ring: true })])
      await eventually(() => heard.includes(free.id), 'the bell')
      expect(heard).not.toContain(taken.id)
    })

    it('reports all, however many there are in one call', async () => {
      const { log, other, open } = opened()
      const heard = new Set<string>()
      other.onBell((ids) => {
        for (const id of ids ?? []) heard.add(id)
      })
      const keys = await Promise.all(Array.from({ length: 600 }, open))
      await log.append(keys.map((key) => append(key, 1, 1, { ring: true })))
      await eventually(() => keys.every(({ id }) => heard.has(id)), 'the bell for all of them')
    })

    it('notifies when the written record can be read', async () => {
      const { log, other, open } = opened()
      const key = await open()
      const seen = new Promise<StreamRecord[]>((resolve, reject) => {
        other.onBell((ids) => {
          if (ids?.includes(key.id)) readAll(other, key).then(resolve, reject)
        })
      })
      await log.append([append(key, 1, 1, { ring: true })])
      expect(await seen).toHaveLength(1)
    })
  })
}
