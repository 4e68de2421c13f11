/**
 * The stream log in PostgreSQL: a record is a row, and writers collide on its key (stream, first).
 *
 * Two ways to append. Quick: one INSERT, for records that start a stream or follow one that this adapter has seen written by
 * the same writer. It counts the inserted rows; if some are missing, or if the record before is not known, the careful way
 * (`stream_append`) looks for the record before each and returns which exist. Both may be retried: existing records are
 * recognised by their writer.
 */
import {
  type Append,
  type Cursor,
  type EndKind,
  LogFault,
  type StreamKey,
  type StreamLog,
  type StreamRecord,
} from '../../streams/port.js'
import type { Tx } from '../port.js'
import { jsonSeparator, plainArray, textArray } from './arrays.js'
import type { StreamBell } from './stream-bell.js'

/** Between two records of a call, as `jsonSeparator` between two chunks of a record: neither can occur in JSON. */
const recordSeparator = '\x1d'
// biome-ignore lint/suspicious/noControlCharactersInRegex: it looks for just these
const noJson = /[\0\x1d\x1e]/

const recordsPerCursor = 64
const bytesPerCursor = 64 * 1024
const bytesPerAnswer = 4 * 1024 * 1024
/** The rows that one statement sorts must fit into its memory: 500 cursors far behind bring 500 × 65 records. */
const cursorsPerStatement = 500
/** The maximum of PostgreSQL's integer, less one to add; a client may send any number. */
const afterMax = 2 ** 31 - 2
/** Streams whose last record is remembered. A forgotten one costs a careful append. */
const knownMax = 20_000
/** After a fault, when the next call may find the database reachable again. */
const downMs = 1_000

/**
 * For the connections of appends: with few rows in each of many streams, explicit settings are better than the planner's
 * guess.
 */
export const appendSettings = {
  enable_hashjoin: 'off',
  enable_mergejoin: 'off',
  enable_seqscan: 'off',
  enable_bitmapscan: 'off',
  plan_cache_mode: 'force_generic_plan',
} as const

export interface StreamLogOptions {
  /** On dedicated connections, with `appendSettings`. */
  append: Tx['query']
  /** Likewise, but for reads. */
  read: Tx['query']
  bell: StreamBell
  /** The schema, quoted. */
  schema: string
}

/** Its statements. */
function statementsOf(s: string) {
  const insert = `
    INSERT INTO ${s}.stream_chunks (stream, born_at, first, last, writer, chunks, ended)
    SELECT g.stream, s.born_at, g.first, g.last, g.writer, g.chunks, g.ended
    FROM unnest($1::uuid[], $2::bigint[], $3::int[], $4::int[], $5::text[], $6::text[], string_to_array($7::text, E'\\x1d'))
      g(stream, born, first, last, writer, ended, chunks)
    JOIN ${s}.streams s ON s.id = g.stream AND s.born_at = ${s}.stream_born(g.born) AND s.ended IS NULL
    ON CONFLICT DO NOTHING`
  return {
    insert,
    insertWithEnds: `
      WITH written AS (${insert} RETURNING stream, ended), closed AS (
        UPDATE ${s}.streams s SET ended = w.ended, ended_at = ${s}.clock() FROM written w
        WHERE w.ended IS NOT NULL AND s.id = w.stream AND s.ended IS NULL
      )
      SELECT FROM written`,
    careful: `SELECT ${s}.stream_append($1, $2, $3, $4, $5, $6, $7, $8) AS written`,
    /**
     * The cursors' limits are inside the lateral part, so that only candidate rows are sorted. Ordered by distance from the
     * cursor, so that each gets its first record before any gets a second.
     */
    read: `
      SELECT n, first, ended, CASE WHEN brought - size < $4 THEN chunks END AS chunks FROM (
        SELECT g.n, x.first, x.ended, x.chunks, x.size, sum(x.size) OVER (ORDER BY x.first - g.after, g.n) AS brought
        FROM unnest($1::uuid[], $2::bigint[], $3::int[]) WITH ORDINALITY g(stream, born, after, n)
        CROSS JOIN LATERAL (
          SELECT z.first, z.ended, CASE WHEN z.upto - z.size < ${bytesPerCursor} THEN z.chunks END AS chunks,
            CASE WHEN z.upto - z.size < ${bytesPerCursor} THEN z.size ELSE 0 END AS size
          FROM (
            SELECT y.*, sum(y.size) OVER (ORDER BY y.first) AS upto FROM (
              SELECT x.first, x.ended, x.chunks, octet_length(x.chunks) AS size FROM ${s}.stream_chunks x
              WHERE x.stream = g.stream AND x.born_at = ${s}.stream_born(g.born) AND x.first > g.after
              ORDER BY x.first LIMIT ${recordsPerCursor + 1}
            ) y
          ) z
        ) x
      ) found`,
    /** The record that a cursor is inside of, if any. */
    within: `
      SELECT n, first, ended, CASE WHEN brought - size < $4 THEN chunks END AS chunks FROM (
        SELECT g.n, x.*, sum(x.size) OVER (ORDER BY g.n) AS brought
        FROM unnest($1::uuid[], $2::bigint[], $3::int[]) WITH ORDINALITY g(stream, born, after, n)
        CROSS JOIN LATERAL (
          SELECT x.first, x.last, x.ended, x.chunks, octet_length(x.chunks) AS size FROM ${s}.stream_chunks x
          WHERE x.stream = g.stream AND x.born_at = ${s}.stream_born(g.born) AND x.first <= g.after + 1
          ORDER BY x.first DESC LIMIT 1
        ) x
        WHERE x.last > g.after
      ) found`,
    head: `
      SELECT last, ended FROM ${s}.stream_chunks WHERE stream = $1 AND born_at = ${s}.stream_born($2) ORDER BY first DESC LIMIT 1`,
  }
}

interface Row extends Record<string, unknown> {
  n: number
  first: number
  ended: EndKind | null
  /** Null: it would be too large. */
  chunks: string | null
}

interface Answer {
  records: StreamRecord[]
  more: boolean
}

export class PostgresStreamLog implements StreamLog {
  readonly name = 'postgres'
  readonly #options: StreamLogOptions
  readonly #sql: ReturnType<typeof statementsOf>
  readonly #known = new Map<string, { writer: string; last: number }>()
  readonly #listeners: ((ids: readonly string[] | null) => void)[] = []
  #downUntil = 0

  constructor(options: StreamLogOptions) {
    this.#options = options
    this.#sql = statementsOf(options.schema)
  }

  get isUp(): boolean {
    return performance.now() >= this.#downUntil
  }

  async append(appends: readonly Append[]): Promise<('written' | 'lost')[]> {
    if (appends.length === 0) return []
    // In one order everywhere, so that two processes that write the same streams cannot deadlock.
    const order = appends.map((_, index) => index).sort((a, b) => compare(appends[a], appends[b]))
    const sorted = order.flatMap((index) => appends[index] ?? [])
    const levels = levelsOf(sorted)
    const values = valuesOf(sorted)
    const isQuick = levels.every((level) => level === 0) && sorted.every((append) => this.#follows(append))
    const answers: ('written' | 'lost')[] = []
    const all = isQuick && (await this.#insert(sorted, values))
    const written = all ? null : await this.#insertCarefully(values, levels)
    for (const [at, append] of sorted.entries()) {
      const isWritten = written === null || written[at] === true
      answers[order[at] ?? 0] = isWritten ? 'written' : 'lost'
      this.#remember(append, isWritten)
      if (isWritten && append.ring) this.#options.bell.grown(append.key.id)
    }
    return answers
  }

  async read(cursors: readonly Cursor[]): Promise<Answer[]> {
    const answers: Answer[] = cursors.map(() => ({ records: [], more: false }))
    let left = bytesPerAnswer
    for (let from = 0; from < cursors.length; from += cursorsPerStatement) {
      const some = cursors.slice(from, from + cursorsPerStatement)
      if (left <= 0) {
        for (const index of some.keys()) answers[from + index] = { records: [], more: true }
        continue
      }
      left -= await this.#readSome(some, answers.slice(from, from + cursorsPerStatement), left)
    }
    return answers
  }

  async head(key: StreamKey): Promise<{ last: number; end: EndKind | null }> {
    const { rows } = await this.#ask<{ last: number; ended: EndKind | null }>(this.#options.read, this.#sql.head, [
      key.id,
      key.bornMs,
    ])
    return { last: rows[0]?.last ?? 0, end: rows[0]?.ended ?? null }
  }

  onBell(heard: (ids: readonly string[] | null) => void): void {
    this.#listeners.push(heard)
  }

  /** The text after `streams:` on the store's channel; null when some may be lost. */
  heard(ids: string | null): void {
    const list = ids === null ? null : ids.split(',')
    for (const listener of this.#listeners) listener(list)
  }

  /** The connections belong to the store and end with it. */
  async close(): Promise<void> {
    this.#listeners.length = 0
    this.#known.clear()
  }

  /** Whether this writer is known to have written the record before, or there is none. */
  #follows({ key, first, writer }: Append): boolean {
    if (first === 1) return true
    const known = this.#known.get(key.id)
    return known !== undefined && known.last === first - 1 && known.writer === writer
  }

  #remember({ key, first, chunks, end, writer }: Append, isWritten: boolean): void {
    if (!isWritten || end !== null) {
      this.#known.delete(key.id)
      return
    }
    const known = this.#known.get(key.id)
    const last = first + chunks.length - 1
    if (known !== undefined) {
      known.writer = writer
      known.last = last
      return
    }
    this.#known.set(key.id, { writer, last })
    if (this.#known.size <= knownMax) return
    for (const oldest of this.#known.keys()) {
      this.#known.delete(oldest)
      return
    }
  }

  /** True when all of them exist now. */
  async #insert(sorted: readonly Append[], values: readonly unknown[]): Promise<boolean> {
    const text = sorted.some(({ end }) => end !== null) ? this.#sql.insertWithEnds : this.#sql.insert
    const { rowCount } = await this.#ask(this.#options.append, text, values)
    return rowCount === sorted.length
  }

  async #insertCarefully(values: readonly unknown[], levels: readonly number[]): Promise<readonly boolean[]> {
    const { rows } = await this.#ask<{ written: boolean[] }>(this.#options.append, this.#sql.careful, [
      ...values,
      plainArray(levels),
    ])
    return rows[0]?.written ?? []
  }

  /** Returns about how many bytes it brought. */
  async #readSome(cursors: readonly Cursor[], answers: readonly Answer[], budget: number): Promise<number> {
    let left = budget
    const { rows } = await this.#ask<Row>(this.#options.read, this.#sql.read, [...placesOf(cursors), left])
    for (const row of rows) {
      const answer = answers[row.n - 1]
      if (answer !== undefined) left -= take(answer, row)
    }
    // Readers almost always stop between two records; only if the next one is missing may a cursor be inside one.
    const unsure: { cursor: Cursor; answer: Answer }[] = []
    for (const [index, cursor] of cursors.entries()) {
      const answer = answers[index]
      if (cursor.after === 0 || answer === undefined || answer.records[0]?.first === cursor.after + 1) continue
      // The next one exists, but was too large for this answer.
      if (answer.more && answer.records.length === 0) continue
      unsure.push({ cursor, answer })
    }
    if (unsure.length === 0) return budget - left
    const places = placesOf(unsure.map(({ cursor }) => cursor))
    const within = await this.#ask<Row>(this.#options.read, this.#sql.within, [...places, Math.max(1, left)])
    for (const row of within.rows) {
      const found = unsure[row.n - 1]
      if (found !== undefined) left -= takeBefore(found.answer, row, found.cursor)
    }
    return budget - left
  }

  async #ask<R extends Record<string, unknown>>(query: Tx['query'], text: string, values: readonly unknown[]) {
    try {
      const answer = await query<R>(text, values)
      this.#downUntil = 0
      return answer
    } catch (fault) {
      this.#downUntil = performance.now() + downMs
      throw new LogFault('the stream log in the database did not answer', { cause: fault })
    }
  }
}

/** Adds the row's record, unless the answer is full; returns its size. */
function take(answer: Answer, { first, ended, chunks }: Row): number {
  if (answer.more || chunks === null || answer.records.length === recordsPerCursor) {
    answer.more = true
    return 0
  }
  answer.records.push({ first, chunks: chunks.split(jsonSeparator), end: ended })
  return chunks.length
}

/** Puts the record that the cursor is inside of before the later ones. */
function takeBefore(answer: Answer, row: Row, cursor: Cursor): number {
  const { records: behind, more } = answer
  Object.assign(answer, { records: [], more: false })
  const size = take(answer, row)
  if (answer.more) return size
  // It starts after the cursor, so it arrived after the first read, and others may have arrived with it.
  if (row.first > cursor.after) answer.more = true
  else {
    answer.records.push(...behind)
    answer.more = more
  }
  return size
}

function compare(a: Append | undefined, b: Append | undefined): number {
  if (a === undefined || b === undefined) return 0
  if (a.key.id !== b.key.id) return a.key.id < b.key.id ? -1 : 1
  return a.first - b.first
}

/** How many records of the same stream come before each. */
function levelsOf(sorted: readonly Append[]): number[] {
  const levels: number[] = []
  for (const [at, { key }] of sorted.entries()) {
    levels.push(at > 0 && sorted[at - 1]?.key.id === key.id ? (levels[at - 1] ?? 0) + 1 : 0)
  }
  return levels
}

/** One text for all chunks: an array of texts took a third longer, because of the quotes in JSON. */
function valuesOf(sorted: readonly Append[]): unknown[] {
  const texts = sorted.map(({ chunks }) => {
    if (chunks.length === 0) throw new RangeError('A record has at least one chunk.')
    for (const chunk of chunks) {
      if (chunk === '' || noJson.test(chunk)) throw new RangeError('A chunk of a stream has to be a JSON text.')
    }
    return chunks.join(jsonSeparator)
  })
  return [
    plainArray(sorted.map(({ key }) => key.id)),
    plainArray(sorted.map(({ key }) => key.bornMs)),
    plainArray(sorted.map(({ first }) => first)),
    plainArray(sorted.map(({ first, chunks }) => first + chunks.length - 1)),
    textArray(sorted.map(({ writer }) => writer)),
    plainArray(sorted.map(({ end }) => end)),
    texts.join(recordSeparator),
  ]
}

const placesOf = (cursors: readonly Cursor[]): string[] => [
  plainArray(cursors.map(({ key }) => key.id)),
  plainArray(cursors.map(({ key }) => key.bornMs)),
  plainArray(cursors.map(({ after }) => Math.min(after, afterMax))),
]
