/**
 * What running handlers say of their progress. Of all operations of this process together at most one write is under way, and
 * one begins each half second: the last word of each operation, and those whose attempt has ended. A process without any
 * makes none.
 */
import { check, isString, type Rule } from '../core/options.js'
import type { Store } from '../store/port.js'

export interface Progress {
  id: string
  attempt: number
  value: number
  note: string | null
}

const everyMs = 500
const noteCharactersMax = 200

const isShare: Rule = (value) => (typeof value === 'number' && value >= 0 && value <= 1 ? null : 'a number from 0 to 1')
const isNote: Rule = (note) =>
  isString(note) === null && String(note).length <= noteCharactersMax
    ? null
    : `a text of at most ${noteCharactersMax} characters`

export class ProgressWriter {
  readonly #store: Pick<Store, 'keepProgress'>
  readonly #log: { debug(fields: object, message: string): void }
  readonly #said = new Map<string, Progress>()
  /** Written, and their attempt still runs. */
  readonly #written = new Set<string>()
  readonly #ended = new Set<string>()
  #timer: NodeJS.Timeout | undefined
  #writing: Promise<void> | null = null
  #lastAt = Number.NEGATIVE_INFINITY
  #stopped = false

  constructor(store: Pick<Store, 'keepProgress'>, log: { debug(fields: object, message: string): void }) {
    this.#store = store
    this.#log = log
  }

  say(id: string, attempt: number, value: number, note: string | undefined): void {
    check('progress', 'the value', value, isShare)
    if (note !== undefined) check('progress', 'the note', note, isNote)
    const text = note?.replaceAll('\0', '\uFFFD').toWellFormed() ?? null
    this.#said.set(id, { id, attempt, value, note: text })
    this.#schedule()
  }

  /** The attempt has ended: what it said is not shown any more. */
  ended(id: string): void {
    this.#said.delete(id)
    if (!this.#written.delete(id)) return
    this.#ended.add(id)
    this.#schedule()
  }

  /** Writes what is left. */
  async stop(): Promise<void> {
    this.#stopped = true
    clearTimeout(this.#timer)
    await this.#writing
    if (this.#said.size + this.#ended.size > 0) await this.#write()
  }

  #schedule(): void {
    if (this.#timer !== undefined || this.#writing !== null || this.#stopped) return
    const waitMs = Math.max(0, this.#lastAt + everyMs - performance.now())
    this.#timer = setTimeout(() => {
      this.#timer = undefined
      this.#writing = this.#write().finally(() => {
        this.#writing = null
        if (this.#said.size + this.#ended.size > 0) this.#schedule()
      })
    }, waitMs)
    this.#timer.unref()
  }

  async #write(): Promise<void> {
    this.#lastAt = performance.now()
    const said = [...this.#said.values()]
    const ended = [...this.#ended]
    this.#said.clear()
    this.#ended.clear()
    // From now on it may be in the store, so the end of its attempt has to remove it.
    for (const { id } of said) this.#written.add(id)
    try {
      await this.#store.keepProgress(said, ended)
    } catch (fault) {
      this.#log.debug({ err: fault, operations: said.length }, 'progress could not be written')
      // What was said since is newer. An attempt that has ended meanwhile has nothing to say.
      for (const one of said) if (this.#written.has(one.id) && !this.#said.has(one.id)) this.#said.set(one.id, one)
      for (const id of ended) this.#ended.add(id)
    }
  }
}
