import { withDeadline } from '../time/with-deadline.js'
import { LogFault, type StreamKey, type StreamLog, type StreamRecord } from './port.js'
import { type Entry, StreamWriter } from './stream-writer.js'

export type { StreamWriter } from './stream-writer.js'

/** For all streams together, before their sources are asked to wait. */
const bytesMax = 32 * 1024 * 1024
/** Per flush. */
const flushRecordsMax = 2_000
const flushBytesMax = 2 * 1024 * 1024
const backoffMinMs = 50
const backoffMaxMs = 1_000

export interface LogWriterOptions {
  log: StreamLog
  /** A record is durable. Called in the order of each stream's records. */
  onWritten(key: StreamKey, record: StreamRecord): void
  /** How long a record is retried. After that its stream is gone: `failed`. */
  patienceMs: number
  warn(fields: object, message: string): void
}

/**
 * Group commit of this process's appends to one log, one call at a time. No timer collects chunks: the first one is written
 * at once, and those that arrive during a call go with the next.
 *
 *   idle ──chunk──► flushing ──answer, nothing came meanwhile──► idle
 *                     │  ▲  └──answer, more has come──► flushing
 *              LogFault│  │back-off over: the same records first
 *                     ▼  │
 *                    pausing ──a record has waited for patienceMs──► its stream is gone (failed)
 */
export class LogWriter {
  readonly #o: LogWriterOptions
  readonly #writers = new Map<string, StreamWriter>()
  /** Streams with something to write, in order of arrival. */
  #ready: StreamWriter[] = []
  /** Unanswered records, to be retried unchanged, before anything newer. */
  readonly #again: Entry[][] = []
  readonly #awaitingRoom = new Set<StreamWriter>()
  #flight: readonly Entry[] | null = null
  #bytes = 0
  #failures = 0
  #isScheduled = false
  #pause: NodeJS.Timeout | undefined
  #expiry: NodeJS.Timeout | undefined
  #state: 'open' | 'closing' | 'closed' = 'open'
  #idle: (() => void)[] = []

  constructor(options: LogWriterOptions) {
    this.#o = options
  }

  /** `last`: the log's last chunk, after which to write. An earlier writer of the stream in this process has lost it. */
  open(key: StreamKey, last: number, options: { ring: boolean }): StreamWriter {
    if (this.#state === 'closed') throw new LogFault('the log is not written any more')
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
    this.#schedule()
  }

  awaitsRoom(writer: StreamWriter): void {
    this.#awaitingRoom.add(writer)
  }

  forget(writer: StreamWriter): void {
    this.#awaitingRoom.delete(writer)
    if (this.#writers.get(writer.key.id) === writer) this.#writers.delete(writer.key.id)
  }

  /** Writes pending records, for `patienceMs` at most; streams that have not ended by then are gone. */
  async close(): Promise<void> {
    if (this.#state === 'open') this.#state = 'closing'
    if (this.#state === 'closing' && !this.#isIdle) {
      const idle = new Promise<void>((resolve) => this.#idle.push(resolve))
      await withDeadline(idle, this.#o.patienceMs, () => undefined)
    }
    this.#state = 'closed'
    clearTimeout(this.#pause)
    clearTimeout(this.#expiry)
    for (const writer of [...this.#writers.values()]) writer.leaveAs('failed')
  }

  get #isIdle(): boolean {
    return this.#flight === null && this.#again.length === 0 && this.#ready.length === 0
  }

  /** In a microtask: chunks pushed in one go, for one stream or many, go together. */
  #schedule(): void {
    if (this.#isScheduled || this.#flight !== null || this.#pause !== undefined) return
    this.#isScheduled = true
    queueMicrotask(this.#flush)
  }

  readonly #flush = (): void => {
    this.#isScheduled = false
    if (this.#flight !== null || this.#pause !== undefined || this.#state === 'closed') return
    const batch = this.#nextBatch()
    if (batch.length === 0) {
      for (const resolve of this.#idle.splice(0)) resolve()
      return
    }
    this.#flight = batch
    this.#watch(this.#o.patienceMs)
    this.#o.log.append(batch.map((entry) => entry.append)).then(
      (answers) => this.#answered(batch, answers),
      (fault: unknown) => this.#faulted(batch, fault),
    )
  }

  #nextBatch(): readonly Entry[] {
    for (let again = this.#again.shift(); again !== undefined; again = this.#again.shift()) {
      const live = this.#liveOf(again)
      if (live.length > 0) return live
    }
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
    if (looked === this.#ready.length) this.#ready = []
    else this.#ready.splice(0, looked)
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

  #answered(batch: readonly Entry[], answers: readonly ('written' | 'lost')[]): void {
    // This call timed out earlier: its streams are already gone.
    if (this.#flight !== batch) return
    if (answers.length !== batch.length) {
      this.#faulted(batch, new Error(`${answers.length} answers to ${batch.length} appends`))
      return
    }
    this.#flight = null
    if (this.#failures > 0)
      this.#o.warn({ log: this.#o.log.name, tries: this.#failures }, 'the stream log answers again')
    this.#failures = 0
    for (const [index, entry] of batch.entries()) {
      entry.writer.release(entry)
      if (answers[index] === 'written') {
        const { key, first, chunks, end } = entry.append
        this.#o.onWritten(key, { first, chunks, end })
        entry.writer.wrote(entry)
      } else {
        entry.writer.leaveAs('lost')
      }
    }
    this.#giveRoom()
    this.#flush()
  }

  #faulted(batch: readonly Entry[], fault: unknown): void {
    if (this.#flight !== batch) return
    this.#flight = null
    if (fault instanceof LogFault) {
      this.#failures++
      if (this.#failures === 1) this.#o.warn({ log: this.#o.log.name, err: fault }, 'the stream log did not answer')
      this.#again.unshift([...batch])
      const pauseMs = Math.min(backoffMaxMs, backoffMinMs * 2 ** (this.#failures - 1))
      this.#pause = setTimeout(() => {
        this.#pause = undefined
        this.#expire()
        this.#flush()
      }, pauseMs)
      return
    }
    // A retry would not help. One record must not cost the others their stream: the batch is split until it is alone.
    const [first, ...rest] = batch
    if (first !== undefined && rest.length === 0) {
      this.#o.warn({ log: this.#o.log.name, stream: first.append.key.id, err: fault }, 'a record cannot be written')
      first.writer.release(first)
      first.writer.leaveAs('failed')
    } else {
      const half = Math.ceil(batch.length / 2)
      this.#again.unshift(batch.slice(0, half), batch.slice(half))
    }
    this.#giveRoom()
    this.#flush()
  }

  /** One timer, not moved with each flush: when it fires, it checks which records have really waited that long. */
  #watch(inMs: number): void {
    if (this.#expiry !== undefined) return
    this.#expiry = setTimeout(() => {
      this.#expiry = undefined
      this.#expire()
    }, inMs)
    this.#expiry.unref()
  }

  #expire(): void {
    const now = performance.now()
    let oldestMs = Number.POSITIVE_INFINITY
    const look = (writer: StreamWriter, sinceMs: number): void => {
      if (now - sinceMs >= this.#o.patienceMs) writer.leaveAs('failed')
      else oldestMs = Math.min(oldestMs, sinceMs)
    }
    for (const entries of [this.#flight ?? [], ...this.#again]) {
      for (const entry of entries) if (entry.writer.isLive) look(entry.writer, entry.sinceMs)
    }
    for (const writer of this.#ready) if (writer.hasPending) look(writer, writer.sinceMs)
    const isOver = (entry: Entry): boolean => !entry.writer.isLive && now - entry.sinceMs >= this.#o.patienceMs
    if (this.#flight?.every(isOver) === true) {
      this.#o.warn({ log: this.#o.log.name, records: this.#flight.length }, 'an append had no answer in time')
      for (const entry of this.#flight) entry.writer.release(entry)
      this.#flight = null
      this.#schedule()
    }
    this.#giveRoom()
    if (oldestMs < Number.POSITIVE_INFINITY) this.#watch(Math.max(1, oldestMs + this.#o.patienceMs - now))
  }

  #giveRoom(): void {
    for (const writer of this.#awaitingRoom) {
      if (!writer.mayGoOn) continue
      this.#awaitingRoom.delete(writer)
      writer.giveRoom()
    }
  }
}
