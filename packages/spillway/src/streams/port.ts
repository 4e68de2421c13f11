/**
 * A stream is the append-only log of one operation's output: records of consecutive chunks, numbered from 1, the last one
 * an end. Its id is the operation's.
 *
 *   opened ──first record──► running ──record with `end`──► ended ──retention──► expired
 *
 * Who may write: whoever runs the operation. There is no lock and no fence to ask: a writer appends behind what it knows
 * as the log's last chunk, a record is identified by its first chunk, and two writers who know the same last chunk
 * therefore collide on the same record, which one of them gets. The other is told `lost` and writes no more. Nobody
 * appends behind an end.
 */

export interface StreamKey {
  /** The operation's id. */
  id: string
  /** When it was opened, by the database clock (epoch ms): where its records are kept goes by it. */
  bornMs: number
}

export type LogName = 'postgres' | 'redis'

/**
 * Why a stream is over. `done`: it came to its end; the others are told to the reader as an explicit error. `unbegun`: before
 * its first chunk, by something that may pass; it is as if it had not been asked for.
 */
export type EndKind = 'done' | 'error' | 'cancelled' | 'unbegun'

export interface StreamRecord {
  /** The number of its first chunk. */
  first: number
  /** What goes on the wire: one JSON text each. An end is a chunk too, with a number of its own: the last. */
  chunks: readonly string[]
  /** Whether the last chunk is the end of the stream. */
  end: EndKind | null
}

export interface Append extends StreamRecord {
  key: StreamKey
  /** Of one writer, for telling its own record from another's when an answer was lost. */
  writer: string
  /** Readers on other instances are to be told. */
  ring: boolean
}

export interface Cursor {
  key: StreamKey
  /** The last chunk that the reader has. */
  after: number
}

/**
 * Where records are. Durable when `append` answers (Redis: as durable as it is configured). All calls are for many streams
 * at once; an adapter bounds what one answer brings and says by `more` that there is more.
 */
export interface StreamLog {
  readonly name: LogName
  /** False: appends and reads would fail now. */
  readonly isUp: boolean
  /**
   * `written`, also when an earlier, unanswered try of the same writer had written it; `lost`: another writer has this
   * place, or the stream is gone. Throws `LogFault` when nobody knows: the same appends may then be tried again.
   */
  append(appends: readonly Append[]): Promise<('written' | 'lost')[]>
  /** In the order of the cursors, each with the records behind `after`, the first perhaps overlapping it. */
  read(cursors: readonly Cursor[]): Promise<{ records: StreamRecord[]; more: boolean }[]>
  /** The last chunk's number and how it ended; `last` 0 when there is none. */
  head(key: StreamKey): Promise<{ last: number; end: EndKind | null }>
  /**
   * For a log that can lose what it has while the registry does not: `begin` leaves a mark before the stream is opened, and
   * a stream whose mark is gone is lost. Without it, one that lost its chunks would look like one that has none yet.
   */
  readonly marks?: { begin(id: string): Promise<void>; isLost(id: string): Promise<boolean> }
  /** Hears which streams other processes have appended to. A hint: it may be lost; after a gap `heard(null)`: look at all. */
  onBell(heard: (ids: readonly string[] | null) => void): void
  close(): Promise<void>
}

/** The log did not answer, or not in time. */
export class LogFault extends Error {
  override readonly name = 'LogFault'
  readonly code = 'log_unavailable'
}

/** What is known of a stream beside its records; always in the store. */
export interface StreamEntry {
  key: StreamKey
  identity: string
  /** How its chunks look on the wire. */
  format: 'openai' | 'native'
  threadId: string
  log: LogName
  /** Begun at once, where it was accepted; else it was queued. */
  direct: boolean
  /** Since it was opened, by the database clock. */
  ageMs: number
  ended: EndKind | null
  /** The last chunk, as of this answer, where the log is the store's own; 0 when there is none or it is not known. */
  last: number
}

export interface OpenRequest {
  id: string
  identity: string
  format: 'openai' | 'native'
  threadId: string
  /** For a stream that is new. */
  log: LogName
  direct: boolean
  /** The process whose client reads it. */
  watcher: string
  /** How long before now it was accepted, where it was queued before it was opened. */
  acceptedMsAgo?: number
}

/** The streams by id. Batched inside: concurrent calls share a statement. */
export interface StreamRegistry {
  /** Makes it known, or finds it. `created` false: somebody had opened it already. */
  open(request: OpenRequest): Promise<StreamEntry & { created: boolean }>
  /** Null: unknown or expired. */
  find(id: string): Promise<StreamEntry | null>
  /** For a log that is not the store's own: its end. (The store's own log notes it with the record.) */
  ended(id: string, end: EndKind): Promise<void>
  /** Nothing is in its log, and that is gone: from now on it is kept in this one. */
  moved(id: string, log: LogName): Promise<void>
  /** A client reads it here now. */
  watched(id: string, watcher: string): Promise<void>
  /** Nobody reads it here any more. Heeded only while `watcher` is who left; false: somebody else reads it. */
  unwatched(id: string, watcher: string): Promise<boolean>
  /**
   * Of these, those that nobody reads, and for how long (by the database clock). A watcher whose process is gone counts
   * as having left when this is first noticed.
   */
  abandoned(ids: readonly string[]): Promise<{ id: string; forMs: number }[]>
  /**
   * Some of those without an end whose operation left the queue more than `graceMs` ago: nobody is left to end them. Over all
   * processes one asks, every `everyMs`; the others are told of none.
   */
  orphaned(everyMs: number, graceMs: number): Promise<StreamEntry[]>
  /** Removes what is older than its retention: entries, and records by whole partitions. */
  sweep(retentionMs: number, longestMs: number): Promise<{ streams: number; partitions: number; isFull: boolean }>
}
