/**
 * Ends streams whose operation has left the queue without writing an end. Either its process died between the two
 * steps, the log refused the end, the operation died with its processes too often, or a statement that seemed to fail
 * opened the stream.
 *
 *   orphaned ──grace──► log has an end ──► noted          (Redis only: the store's own log notes it with the record)
 *                           └──► an end is written after the last record; a concurrent writer wins
 *
 * Not a task of the sweeps, which rest after each batch: clients wait for this end, and a slow log must not delay the
 * removal of expired rows.
 */
import { type EndKind, type Periodic, periodic, type StatusReport, type StreamEntry } from 'spillway/workload'
import { keptFailure } from './delivery.js'
import { forms } from './forms.js'
import type { GenerationDeps } from './index.js'
import { failures } from './request.js'

/** For all processes together. */
const roundMs = 2_000
/** The process that took the operation out of the queue writes the end right after. */
const graceMs = 3_000
/** Maximum ids in the log line. */
const loggedMax = 10

export function endOrphans(deps: GenerationDeps): Periodic {
  return periodic(roundMs, () => (deps.intake.isReady ? endAll(deps) : undefined), {
    onFault: (fault) => deps.log.warn({ err: fault }, 'could not end streams without a writer'),
  })
}

async function endAll(deps: GenerationDeps): Promise<void> {
  const { logs, intake, log } = deps
  const entries = await logs.registry.orphaned(roundMs, graceMs)
  if (entries.length === 0) return
  const ids = entries.map(({ key }) => key.id)
  const reports = await intake.tickets.statusOf(ids)
  log.warn(
    { streams: ids.length, some: ids.slice(0, loggedMax) },
    'streams were left without an end; they are ended now',
  )
  await Promise.all(entries.map((entry, i) => end(deps, entry, reports[i])))
}

async function end(deps: GenerationDeps, entry: StreamEntry, report: StatusReport | undefined): Promise<void> {
  const { logs } = deps
  const { id } = entry.key
  const head = await logs.headOf(entry)
  const isGone = typeof head === 'string'
  if (!isGone && head.end !== null) return logs.registry.ended(id, head.end)
  const last = isGone ? 0 : head.last
  const kept = report?.status === 'cancelled' ? failures.cancelled : await keptFailure(deps, id)
  const kind: EndKind = last === 0 ? 'unbegun' : report?.status === 'cancelled' ? 'cancelled' : 'error'
  const text = forms[entry.format].failed(kept ?? failures.interrupted)
  const written = isGone ? 'failed' : await logs.endAt(entry, last, kind, text)
  // A Redis log that is unreachable or lost is final. The store's own log is retried.
  if (written === 'failed' && entry.log !== 'postgres') await logs.registry.ended(id, 'error')
}
