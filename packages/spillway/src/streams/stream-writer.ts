import { randomUUID } from 'node:crypto'
import type { LogWriter } from './log-writer.js'
import type { Append, EndKind, StreamKey } from './port.js'

/** How many bytes of one stream may wait before its source is asked to wait. */
export const streamBytesMax = 256 * 1024
/** A larger record is cut, so that one stream does not take a whole flush. One chunk is never cut. */
const recordBytesMax = 256 * 1024

/** Further writes are useless: another writer has the stream (`lost`), or the log did not answer in time (`failed`). */
export type Gone = 'lost' | 'failed'

/** A record on its way into the log, exactly as a retry will send it. */
export interface Entry {
  readonly writer: StreamWriter
  readonly append: Append
  readonly bytes: number
  /** Since when its chunks have waited. */
  readonly sinceMs: number
}

/**
 * One stream's chunks that are not in the log yet.
 *
 *   open ──end()──► ending ──written──► closed
 *     └──lost, failed (also while ending)──► gone      └── close() while open ──► closed
 */
export class StreamWriter {
  readonly key: StreamKey
  /** A client may read it on another instance. */
  ring: boolean
  /** It is in the owner's list of streams with something to write. */
  isReady = false
  sinceMs = 0
  /** Number of the last chunk known to be in the log; 0: none that this writer has pushed. */
  written = 0
  readonly #log: LogWriter
  readonly #writer = randomUUID()
  #state: 'open' | 'ending' | 'closed' | Gone = 'open'
  #last: number
  #taken: number
  #pending: string[] = []
  #pendingBytes = 0
  #flightBytes = 0
  #end: { kind: EndKind; settled: Promise<'written' | Gone>; settle(how: 'written' | Gone): void } | null = null
  #room: { promise: Promise<void>; give(): void } | null = null

  constructor(log: LogWriter, options: { key: StreamKey; last: number; ring: boolean }) {
    this.#log = log
    this.key = options.key
    this.ring = options.ring
    this.#last = options.last
    this.#taken = options.last
  }

  /** Number of the last chunk pushed, whether or not it is written yet. */
  get last(): number {
    return this.#last
  }

  get gone(): Gone | null {
    return this.#state === 'lost' || this.#state === 'failed' ? this.#state : null
  }

  /** A record of it may still be tried. */
  get isLive(): boolean {
    return this.#state === 'open' || this.#state === 'ending'
  }

  get hasPending(): boolean {
    return this.#pending.length > 0
  }

  /** Throws once the stream was ended, closed, or is gone. */
  push(chunk: string): void {
    if (this.#state !== 'open') throw new Error(`stream ${this.key.id} is ${this.#state}: it takes no more chunks`)
    this.#add(chunk)
  }

  /** Written together with pending chunks; resolves when durable. A second call returns the first one's result. */
  end(kind: EndKind, chunk: string): Promise<'written' | Gone> {
    if (this.#end !== null) return this.#end.settled
    const { gone } = this
    if (gone !== null) return Promise.resolve(gone)
    if (this.#state === 'closed') throw new Error(`stream ${this.key.id} was closed without an end`)
    let settle: (how: 'written' | Gone) => void = () => undefined
    const settled = new Promise<'written' | Gone>((resolve) => {
      settle = resolve
    })
    this.#end = { kind, settled, settle }
    this.#state = 'ending'
    this.#add(chunk)
    return settled
  }

  /** Null: continue. Else resolves when enough has been written, or when the stream is gone. */
  drained(): Promise<void> | null {
    if (this.mayGoOn) return null
    if (this.#room === null) {
      let give: () => void = () => undefined
      const promise = new Promise<void>((resolve) => {
        give = resolve
      })
      this.#room = { promise, give }
      this.#log.awaitsRoom(this)
    }
    return this.#room.promise
  }

  get mayGoOn(): boolean {
    return !this.isLive || (this.#pendingBytes + this.#flightBytes < streamBytesMax && this.#log.hasRoom)
  }

  giveRoom(): void {
    this.#room?.give()
    this.#room = null
  }

  /**
   * Forgets the stream without an end, and its pending chunks. After `end` there is nothing to forget: the end is still
   * written.
   */
  close(): void {
    if (this.#state === 'open') this.#leave('closed')
  }

  /** The next record of the pending chunks, of which there are some. */
  take(): Entry {
    let count = this.#pending.length
    let bytes = this.#pendingBytes
    if (bytes > recordBytesMax) {
      bytes = 0
      count = 0
      for (const chunk of this.#pending) {
        const length = Buffer.byteLength(chunk)
        if (count > 0 && bytes + length > recordBytesMax) break
        bytes += length
        count++
      }
    }
    const isAll = count === this.#pending.length
    const chunks = isAll ? this.#pending : this.#pending.splice(0, count)
    if (isAll) this.#pending = []
    const { key, ring, sinceMs } = this
    const end = isAll ? (this.#end?.kind ?? null) : null
    const append = { key, writer: this.#writer, ring, first: this.#taken + 1, chunks, end }
    this.#taken += count
    this.#pendingBytes -= bytes
    this.#flightBytes += bytes
    return { writer: this, append, bytes, sinceMs }
  }

  /** Frees the record's memory: it is written, or will not be. */
  release(entry: Entry): void {
    this.#flightBytes -= entry.bytes
    this.#log.waits(-entry.bytes)
  }

  wrote(entry: Entry): void {
    this.written = entry.append.first + entry.append.chunks.length - 1
    if (entry.append.end === null || !this.isLive) return
    this.#leave('closed')
    this.#end?.settle('written')
  }

  leaveAs(why: Gone): void {
    if (!this.isLive) return
    this.#leave(why)
    this.#end?.settle(why)
  }

  #leave(state: 'closed' | Gone): void {
    this.#state = state
    this.#pending = []
    this.#log.waits(-this.#pendingBytes)
    this.#pendingBytes = 0
    this.giveRoom()
    this.#log.forget(this)
  }

  #add(chunk: string): void {
    const bytes = Buffer.byteLength(chunk)
    this.#pending.push(chunk)
    this.#pendingBytes += bytes
    this.#last++
    this.#log.waits(bytes)
    if (this.isReady) return
    this.isReady = true
    this.sinceMs = performance.now()
    this.#log.ready(this)
  }
}
