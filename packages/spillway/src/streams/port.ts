/**
 * A stream is the append-only log of one operation's output: records of consecutive chunks, numbered from 1, the last one
 * an end. Its id is the operation's.
 *
 *   opened ──first record──► running ──record with `end`──► ended ──retention──► expired
 *
 * Who may write: the process that runs the operation. There is no lock and no fence: a writer appends after the last chunk
 * that it knows of, and a record is identified by its first chunk. Two writers that know the same last chunk therefore collide
 * on the same record, and one of them gets it. The other gets `lost` and writes no more. Nobody appends after an end.
 */

export interface StreamKey {
  /** The operation's id. */
  id: string
  /** When it was opened, by the database clock (epoch ms): it determines where its records are kept. */
  bornMs: number
}

export type LogName = 'postgres' | 'redis'

/**
 * Why a stream is over. `done`: it is complete; readers get the others as an explicit error. `unbegun`: before its first
 * chunk, because of something that may pass; it is as if it had not been requested.
 */
export type EndKind = 'done' | 'error' | 'cancelled' | 'unbegun'

export interface StreamRecord {
  /** The number of its first chunk. */
  first: number
  /** One JSON text each, as sent on the wire. An end is a chunk too, with its own number: the last. */
  chunks: readonly string[]
  /** Whether the last chunk is the end of the stream. */
  end: EndKind | null
}

export interface Append extends StreamRecord {
  key: StreamKey
  /** Identifies the writer, to recognise its own record when an answer was lost. */
  writer: string
  /** Readers on other instances are notified. */
  ring: boolean
}

export interface Cursor {
  key: StreamKey
  /** The last chunk that the reader has. */
  after: number
}

/**
 * Where records are stored. Durable when `append` returns (Redis: as durable as it is configured). All calls are for many
 * streams at once; an adapter limits the size of an answer and sets `more` if there is more.
 */
export interface StreamLog {
  readonly name: LogName
  /** False: appends and reads would fail now. */
  readonly isUp: boolean
  /**
   * `written`, also when an earlier, unanswered try of the same writer had written it; `lost`: another writer has this
   * place, or the stream is gone. Throws `LogFault` when the outcome is unknown: the same appends may then be retried.
   */
  append(appends: readonly Append[]): Promise<('written' | 'lost')[]>
  /** In the order of the cursors, each with the records after `after`; the first may overlap it. */
  read(cursors: readonly Cursor[]): Promise<{ records: StreamRecord[]; more: boolean }[]>
  /** The last chunk's number and how it ended; `last` is 0 when there is none. */
  head(key: StreamKey): Promise<{ last: number; end: EndKind | null }>
  /**
   * For a log that can lose its data while the registry does not: `begin` leaves a mark before the stream is opened, and a
   * stream whose mark is gone is lost. Without it, a stream that lost its chunks would look like one that has none yet.
   */
  readonly marks?: { begin(id: string): Promise<void>; isLost(id: string): Promise<boolean> }
  /**
   * Called with the streams that other processes have appended to. A hint: it may be lost; after a gap `heard(null)`: check
   * all.
   */
  onBell(heard: (ids: readonly string[] | null) => void): void
  close(): Promise<void>
}

/** The log did not answer, or not in time. */
export class LogFault extends Error {
  override readonly name = 'LogFault'
  readonly code = 'log_unavailable'
}

/** The data of a stream besides its records; always in the store. */
export interface StreamEntry {
  key: StreamKey
  identity: string
  /** The wire format of its chunks. */
  format: 'openai' | 'native'
  threadId: string
  log: LogName
  /** It started at once, where it was accepted; else it was queued. */
  direct: boolean
  /** Since it was opened, by the database clock. */
  ageMs: number
  ended: EndKind | null
  /** The last chunk, as of this answer, if the log is the store's own; 0 when there is none or it is unknown. */
  last: number
}

export interface OpenRequest {
  id: string
  identity: string
  format: 'openai' | 'native'
  threadId: string
  /** For a new stream. */
  log: LogName
  direct: boolean
  /** The process whose client reads it. */
  watcher: string
  /** How long ago it was accepted, if it was queued before it was opened. */
  acceptedMsAgo?: number
}

/** The streams by id. Batched inside: concurrent calls share a statement. */
export interface StreamRegistry {
  /** Registers it, or finds it. `created` false: it was open already. */
  open(request: OpenRequest): Promise<StreamEntry & { created: boolean }>
  /** Null: unknown or expired. */
  find(id: string): Promise<StreamEntry | null>
  /** For a log that is not the store's own: records its end. (The store's own log stores it with the record.) */
  ended(id: string, end: EndKind): Promise<void>
  /** Its log is empty and gone: from now on it is kept in this one. */
  moved(id: string, log: LogName): Promise<void>
  /** A client reads it here now. */
  watched(id: string, watcher: string): Promise<void>
  /** Nobody reads it here any more. Has an effect only while `watcher` is the one that left; false: another process reads it. */
  unwatched(id: string, watcher: string): Promise<boolean>
  /**
   * Those of `ids` without a reader, and for how long (by the database clock). A watcher whose process is gone counts as
   * having left when this is first noticed.
   */
  abandoned(ids: readonly string[]): Promise<{ id: string; forMs: number }[]>
  /**
   * Some streams without an end whose operation left the queue more than `graceMs` ago: no process will end them. One
   * process checks every `everyMs`; the others get an empty list.
   */
  orphaned(everyMs: number, graceMs: number): Promise<StreamEntry[]>
  /** Removes what exceeds its retention: entries, and records by whole partitions. */
  sweep(retentionMs: number, longestMs: number): Promise<{ streams: number; partitions: number; isFull: boolean }>
}
