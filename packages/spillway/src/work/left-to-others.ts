/**
 * Operations that not every process may run: those of a definition with `announces`. A handler that may not run one throws
 * `LeaveOperation`, and this file decides what happens next. No attempt is counted, and the lane keeps its order.
 *
 *   left ──a live process announced that it may──► ready under that process's label: claimed by those who announced the
 *     │                                             same, invisible to the others, so that no claim is wasted
 *     └──none did──► parked for some seconds, looked at again ──none did for a minute──► failed, with the handler's reason
 *
 * What a process may run is fixed when it enlists, and stored in its row of `workers`; the label is the operation type and a
 * digest of it. Processes with the same settings share a label.
 *
 * Crash points. The leaving process dies before the settlement: the lease runs out, and the lane is ready for all. The process
 * it was left to dies or stops: the transaction that removes its row from `workers` also removes the label, unless another
 * live process has it; the settlement that sets a label locks such a row first, so a label without a process cannot stay.
 * Each process counts the minute for itself, from the store's data, by the store's clock: a process that was started, or did
 * not look for as long as a lease, begins again. So it may fail late, never early.
 */
import { createHash } from 'node:crypto'
import type { LeaveOperation } from '../core/outcome.js'
import type { Claimed, Store } from '../store/port.js'
import type { Outcome } from './attempt.js'

export interface ElsewhereOptions {
  store: Pick<Store, 'announced'>
  log: { warn(fields: object, message: string): void }
  now?: () => number
}

interface Alone {
  type: string
  may: (announced: string) => boolean
  /** By the store's clock: since when no process may run it, and when that was last seen. */
  since: number
  seen: number
  /** By this process's clock: when an operation last needed it. */
  asked: number
}

type Announced = Awaited<ReturnType<Store['announced']>>

/** How long an operation waits for a process that may run it, before it fails. */
const aloneMs = 60_000
/** Between two checks of an operation that no process may run. */
const lookAgainMs = 5_000
/** The announcements of live processes are read at most this often. */
const freshMs = 500
/** Not seen for this long: a process may have come and gone in the meantime. */
const unseenMs = 15_000
const forgetMs = 600_000
/** Beyond it the least recently needed one is forgotten, and starts from the beginning when it is needed again. */
const aloneMax = 1_000

export class Elsewhere {
  readonly #o: ElsewhereOptions
  readonly #now: () => number
  readonly #announces = new Map<string, () => string>()
  readonly #own = new Map<string, { label: string; text: string }>()
  readonly #alone = new Map<string, Alone>()
  #asked: { at: number; answer: Promise<Announced> } | null = null

  constructor(options: ElsewhereOptions) {
    this.#o = options
    this.#now = options.now ?? (() => performance.now())
  }

  define(type: string, announces: () => string): void {
    this.#announces.set(type, announces)
  }

  /** The label for claiming operations that were left to this process. */
  labelOf(type: string): string {
    return this.#of(type).label
  }

  /** For the row of this process, by label. */
  announced(): Record<string, string> {
    return Object.fromEntries([...this.#announces.keys()].map((type) => [this.#of(type).label, this.#of(type).text]))
  }

  async place(op: Pick<Claimed, 'type' | 'waitedMs'>, left: LeaveOperation): Promise<Outcome> {
    let known: Announced
    try {
      known = await this.#others()
    } catch {
      // The settlement will also find the store unreachable, and report it.
      return { kind: 'released', leave: { to: null, delayMs: lookAgainMs } }
    }
    const labels = this.#able(op.type, left.may, known)
    const key = `${op.type} ${left.key}`
    if (labels.length > 0) {
      this.#alone.delete(key)
      return { kind: 'released', leave: { to: pick(labels), delayMs: lookAgainMs } }
    }
    const alone = this.#track(key, op.type, left, known.nowMs)
    if (known.nowMs - alone.since >= aloneMs && op.waitedMs >= aloneMs) return { kind: 'failed', error: left.message }
    return { kind: 'released', leave: { to: null, delayMs: lookAgainMs } }
  }

  /**
   * With each heartbeat: checks whether a new process may run what none could. Queries the store only if there is such an
   * operation.
   */
  async observe(): Promise<void> {
    if (this.#alone.size === 0) return
    const known = await this.#others()
    for (const [key, alone] of this.#alone) {
      const isForgotten = this.#now() - alone.asked > forgetMs
      if (isForgotten || this.#able(alone.type, alone.may, known).length > 0) this.#alone.delete(key)
      else see(alone, known.nowMs)
    }
  }

  #of(type: string): { label: string; text: string } {
    const known = this.#own.get(type)
    if (known !== undefined) return known
    const text = this.#announces.get(type)?.() ?? ''
    // A type contains no space, so the part before it is the type.
    const made = { label: `${type} ${createHash('sha256').update(text).digest('hex').slice(0, 16)}`, text }
    this.#own.set(type, made)
    return made
  }

  /** Not this process's own label: it may not run the operation, whatever it announced, and would be handed it again at once. */
  #able(type: string, may: (announced: string) => boolean, { by }: Announced): string[] {
    const own = this.labelOf(type)
    return Object.keys(by).filter((label) => label !== own && label.startsWith(`${type} `) && may(by[label] ?? ''))
  }

  #track(key: string, type: string, { may }: LeaveOperation, nowMs: number): Alone {
    const asked = this.#now()
    const known = this.#alone.get(key)
    if (known !== undefined) {
      see(known, nowMs)
      known.asked = asked
      return known
    }
    if (this.#alone.size >= aloneMax) {
      const [oldest] = [...this.#alone].reduce((a, b) => (a[1].asked <= b[1].asked ? a : b))
      this.#alone.delete(oldest)
    }
    const alone = { type, may, since: nowMs, seen: nowMs, asked }
    this.#alone.set(key, alone)
    const fields = { type, needs: key.slice(type.length + 1), seconds: aloneMs / 1_000 }
    this.#o.log.warn(fields, 'no running process may run this operation; it fails if none starts in time')
    return alone
  }

  #others(): Promise<Announced> {
    const now = this.#now()
    if (this.#asked !== null && now - this.#asked.at < freshMs) return this.#asked.answer
    const asked = { at: now, answer: this.#o.store.announced() }
    this.#asked = asked
    asked.answer.catch(() => {
      if (this.#asked === asked) this.#asked = null
    })
    return asked.answer
  }
}

function see(alone: Alone, nowMs: number): void {
  if (nowMs - alone.seen > unseenMs) alone.since = nowMs
  alone.seen = Math.max(alone.seen, nowMs)
}

const pick = (labels: readonly string[]): string => labels[Math.floor(Math.random() * labels.length)] ?? ''
