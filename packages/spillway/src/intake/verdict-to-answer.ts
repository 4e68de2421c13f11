/** Turns the store's decision into the caller's answer, and counts it. */

import { codeOf } from '../accept/conflict-retry.js'
import type { IntakeLog } from '../core/settings.js'
import type { Metrics } from '../metrics/metrics.js'
import type { Accepted, AcceptItem } from '../store/port.js'
import type { Answer } from './answer.js'
import { type Refusal, refusedBy, storeAwayRetryMs, toldRate } from './refusal.js'
import type { Dispatch } from './run-or-wait.js'
import type { Bound, PendingItem, Submission } from './submission.js'

export interface AnsweringOptions {
  metrics: Metrics
  log: IntakeLog
  dispatch: Dispatch
  /** The store may have granted leases that this process does not know about. */
  suspect(): void
  /** Other instances may have work to do. */
  announce(): void
}

export class Answering {
  readonly #o: AnsweringOptions

  constructor(options: AnsweringOptions) {
    this.#o = options
  }

  refuse(route: string, refusal: Refusal): Refusal {
    this.#o.metrics.admissions.labels(route, 'refuse', refusal.gate ?? refusal.code).inc()
    return refusal
  }

  /** The caller's answer for the accepting transaction's decision. */
  async told(bound: Bound, submission: Submission, pending: PendingItem, accepted: Accepted): Promise<Answer> {
    const { item, tiers } = pending
    const { type } = bound
    const rateTold = 'rate' in accepted && accepted.rate !== null ? toldRate(accepted.rate, tiers) : undefined
    const rate = rateTold === undefined ? {} : { rate: rateTold }
    switch (accepted.verdict) {
      case 'apply':
        this.#o.metrics.admissions.labels(type, 'execute', 'applied').inc()
        return { kind: 'done', operationId: item.id, result: pending.result, replayed: false, ...rate }
      case 'execute':
        bound.slots.load.accepted()
        if (item.reason === 'requested' || item.reason === 'still_running') {
          const { reason } = item
          this.#o.metrics.admissions.labels(type, reason === 'requested' ? 'queue' : 'execute', reason).inc()
          this.#o.dispatch.start(bound, item, accepted)
          // It runs, so there is no backlog before it.
          const { id: operationId, paceMs: waitMs } = item
          return { kind: 'queued', operationId, place: 0, waitMs, reason, replayed: false, ...rate }
        }
        this.#o.metrics.admissions.labels(type, 'execute', 'direct').inc()
        return { ...(await this.#o.dispatch.execute(bound, item, accepted, submission)), ...rate }
      case 'queue': {
        this.#o.metrics.admissions.labels(type, 'queue', accepted.reason).inc()
        this.#queued(bound, item)
        const queued: Answer = {
          kind: 'queued',
          operationId: item.id,
          place: accepted.place,
          waitMs: accepted.waitMs,
          reason: accepted.reason,
          replayed: false,
          ...rate,
        }
        return submission.waitMs ? this.#o.dispatch.waitFor(queued, submission.waitMs, submission.signal) : queued
      }
      case 'refuse':
        return { kind: 'refused', refusal: this.refuse(type, refusedBy(bound, submission, pending, accepted)) }
      case 'replay':
        this.#o.metrics.admissions.labels(type, 'replay', accepted.answer.v).inc()
        return { ...(await this.#o.dispatch.replay(accepted, submission)), ...rate }
      case 'mismatch':
        return this.#conflict(type, {
          code: 'idempotency_mismatch',
          detail: 'This Idempotency-Key was used for a request with another body. Use a new key.',
          gate: 'idempotency',
        })
      case 'in_progress':
        return this.#conflict(type, {
          code: 'idempotency_in_progress',
          detail: 'The first request with this Idempotency-Key is still in progress. Ask again shortly.',
          gate: 'idempotency',
        })
    }
  }

  #conflict(type: string, refusal: Refusal): Answer {
    return { kind: 'refused', refusal: this.refuse(type, refusal) }
  }

  #queued({ slots: { work, load } }: Bound, item: AcceptItem): void {
    load.accepted()
    if (item.delayMs > 0) work.wakeIn(item.delayMs)
    else work.wake()
    this.#o.announce()
  }

  /** The accepting statement failed: nothing was decided, or the outcome is unknown. */
  storeFault(bound: Bound, item: AcceptItem, fault: unknown): Refusal {
    if (item.execute) this.#o.suspect()
    const code = codeOf(fault)
    if (code === 'data' || code === undefined || code === 'other') {
      this.#o.log.error({ err: fault, type: bound.type, operation: item.id }, 'an operation could not be stored')
      return this.refuse(bound.type, {
        code: 'internal_error',
        detail: 'The operation could not be stored.',
        gate: 'store',
      })
    }
    return this.refuse(bound.type, {
      code: 'store_unavailable',
      detail: 'The store did not confirm. Repeat the request with the same Idempotency-Key.',
      retryAfterMs: code === 'disk_full' ? 30_000 : storeAwayRetryMs,
      gate: 'store',
    })
  }
}
