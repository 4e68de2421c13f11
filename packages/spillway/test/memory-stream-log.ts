import {
  type Append,
  type Cursor,
  type EndKind,
  LogFault,
  type LogName,
  type StreamKey,
  type StreamLog,
  type StreamRecord,
} from '../src/streams/port.js'
import { signal } from './pipeline-fixture.js'

export const keyOf = (id: string): StreamKey => ({ id, bornMs: 0 })

/** What a promise has come to, without waiting for it. */
export function watch<T>(promise: Promise<T>): { value?: T; fault?: unknown } {
  const seen: { value?: T; fault?: unknown } = {}
  promise.then(
    (value) => {
      seen.value = value
    },
    (fault: unknown) => {
      seen.fault = fault
    },
  )
  return seen
}

type Fate = 'ok' | 'fault' | 'answer-lost' | Error

/** A stream log in memory whose answers a test holds back, loses or breaks. For tests only. */
export class MemoryStreamLog implements StreamLog {
  readonly name: LogName
  isUp = true
  readonly records = new Map<string, (StreamRecord & { writer: string; ring: boolean })[]>()
  readonly appends: (readonly Append[])[] = []
  readonly reads: (readonly Cursor[])[] = []
  /** What becomes of the next calls, first to last; then all are well. */
  readonly appendFates: Fate[] = []
  readonly readFates: Fate[] = []
  /** Holds calls back until it resolves. A read has looked by then. */
  appendGate: Promise<void> | null = null
  readGate: Promise<void> | null = null

  constructor(name: LogName = 'postgres') {
    this.name = name
  }

  hold(what: 'append' | 'read'): () => void {
    const gate = signal()
    if (what === 'append') this.appendGate = gate.promise
    else this.readGate = gate.promise
    return () => {
      if (what === 'append') this.appendGate = null
      else this.readGate = null
      gate.fire()
    }
  }

  async append(appends: readonly Append[]): Promise<('written' | 'lost')[]> {
    this.appends.push(appends.map((append) => ({ ...append, chunks: [...append.chunks] })))
    const fate = this.appendFates.shift() ?? 'ok'
    await this.appendGate
    if (fate instanceof Error) throw fate
    if (fate === 'fault') throw new LogFault('away')
    const answers = appends.map((append) => this.#add(append))
    if (fate === 'answer-lost') throw new LogFault('the answer is lost')
    return answers
  }

  async read(cursors: readonly Cursor[]): Promise<{ records: StreamRecord[]; more: boolean }[]> {
    this.reads.push(cursors)
    const fate = this.readFates.shift() ?? 'ok'
    const answers = cursors.map(({ key, after }) => ({
      records: (this.records.get(key.id) ?? [])
        .filter(({ first, chunks }) => first + chunks.length - 1 > after)
        .map(({ first, chunks, end }) => ({ first, chunks, end })),
      more: false,
    }))
    await this.readGate
    if (fate instanceof Error) throw fate
    if (fate !== 'ok') throw new LogFault('away')
    return answers
  }

  async head(key: StreamKey): Promise<{ last: number; end: EndKind | null }> {
    const last = this.records.get(key.id)?.at(-1)
    return last === undefined ? { last: 0, end: null } : { last: last.first + last.chunks.length - 1, end: last.end }
  }

  onBell(): void {}

  async close(): Promise<void> {}

  /** As another process would write it. */
  put(id: string, record: StreamRecord): void {
    this.#add({ ...record, key: keyOf(id), writer: 'another', ring: true })
  }

  texts(id: string): string[] {
    return (this.records.get(id) ?? []).flatMap(({ chunks }) => chunks)
  }

  #add(append: Append): 'written' | 'lost' {
    const records = this.records.get(append.key.id) ?? []
    this.records.set(append.key.id, records)
    const same = records.find(({ first }) => first === append.first)
    if (same !== undefined) return same.writer === append.writer ? 'written' : 'lost'
    const last = records.at(-1)
    if (last !== undefined && (last.end !== null || last.first + last.chunks.length !== append.first)) return 'lost'
    const { first, chunks, end, writer, ring } = append
    records.push({ first, chunks: [...chunks], end, writer, ring })
    return 'written'
  }
}
