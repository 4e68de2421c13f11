/** `whenBusy` of a definition: how long a request may wait for a slot, and what becomes of it without one. */
import { type Duration, isDuration, millisecondsOf } from '../core/duration.js'
import { oneOf, type Rule } from '../core/options.js'
import type { Slots } from '../work/slot-groups.js'

export type WhenBusy = 'queue' | 'refuse' | { wait: Duration; then: 'queue' | 'refuse' }

/** A caller that waits for longer is better off with a ticket, or a refusal. */
const waitMsMax = 10_000
const queueWaitMs = 250
const refuseWaitMsMin = 25
/** How many may wait before it is known how long a run takes. */
const mostAtFirst = 256

const isThen = oneOf('queue', 'refuse')
const isWait = isDuration(0, waitMsMax)

export const isWhenBusy: Rule = (value) => {
  if (typeof value !== 'object' || value === null) {
    return isThen(value) && `"queue" or "refuse", or an object { wait, then }`
  }
  const { wait, then, ...unknown } = value as Record<string, unknown>
  const isFine = isWait(wait) === null && isThen(then) === null && Object.keys(unknown).length === 0
  return isFine ? null : `an object { wait, then }: wait is ${isWait(null)}, and then is "queue" or "refuse"`
}

/** What becomes of it without a slot. */
export const thenOf = (whenBusy: WhenBusy | undefined): 'queue' | 'refuse' =>
  typeof whenBusy === 'object' ? whenBusy.then : (whenBusy ?? 'queue')

/** How long a request may wait for one of these slots, and how many others may wait with it. */
export function roomOf(whenBusy: WhenBusy | undefined, { work, concurrency }: Slots): { waitMs: number; most: number } {
  const baseMs = work.baseMs
  const most = (waitMs: number): number =>
    baseMs === null ? mostAtFirst : Math.max(1, Math.ceil((concurrency * waitMs) / Math.max(baseMs, 1)))
  if (typeof whenBusy === 'object') {
    const waitMs = millisecondsOf(whenBusy.wait)
    return { waitMs, most: most(waitMs) }
  }
  if (whenBusy === 'refuse') return { waitMs: Math.max(refuseWaitMsMin, 0.5 * (baseMs ?? 0)), most: concurrency }
  return { waitMs: queueWaitMs, most: most(queueWaitMs) }
}
