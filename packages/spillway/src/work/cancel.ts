import { setTimeout as delay } from 'node:timers/promises'
import { isUuid } from '../core/ids.js'
import type { CancelOutcome, Store } from '../store/port.js'

const handedOutMs = 500
const handedOutLookMs = 25

/**
 * An operation that is handed out but not started either starts in a moment or comes back: paused lanes are handed out to be
 * put aside, and others because a request took the slot. Reporting it as running would be wrong, and asking it to stop
 * would be in nobody's hands once it is back.
 */
export async function cancelPatiently(
  store: Store,
  id: string,
  abortable: readonly string[],
  why: string,
): Promise<CancelOutcome> {
  if (!isUuid(id)) return 'gone'
  for (let waitedMs = 0; ; waitedMs += handedOutLookMs) {
    const outcome = await store.cancel(id, abortable, why)
    if ((outcome !== 'running' && outcome !== 'asked') || waitedMs >= handedOutMs) return outcome
    if ((await store.ticket(id))?.status !== 'pending') return outcome
    await delay(handedOutLookMs)
  }
}
