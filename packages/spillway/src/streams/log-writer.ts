import { withDeadline } from '../time/with-deadline.js'
import { BatchedCalls, type BatchedCallsOptions } from './batched-calls.js'
import { LogFault, type StreamKey, type StreamRecord } from './port.js'
import { type Entry, StreamWriter } from './stream-writer.js'

export type { StreamWriter } from './stream-writer.js'

/** For all streams together, before their sources are asked to wait. */
const bytesMax = 32 * 1024 * 1024
/** Per flush. */
const flushRecordsMax = 2_000
const flushBytesMax = 2 * 1024 * 1024

export interface LogWriterOptions extends BatchedCallsOptions {
  /** A record is durable. Called in the order of each stream's records. */
  onWritten(key: StreamKey, record: StreamRecord): void
}

/** Group commit of this process's appends to one log. A stream whose record is not written in time is gone: `failed`. */
export class LogWriter extends BatchedCalls<Entry, 'written' | 'lost'> {
  protected readonly texts = { failed: 'the stream log did not answer', recovered: 'the stream log answers again' }
  readonly #onWritten: LogWriterOptions['onWritten']
  readonly #writers = new Map<string, StreamWriter>()
  /** Streams with something to write, in order of arrival. */
  #ready: StreamWriter[] = []
  /** Unanswered records, to be retried unchanged, before anything newer. */
  readonly #again: Entry[][] = []
  readonly #awaitingRoom = new Set<StreamWriter>()
  #bytes = 0
  #idle: (() => void)[] = []

  constructor(options: LogWriterOptions) {
    super(options)
    this.#onWritten = options.onWritten
  }

  /** `last`: the log's last chunk, after which to write. An earlier writer of the stream in this process has lost it. */
  open(key: StreamKey, last: number, options: { ring: boolean }): StreamWriter {
    if (this.isClosed) throw new LogFault('the log is not written any more')
    this.#writers.get(key.id)?.leaveAs('lost')
    const writer = new StreamWriter(this, { key, last, ring: options.ring })
    this.#writers.set(key.id, writer)
    return writer
  }

  /** If it is written here: readers on other instances are notified from the next record on. */
  ring(id: string): void {
    const writer = this.#writers.get(id)
    if (writer !== undefined) writer.ring = true
  }

  has(id: string): boolean {
    return this.#writers.has(id)
  }

  /** Whether the limit for all streams together leaves room. */
  get hasRoom(): boolean {
    return this.#bytes < bytesMax
  }

  /** This many more bytes wait; fewer if negative. */
  waits(bytes: number): void {
    this.#bytes += bytes
  }

  /** It has something to write. */
  ready(writer: StreamWriter): void {
    this.#ready.push(writer)
    this.schedule()
  }

  awaitsRoom(writer: StreamWriter): void {
    this.#awaitingRoom.add(writer)
  }

  forget(writer: StreamWriter): void {
    this.#awaitingRoom.delete(writer)
    if (this.#writers.get(writer.key.id) === writer) this.#writers.delete(writer.key.id)
  }

  /** Writes pending records, for `patienceMs` at most; streams that have not ended by then are gone. */
  override async close(): Promise<void> {
    const isIdle = this.flight === null && this.#again.length === 0 && this.#ready.length === 0
    if (!this.isClosed && !isIdle) {
      const idle = new Promise<void>((resolve) => this.#idle.push(resolve))
      await withDeadline(idle, this.o.patienceMs, () => undefined)
    }
    super.close()
    for (const writer of [...this.#writers.values()]) writer.leaveAs('failed')
  }

  protected nextBatch(): readonly Entry[] {
    const batch = this.#unanswered() ?? this.#newRecords()
    if (batch.length === 0) for (const resolve of this.#idle.splice(0)) resolve()
    return batch
  }

  #unanswered(): readonly Entry[] | null {
    for (let again = this.#again.shift(); again !== undefined; again = this.#again.shift()) {
      const live = this.#liveOf(again)
      if (live.length > 0) return live
    }
    return null
  }

  #newRecords(): readonly Entry[] {
    const batch: Entry[] = []
    const cut: StreamWriter[] = []
    let bytes = 0
    let looked = 0
    for (const writer of this.#ready) {
      if (batch.length >= flushRecordsMax || bytes >= flushBytesMax) break
      looked++
      writer.isReady = false
      if (!writer.hasPending) continue
      const entry = writer.take()
      batch.push(entry)
      bytes += entry.bytes
      if (writer.hasPending) cut.push(writer)
    }
    this.#ready.splice(0, looked)
    // The rest of a stream waits behind the others: a flush has one record of each, because splitting the flush would
    // otherwise leave a gap.
    for (const writer of cut) {
      writer.isReady = true
      this.#ready.push(writer)
    }
    return batch
  }

  /** Streams that closed in the meantime are not retried. */
  #liveOf(entries: readonly Entry[]): readonly Entry[] {
    if (entries.every((entry) => entry.writer.isLive)) return entries
    return entries.filter((entry) => {
      if (entry.writer.isLive) return true
      entry.writer.release(entry)
      return false
    })
  }

  protected call(batch: readonly Entry[]): Promise<('written' | 'lost')[]> {
    return this.o.log.append(batch.map((entry) => entry.append))
  }

  protected answered(batch: readonly Entry[], answers: readonly ('written' | 'lost')[]): void {
    for (const [index, entry] of batch.entries()) {
      entry.writer.release(entry)
      if (answers[index] === 'written') {
        const { key, first, chunks, end } = entry.append
        this.#onWritten(key, { first, chunks, end })
        entry.writer.wrote(entry)
      } else {
        entry.writer.leaveAs('lost')
      }
    }
    this.#giveRoom()
  }

  protected putBack(batch: readonly Entry[]): void {
    this.#again.unshift([...batch])
  }

  protected split(batch: readonly Entry[], fault: unknown): void {
    const [first, ...rest] = batch
    if (first !== undefined && rest.length === 0) {
      this.o.warn({ log: this.o.log.name, stream: first.append.key.id, err: fault }, 'a record cannot be written')
      first.writer.release(first)
      first.writer.leaveAs('failed')
    } else {
      const half = Math.ceil(batch.length / 2)
      this.#again.unshift(batch.slice(0, half), batch.slice(half))
    }
    this.#giveRoom()
  }

  protected expire(now: number): number {
    let oldestMs = Number.POSITIVE_INFINITY
    const look = (writer: StreamWriter, sinceMs: number): void => {
      if (now - sinceMs >= this.o.patienceMs) writer.leaveAs('failed')
      else oldestMs = Math.min(oldestMs, sinceMs)
    }
    for (const entries of [this.flight ?? [], ...this.#again]) {
      for (const entry of entries) if (entry.writer.isLive) look(entry.writer, entry.sinceMs)
    }
    for (const writer of this.#ready) if (writer.hasPending) look(writer, writer.sinceMs)
    const isOver = (entry: Entry): boolean => !entry.writer.isLive && now - entry.sinceMs >= this.o.patienceMs
    if (this.flight?.every(isOver) === true) {
      this.o.warn({ log: this.o.log.name, records: this.flight.length }, 'an append had no answer in time')
      for (const entry of this.flight) entry.writer.release(entry)
      this.flight = null
      this.schedule()
    }
    this.#giveRoom()
    return oldestMs
  }

  #giveRoom(): void {
    for (const writer of this.#awaitingRoom) {
      if (!writer.mayGoOn) continue
      this.#awaitingRoom.delete(writer)
      writer.giveRoom()
    }
  }
}
