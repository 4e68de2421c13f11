import { defaultPartition, limits } from '@spillway/protocol/wire'
import { millisecondsOf } from '../core/duration.js'
import { digestUuid, isLaneName, type Lane, type LaneName, laneOf, newOperationId } from '../core/ids.js'
import { check, OptionError, type Rule } from '../core/options.js'
import type { BoundGate, GateRequest, RateTier } from '../gates/gate.js'
import { defaults, type IntakeRequest } from '../intake/define.js'
import { checkReturned, type numberRules } from '../intake/define-rules.js'
import type { Refusal } from '../intake/refusal.js'
import type { Bound, Submission } from '../intake/submission.js'
import type { AcceptItem, RateCheck } from '../store/port.js'

/** Read on demand: a request may have no address that is known, and throws then. */
export function gateRequestOf(identity: string, request: IntakeRequest): GateRequest {
  return {
    identity,
    get clientAddress() {
      return request.clientAddress
    },
  }
}

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
  const { own } = submission
  const id = newOperationId()
  const { turns = null, ...lane } = laneFor(bound, submission, id)
  if (!isName(lane.queue) || !isName(lane.partition)) {
    return {
      code: 'invalid_request',
      detail: `Queue and partition have 1 to ${limits.nameCodePoints} characters and no NUL.`,
      gate: 'lane',
    }
  }
  const delayMs =
    own?.delayMs ?? (options.delayMs === undefined ? 0 : returned(type, 'delayMs', Math.round(options.delayMs(body))))
  const expiresMs = expiryOf(bound, submission, delayMs)
  const requested = submission.respondAsync === true || delayMs > 0
  // The caller gets a ticket whatever happens, so the key stores the ticket at accept time.
  const isTicket = options.run !== undefined && submission.waitMs === 0
  const exact = exactChecks(bound.gates, gateRequestOf(identity, request), body)
  const { idempotencyKey } = submission
  // Stored as it came, if there is a text: serializing it again would change numbers. A key compares the same text.
  const payload = submission.text ?? JSON.stringify(body ?? null)
  return {
    tiers: exact.tiers,
    item: {
      id,
      lane: lane.id,
      queue: lane.queue,
      partition: lane.partition,
      type,
      priority: own?.priority ?? numberFor(bound, body, 'priority'),
      identity,
      payload,
      delayMs,
      maxAttempts: (own?.maxRetries ?? numberFor(bound, body, 'maxRetries')) + 1,
      timeoutMs: own?.timeoutMs ?? numberFor(bound, body, 'timeoutMs'),
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
      gate: exact.gate,
      halt: exact.halt,
      batch: 0,
      rates: exact.rates,
      turns,
      expiresMs,
    },
  }
}

function expiryOf({ type, options }: Bound, { own }: Submission, delayMs: number): number | null {
  const ms = own?.expiresMs ?? (options.expiresAfter === undefined ? null : millisecondsOf(options.expiresAfter))
  if (ms !== null && ms <= delayMs) {
    throw new OptionError(
      `the operation type ${type}: expiresAfter (${ms} ms) must be longer than the delay (${delayMs} ms)`,
    )
  }
  return ms
}

/** Without an order the operation is a lane of its own. */
function laneFor(
  { type, options }: Bound,
  { body, request, own }: Submission,
  id: string,
): Lane & Pick<AcceptItem, 'turns'> {
  const { lane } = options
  if (own?.lane !== undefined) return laneOf(own.lane)
  if (lane === undefined) return { id, queue: type, partition: defaultPartition }
  if (typeof lane === 'function') return laneOf(laneName(type, 'lane', lane(body, request)))
  const name = laneName(type, 'lane.key', lane.key(body, request))
  const { id: key, queue, partition } = laneOf(typeof name === 'string' ? [type, name] : name)
  return { id, queue, partition, turns: { key, most: lane.concurrency } }
}

function numberFor({ type, options }: Bound, body: unknown, name: 'priority' | 'timeoutMs' | 'maxRetries'): number {
  const value = options[name]
  return typeof value === 'function' ? returned(type, name, value(body)) : (value ?? defaults[name])
}

function returned(type: string, name: keyof typeof numberRules, value: number): number {
  checkReturned(type, name, value)
  return value
}

function laneName(type: string, name: 'lane' | 'lane.key', lane: unknown): LaneName {
  check(`the operation type ${type}`, `what ${name} returns`, lane, name === 'lane' ? isLaneName : isKeyName)
  return lane as LaneName
}

const isKeyName: Rule = (key) => isLaneName(key) && 'a text, or [queue, key]'

/** What the store has to check for these gates. */
export function exactChecks(
  gates: readonly BoundGate<unknown>[],
  request: GateRequest,
  body: unknown,
): { gate: string | null; halt: string | null; tiers: RateTier[]; rates: RateCheck[] } {
  const tiers: RateTier[] = []
  let gate: string | null = null
  let halt: string | null = null
  for (const bound of gates) {
    const exact = bound.exact?.(request, body)
    if (exact === undefined) continue
    gate = exact.gate ?? gate
    halt = exact.halt ?? halt
    if (exact.rates !== undefined) tiers.push(...exact.rates)
  }
  const rates = tiers.map(({ name: _, key, ...rest }) => ({ ...rest, key: digestUuid(`rate\0${key}`) }))
  return { gate, halt, tiers, rates }
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
