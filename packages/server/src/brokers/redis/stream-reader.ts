/**
 * Reads many streams at once. Redis limits a reply by records, not by bytes, so there are two rounds: first a few
 * records of each, enough for a reader that keeps up; then, for readers that are behind, as many as fit by the size of
 * the first ones.
 */
import type { Redis } from 'ioredis'
import type { Cursor, EndKind, StreamRecord } from 'spillway/workload'
import { refusalOf } from './faults.js'
import type { Names } from './names.js'

export interface CursorRead {
  records: StreamRecord[]
  more: boolean
}

const cursorBytesMax = 64 * 1024
const answerBytesMax = 4 * 1024 * 1024
const cursorRecordsMax = 256
const fewRecords = 4
const waveCursors = { min: 8, max: 256 }

interface Place extends CursorRead {
  cursor: Cursor
  bytes: number
  /** Whether it was read and all results were taken: there may be more for the second round. */
  isOpen: boolean
}

export interface ReaderOptions {
  names: Names
  send<T>(work: (redis: Redis) => Promise<T>): Promise<T>
  /** The key holds something other than a stream: treated as missing, and logged. */
  onForeignKey(id: string): void
}

export class Reader {
  readonly #o: ReaderOptions
  /** Recent record size: determines how many cursors fit into one read. */
  #recordBytes = 1_024

  constructor(options: ReaderOptions) {
    this.#o = options
  }

  async read(cursors: readonly Cursor[]): Promise<CursorRead[]> {
    const places = cursors.map((cursor): Place => ({ cursor, records: [], more: true, bytes: 0, isOpen: false }))
    // Starts at a random place: otherwise the last would starve while the ones before it fill the reply.
    const start = Math.floor(Math.random() * places.length)
    const order = [...places.slice(start), ...places.slice(0, start)]
    let left = answerBytesMax
    for (let at = 0; at < order.length && left > 0; ) {
      const size = clamp(answerBytesMax / (this.#recordBytes * fewRecords), waveCursors)
      left = await this.#wave(order.slice(at, at + size), () => fewRecords, left)
      at += size
    }
    const behind = order.filter(({ isOpen, more }) => isOpen && more)
    const size = Math.floor(answerBytesMax / cursorBytesMax)
    for (let at = 0; at < behind.length && left > 0; at += size) {
      left = await this.#wave(behind.slice(at, at + size), roomIn, left)
    }
    return places.map(({ records, more }) => ({ records, more }))
  }

  /** Returns the bytes left in the reply. */
  async #wave(places: readonly Place[], countFor: (place: Place) => number, left: number): Promise<number> {
    const counts = places.map(countFor)
    const found = await this.#ranges(places, counts)
    let room = left
    let records = 0
    for (const [i, place] of places.entries()) {
      const before = place.bytes
      records += take(place, found[i] ?? [], { count: counts[i] ?? 0, room })
      room -= place.bytes - before
    }
    if (records > 0) this.#recordBytes = Math.max(1, (this.#recordBytes + (left - room) / records) / 2)
    return room
  }

  /** Asks for one more than needed, to learn whether there are more. */
  async #ranges(places: readonly Place[], counts: readonly number[]): Promise<Entry[][]> {
    const answers = await this.#o.send((redis) => {
      const pipeline = redis.pipeline()
      for (const [i, place] of places.entries()) {
        const name = this.#o.names.stream(place.cursor.key.id)
        pipeline.xrange(name, `${lastOf(place) + 1}`, '+', 'COUNT', (counts[i] ?? 0) + 1)
      }
      return pipeline.exec()
    })
    return places.map((place, i) => {
      const [error, entries] = answers?.[i] ?? [new Error('there is no answer')]
      if (refusalOf(error) === 'WRONGTYPE') this.#o.onForeignKey(place.cursor.key.id)
      else if (error) throw error
      return error ? [] : (entries as Entry[])
    })
  }
}

/** An entry in the driver's form: its id, then fields and values alternating. */
export type Entry = [id: string, fields: string[]]

const lastOf = ({ cursor, records }: Place): number => {
  const newest = records.at(-1)
  return newest === undefined ? cursor.after : newest.first + newest.chunks.length - 1
}

const clamp = (value: number, { min, max }: { min: number; max: number }): number =>
  Math.min(max, Math.max(min, Math.floor(value)))

const roomIn = ({ records: { length }, bytes }: Place): number => {
  const typical = Math.max(1, bytes / Math.max(1, length))
  return clamp((cursorBytesMax - bytes) / typical, { min: 1, max: cursorRecordsMax - length })
}

/** Takes as many as fit, plus the one that exceeds the room: otherwise a large record would never fit. Returns how many. */
function take(place: Place, found: readonly Entry[], limits: { count: number; room: number }): number {
  let { room } = limits
  let taken = 0
  for (const [id, fields] of found.slice(0, limits.count)) {
    if (room <= 0 || place.bytes >= cursorBytesMax) break
    const text = fieldOf(fields, 'c') ?? '[]'
    place.records.push({ first: Number(id.split('-')[1]), chunks: JSON.parse(text) as string[], end: endOf(fields) })
    place.bytes += text.length
    room -= text.length
    taken += 1
  }
  place.more = taken < found.length
  place.isOpen = room > 0 && place.bytes < cursorBytesMax
  return taken
}

export const endOf = (fields: readonly string[]): EndKind | null =>
  (fieldOf(fields, 'e') as EndKind | undefined) ?? null

function fieldOf(fields: readonly string[], name: string): string | undefined {
  const at = fields.findIndex((field, i) => i % 2 === 0 && field === name)
  return at < 0 ? undefined : fields[at + 1]
}
