import { limits } from '@spillway/protocol/wire'
import { digestUuid, laneOf } from '../core/lane.js'
import { newOperationId } from '../core/operation-id.js'
import type { RateTier } from '../gates/gate.js'
import { defaults } from '../intake/define.js'
import type { Refusal } from '../intake/refusal.js'
import type { Bound, Submission } from '../intake/submission.js'
import type { AcceptItem } from '../store/port.js'

/**
 * The row for one submission, as the accepting transaction needs it; or why there is none. `now`: it may run at once if its
 * lane is empty.
 */
export function buildItem(
  bound: Bound,
  submission: Submission,
  load: { busy: boolean; now: boolean; paceMs: number },
): { item: AcceptItem; tiers: RateTier[] } | Refusal {
  const { options, type } = bound
  const { body, request, identity } = submission
  const lane = laneOf(options.lane === undefined ? type : options.lane(body, request))
  if (!isName(lane.queue) || !isName(lane.partition)) {
    return {
      code: 'invalid_request',
      detail: `Queue and partition have 1 to ${limits.nameCodePoints} characters and no NUL.`,
      gate: 'lane',
    }
  }
  const of = (value: number | ((body: unknown) => number) | undefined, fallback: number): number =>
    typeof value === 'function' ? value(body) : (value ?? fallback)
  const delayMs = Math.max(0, Math.round(options.delayMs?.(body) ?? 0))
  const requested = submission.respondAsync === true || delayMs > 0
  // The caller gets a ticket whatever happens, so the key stores the ticket at accept time.
  const isTicket = options.run !== undefined && submission.waitMs === 0
  const tiers: RateTier[] = []
  let gate: string | null = null
  let halt: string | null = null
  const gateRequest = { identity, clientAddress: request.clientAddress }
  for (const bind of bound.gates) {
    const exact = bind.exact?.(gateRequest, body)
    if (exact === undefined) continue
    gate = exact.gate ?? gate
    halt = exact.halt ?? halt
    if (exact.rates !== undefined) tiers.push(...exact.rates)
  }
  const { idempotencyKey } = submission
  // Stored as it came, if there is a text: serializing it again would change numbers. A key compares the same text.
  const payload = submission.text ?? JSON.stringify(body ?? null)
  return {
    tiers,
    item: {
      id: newOperationId(),
      lane: lane.id,
      queue: lane.queue,
      partition: lane.partition,
      type,
      priority: Math.min(
        limits.priorityMax,
        Math.max(limits.priorityMin, Math.round(of(options.priority, defaults.priority))),
      ),
      identity,
      payload,
      delayMs,
      maxAttempts: of(options.maxRetries, defaults.maxRetries) + 1,
      timeoutMs: of(options.timeoutMs, defaults.timeoutMs),
      traceparent: request.traceparent,
      execute: load.now && delayMs === 0,
      reason: requested ? 'requested' : load.busy ? 'system_busy' : isTicket && load.now ? 'still_running' : '',
      paceMs: load.paceMs,
      stamp: 0,
      lead: 0,
      idempotency:
        idempotencyKey === undefined
          ? null
          : {
              key: keyOf(type, identity, idempotencyKey),
              request: submission.digest ?? digestUuid(submission.keyedOn ?? payload),
            },
      gate,
      halt,
      batch: 0,
      rates: tiers.map((tier) => ({
        key: digestUuid(`rate\0${tier.key}`),
        limit: tier.limit,
        windowMinutes: tier.windowMinutes,
        ...(tier.keepMinutes !== undefined && { keepMinutes: tier.keepMinutes }),
      })),
    },
  }
}

/** The store's key for an Idempotency-Key. */
export function keyOf(type: string, identity: string, idempotencyKey: string): string {
  return digestUuid(`${type}\0${identity}\0${idempotencyKey}`)
}

/** 1–255 code points, any character but NUL. The length in UTF-16 units decides all but the longest. */
function isName(text: string): boolean {
  if (text.length === 0 || text.includes('\0')) return false
  return text.length <= limits.nameCodePoints || [...text].length <= limits.nameCodePoints
}
