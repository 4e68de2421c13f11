/**
 * Ends streams whose operation has left the queue without writing an end. Either its process died between the two
 * steps, the log refused the end, the operation died with its processes too often, or a statement that seemed to fail
 * opened the stream.
 *
 *   orphaned ──grace──► log has an end ──► noted          (Redis only: the store's own log notes it with the record)
 *                           └──► an end is written after the last record; a concurrent writer wins
 */
import { type EndKind, LogFault, type OperationReport, type StreamEntry } from 'spillway/workload'
import { keptFailure } from './delivery.js'
import { forms } from './forms.js'
import { endAt } from './handler.js'
import type { GenerationDeps } from './parts.js'
import { failures } from './request.js'

/** For all processes together. */
const roundMs = 2_000
/** The process that took the operation out of the queue writes the end right after. */
const graceMs = 3_000
/** Maximum ids in the log line. */
const loggedMax = 10

export class Orphans {
  readonly #deps: GenerationDeps
  #timer: NodeJS.Timeout | undefined
  #ending: Promise<void> | null = null

  constructor(deps: GenerationDeps) {
    this.#deps = deps
  }

  start(): void {
    this.#timer = setInterval(() => this.#round(), roundMs)
    this.#timer.unref()
  }

  async stop(): Promise<void> {
    clearInterval(this.#timer)
    await this.#ending
  }

  #round(): void {
    if (!this.#deps.intake.isReady) return
    this.#ending ??= this.#endAll()
      .catch((fault: unknown) => this.#deps.log.warn({ err: fault }, 'could not end streams that nobody writes'))
      .finally(() => {
        this.#ending = null
      })
  }

  async #endAll(): Promise<void> {
    const { registry, intake, log } = this.#deps
    const entries = await registry.orphaned(roundMs, graceMs)
    if (entries.length === 0) return
    const ids = entries.map(({ key }) => key.id)
    const reports = await intake.statusOf(ids)
    log.warn(
      { streams: ids.length, some: ids.slice(0, loggedMax) },
      'streams were left without an end; they are ended now',
    )
    await Promise.all(entries.map((entry, i) => this.#end(entry, reports[i])))
  }

  async #end(entry: StreamEntry, report: OperationReport | undefined): Promise<void> {
    const { registry } = this.#deps
    const { id } = entry.key
    const head = await this.#headOf(entry)
    if (head !== null && head.end !== null) return registry.ended(id, head.end)
    const last = head?.last ?? 0
    const kept = report?.status === 'cancelled' ? failures.cancelled : await keptFailure(this.#deps, id)
    const kind: EndKind = last === 0 ? 'unbegun' : report?.status === 'cancelled' ? 'cancelled' : 'error'
    const text = forms[entry.format].failed(kept ?? failures.interrupted)
    const written = head === null ? 'failed' : await endAt(this.#deps, entry, last, kind, text)
    // A Redis log that is unreachable or lost is final. The store's own log is retried.
    if (written === 'failed' && entry.log !== 'postgres') await registry.ended(id, 'error')
  }

  /** Null: the log is lost or unreachable. */
  async #headOf(entry: StreamEntry): Promise<{ last: number; end: EndKind | null } | null> {
    if (entry.log === 'postgres') return { last: entry.last, end: null }
    const log = this.#deps.logOf(entry.log)?.log
    if (log === undefined) return null
    try {
      const head = await log.head(entry.key)
      return head.last === 0 && (await log.marks?.isLost(entry.key.id)) === true ? null : head
    } catch (fault) {
      if (fault instanceof LogFault) return null
      throw fault
    }
  }
}
