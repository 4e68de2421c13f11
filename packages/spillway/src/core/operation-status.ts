import type { OperationStatus } from '@spillway/protocol/wire'
import type { Store } from '../store/port.js'
import type { Slots } from '../work/slot-groups.js'
import { isUuid } from './ids.js'

/** The status of an operation, in brief. */
export interface StatusReport {
  id: string
  status: OperationStatus | 'unknown'
  /** Position in its lane, or of a parallel one among all that wait for a slot; 0 is next; null when it does not wait. */
  position: number | null
  /** An estimate of the time until it has run; null when it does not wait, or if unknown. */
  waitMs: number | null
  /** The error of its last attempt, or why it ended. */
  error: string | null
}

const idsPerStatement = 2_000

/** In the order of the given ids. */
export async function reportsOf(
  store: Store,
  slotsOf: (type: string) => Slots,
  ids: readonly string[],
): Promise<StatusReport[]> {
  const known = new Map<string, StatusReport>()
  const asked = [...new Set(ids.filter(isUuid).map((id) => id.toLowerCase()))]
  for (let from = 0; from < asked.length; from += idsPerStatement) {
    for (const { type, paceMs, isParallel, abreast, ...row } of await store.statusOf(
      asked.slice(from, from + idsPerStatement),
    )) {
      const wait = isParallel ? waitForSlot : waitOf
      const waitMs = row.position === null ? null : wait(slotsOf(type), type, row.position, paceMs, abreast)
      known.set(row.id, { ...row, waitMs })
    }
  }
  return ids.map((id) => {
    const found = known.get(id.toLowerCase())
    return found === undefined ? { id, status: 'unknown', position: null, waitMs: null, error: null } : { ...found, id }
  })
}

/** As in the answer at acceptance: the pace of its lane, or the backlog of all lanes, whichever is longer. */
function waitOf(
  { load, concurrency }: Slots,
  type: string,
  position: number,
  paceMs: number | null,
  abreast: number,
): number | null {
  const inLane = ((paceMs ?? load.paceMs(type)) * (position + 1)) / abreast
  const wait = Math.max(inLane, load.drainMs(load.depth - concurrency) ?? 0)
  return wait > 0 ? Math.round(wait) : null
}

/** The time until those before it have left, at the recent rate of all processes, or at the pace of the slots here. */
function waitForSlot({ load, concurrency }: Slots, type: string, position: number): number | null {
  const wait = load.drainMs(position + 1) ?? (load.paceMs(type) * (position + 1)) / concurrency
  return wait > 0 ? Math.round(wait) : null
}
