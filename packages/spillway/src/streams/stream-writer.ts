import { randomUUID } from 'node:crypto'
import type { Append, EndKind, StreamKey } from './port.js'

/** How many bytes of one stream may wait before its source is asked to wait. */
export const streamBytesMax = 256 * 1024
/** A larger record is cut, so that one stream does not take a whole flush. One chunk is never cut. */
const recordBytesMax = 256 * 1024

export type Gone = 'lost' | 'failed'

/** Further writes are useless: another writer has the stream (`lost`), or the log did not answer in time (`failed`). */
export class StreamGone extends Error {
  override readonly name = 'StreamGone'
  readonly code = 'stream_gone'
  readonly why: Gone

  constructor(id: string, why: Gone) {
    super(`stream ${id} is not written here any more: ${why}`)
    this.why = why
  }
}

export interface StreamWriter {
  /** Number of the last chunk pushed, whether or not it is written yet. */
  readonly last: number
  /** Number of the last chunk known to be in the log; 0: none that this writer has pushed. */
  readonly written: number
  /** A client may read it on another instance. */
  readonly ring: boolean
  /** Throws once the stream was ended, closed, or is gone (`StreamGone`). */
  push(chunk: string): void
  /** Written together with pending chunks; resolves when durable. A second call returns the first one's result. */
  end(kind: EndKind, chunk: string): Promise<'written' | Gone>
  /** Null: continue. Else resolves when enough has been written, or when the stream is gone. */
  drained(): Promise<void> | null
  readonly gone: Gone | null
  /** Called once; soon, if it is gone already. */
  onGone(listener: (why: Gone) => void): void
  /**
   * Forgets the stream without an end, and its pending chunks. After `end` there is nothing to forget: the end is still
   * written.
   */
  close(): void
}

/** A record on its way into the log, exactly as a retry will send it. */
export interface Entry {
  readonly writer: PendingStream
  readonly append: Append
  readonly bytes: number
  /** Since when its chunks have waited. */
  readonly sinceMs: number
}

export interface WriterOwner {
  now(): number
  /** Whether the limit for all streams together leaves room. */
  hasRoom(): boolean
  /** This many more bytes wait; fewer if negative. */
  waits(bytes: number): void
  ready(writer: PendingStream): void
  awaitsRoom(writer: PendingStream): void
  forget(writer: PendingStream): void
}

/**
 * One stream's chunks that are not in the log yet.
 *
 *   open ──end()──► ending ──written──► closed
 *     └──lost, failed (also while ending)──► gone      └── close() while open ──► closed
 */
export class PendingStream implements StreamWriter {
  readonly key: StreamKey
  ring: boolean
  /** It is in the owner's list of streams with something to write. */
  isReady = false
  sinceMs = 0
  written = 0
  readonly #owner: WriterOwner
  readonly #writer = randomUUID()
  #state: 'open' | 'ending' | 'closed' | Gone = 'open'
  #last: number
  #taken: number
  #pending: string[] = []
  #pendingBytes = 0
  #flightBytes = 0
  #end: { kind: EndKind; settled: Promise<'written' | Gone>; settle(how: 'written' | Gone): void } | null = null
  #room: { promise: Promise<void>; give(): void } | null = null
  #listeners: ((why: Gone) => void)[] = []

  constructor(owner: WriterOwner, options: { key: StreamKey; last: number; ring: boolean }) {
    this.#owner = owner
    this.key = options.key
    this.ring = options.ring
    this.#last = options.last
    this.#taken = options.last
  }

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

  push(chunk: string): void {
    if (this.#state !== 'open') {
      const { gone } = this
      if (gone !== null) throw new StreamGone(this.key.id, gone)
      throw new Error(`stream ${this.key.id} is ${this.#state}: no chunk behind its end`)
    }
    this.#add(chunk)
  }

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

  drained(): Promise<void> | null {
    if (this.mayGoOn) return null
    if (this.#room === null) {
      let give: () => void = () => undefined
      const promise = new Promise<void>((resolve) => {
        give = resolve
      })
      this.#room = { promise, give }
      this.#owner.awaitsRoom(this)
    }
    return this.#room.promise
  }

  get mayGoOn(): boolean {
    return !this.isLive || (this.#pendingBytes + this.#flightBytes < streamBytesMax && this.#owner.hasRoom())
  }

  giveRoom(): void {
    this.#room?.give()
    this.#room = null
  }

  onGone(listener: (why: Gone) => void): void {
    const { gone } = this
    if (gone === null) this.#listeners.push(listener)
    else queueMicrotask(() => listener(gone))
  }

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
    this.#owner.waits(-entry.bytes)
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
    for (const listener of this.#listeners.splice(0)) listener(why)
  }

  #leave(state: 'closed' | Gone): void {
    this.#state = state
    this.#pending = []
    this.#owner.waits(-this.#pendingBytes)
    this.#pendingBytes = 0
    this.giveRoom()
    this.#owner.forget(this)
  }

  #add(chunk: string): void {
    const bytes = Buffer.byteLength(chunk)
    this.#pending.push(chunk)
    this.#pendingBytes += bytes
    this.#last++
    this.#owner.waits(bytes)
    if (this.isReady) return
    this.isReady = true
    this.sinceMs = this.#owner.now()
    this.#owner.ready(this)
  }
}
