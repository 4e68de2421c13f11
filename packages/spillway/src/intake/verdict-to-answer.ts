/** Turns the store's verdict into the caller's answer, and counts it: run now, wait, replay or refuse. */

import { gateRequestOf } from '../accept/accept-item.js'
import { codeOf, isNobodysFault } from '../accept/conflict-retry.js'
import { expired } from '../core/outcome.js'
import type { IntakeLog } from '../core/settings.js'
import type { Metrics } from '../metrics/metrics.js'
import type { Accepted, AcceptItem, Claimed, Store, StoredAnswer, Ticket } from '../store/port.js'
import type { Outcome } from '../work/attempt.js'
import type { Waiters } from '../work/waiters.js'
import { type Answer, failedAnswer } from './answer.js'
import { type Refusal, rateStatus, refusedBy, storeAwayRetryMs } from './refusal.js'
import type { Bound, PendingItem, Submission } from './submission.js'

export interface AnsweringOptions {
  store: Store
  metrics: Metrics
  log: IntakeLog
  waiters: Waiters
  directWaitMs: number
  /** The store may have granted leases that this process does not know about. */
  suspect(): void
  /** Other instances may have work to do. */
  announce(): void
  onRefused(type: string, refusal: Refusal): void
}

export class Answering {
  readonly #o: AnsweringOptions

  constructor(options: AnsweringOptions) {
    this.#o = options
  }

  refuse(route: string, refusal: Refusal): Refusal {
    this.#o.metrics.admissions.labels(route, 'refuse', refusal.gate ?? refusal.code).inc()
    this.#o.onRefused(route, refusal)
    return refusal
  }

  /** The caller's answer for the accepting transaction's decision. */
  async answer(bound: Bound, submission: Submission, pending: PendingItem, accepted: Accepted): Promise<Answer> {
    const { item, tiers } = pending
    const { type } = bound
    const status = 'rate' in accepted && accepted.rate !== null ? rateStatus(accepted.rate, tiers) : undefined
    const rate = status === undefined ? {} : { rate: status }
    switch (accepted.verdict) {
      case 'apply':
        this.#o.metrics.admissions.labels(type, 'execute', 'applied').inc()
        return { kind: 'done', operationId: item.id, result: pending.result, replayed: false, ...rate }
      case 'execute':
        bound.slots.load.accepted()
        if (item.reason === 'requested' || item.reason === 'still_running') {
          const { reason } = item
          this.#o.metrics.admissions.labels(type, reason === 'requested' ? 'queue' : 'execute', reason).inc()
          this.#start(bound, item, accepted)
          // It runs, so there is no backlog before it.
          const { id: operationId, paceMs: waitMs } = item
          return { kind: 'queued', operationId, position: 0, waitMs, reason, replayed: false, ...rate }
        }
        this.#o.metrics.admissions.labels(type, 'execute', 'direct').inc()
        return { ...(await this.#execute(bound, item, accepted, submission)), ...rate }
      case 'queue': {
        this.#o.metrics.admissions.labels(type, 'queue', accepted.reason).inc()
        this.#queued(bound, item)
        const queued: Answer = {
          kind: 'queued',
          operationId: item.id,
          position: accepted.place,
          waitMs: accepted.waitMs,
          reason: accepted.reason,
          replayed: false,
          ...rate,
        }
        return submission.waitMs ? this.#waitFor(queued, submission.waitMs, submission.signal) : queued
      }
      case 'refuse':
        return { kind: 'refused', refusal: this.refuse(type, refusalOf(bound, submission, pending, accepted)) }
      case 'replay':
        this.#o.metrics.admissions.labels(type, 'replay', accepted.answer.v).inc()
        return { ...(await this.#replay(accepted, submission)), ...rate }
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

  /** Runs an operation that its acceptance assigned to this process. */
  async #execute(
    { slots }: Bound,
    item: AcceptItem,
    accepted: Extract<Accepted, { verdict: 'execute' }>,
    submission: Submission,
  ): Promise<Answer> {
    const patienceMs = submission.waitMs ?? this.#o.directWaitMs
    const started = performance.now()
    let timer: NodeJS.Timeout | undefined
    // Whichever is first excludes the other: a caller that is answered with a ticket needs the dead letter.
    let isLate = false
    let isClaimed = false
    let leave = (): void => undefined
    const { signal } = submission
    const late = new Promise<'late'>((resolve) => {
      leave = () => {
        isLate = !isClaimed
        if (isLate) resolve('late')
      }
      timer = setTimeout(leave, patienceMs)
      if (signal?.aborted === true) leave()
      else signal?.addEventListener('abort', leave, { once: true })
    })
    const claimCaller = (): boolean => {
      isClaimed = !isLate
      return isClaimed
    }
    const outcome = await Promise.race([slots.work.execute(claimedBy(item, accepted), claimCaller), late])
    clearTimeout(timer)
    signal?.removeEventListener('abort', leave)
    if (outcome === 'late') return this.#becameTicket(item, 'still_running', 0)
    if (outcome === null) return this.#afterLoss(item)
    if (outcome.kind !== 'retry' && outcome.kind !== 'released') return settledAnswer(item.id, outcome)
    // It will be retried. A caller that set a waiting time waits for the retry, too.
    const leftMs = submission.waitMs === undefined ? 0 : patienceMs - (performance.now() - started)
    const ticket = leftMs > 0 ? await this.#o.waiters.wait(item.id, leftMs, submission.signal) : null
    const answer = ticket === null ? null : await this.#finished(ticket)
    if (answer !== null) return answer
    return outcome.kind === 'retry'
      ? this.#becameTicket(item, 'retrying', outcome.delayMs)
      : this.#becameTicket(item, 'still_running', 0)
  }

  /** The same for a caller that has its ticket already: nobody waits for the end. */
  #start({ slots }: Bound, item: AcceptItem, accepted: Extract<Accepted, { verdict: 'execute' }>): void {
    void slots.work.execute(claimedBy(item, accepted))
  }

  /** The caller's time ended before the run did: the work is durable, so the answer is a ticket. */
  async #becameTicket(item: AcceptItem, reason: 'still_running' | 'retrying', waitMs: number): Promise<Answer> {
    const answer = { place: 0, wait_ms: Math.max(waitMs, item.paceMs), reason }
    if (item.idempotency !== null) {
      await this.#o.store
        .answerKey(item.idempotency.key, item.id, { v: 'queue', ...answer })
        .catch((fault: unknown) => {
          // The key stays "in progress" and gets its answer when the operation is settled.
          this.#o.log.warn({ err: fault, operation: item.id }, 'could not keep the answer for its Idempotency-Key')
        })
    }
    return { kind: 'queued', operationId: item.id, position: 0, waitMs: answer.wait_ms, reason, replayed: false }
  }

  /** The lease was lost during the run, or the settlement's answer was lost: the ticket has the outcome. */
  async #afterLoss(item: AcceptItem): Promise<Answer> {
    const ticket = await this.#o.store.ticket(item.id).catch(() => null)
    const answer = ticket === null ? null : await this.#finished(ticket)
    return answer ?? this.#becameTicket(item, 'still_running', 0)
  }

  /** Waits for a queued operation and answers as if it had run now. */
  async #waitFor(queued: Extract<Answer, { kind: 'queued' }>, ms: number, signal?: AbortSignal): Promise<Answer> {
    const ticket = await this.#o.waiters.wait(queued.operationId, ms, signal)
    const answer = ticket === null ? null : await this.#finished(ticket)
    return answer === null ? queued : { ...answer, ...(queued.rate && { rate: queued.rate }) }
  }

  /** The answer for a caller that waited; null while it is not finished. A failure that its handler expected leaves no dead letter then. */
  async #finished(ticket: Ticket): Promise<Extract<Answer, { kind: 'done' | 'failed' }> | null> {
    const answer = finishedAnswer(ticket)
    if (answer?.kind === 'failed' && answer.expected) {
      await this.#o.store.letterAnswered(ticket.id).catch((fault: unknown) => {
        this.#o.log.warn({ err: fault, operation: ticket.id }, 'a dead letter stays although its caller was answered')
      })
    }
    return answer
  }

  /** The stored answer; a caller that waits gets the same answer as the first one. */
  async #replay(accepted: Extract<Accepted, { verdict: 'replay' }>, submission: Submission): Promise<Answer> {
    const answer = replayed(accepted.operationId, accepted.answer)
    if (answer.kind !== 'queued' || !submission.waitMs) return answer
    const waited = await this.#waitFor(answer, submission.waitMs, submission.signal)
    return waited.kind === 'refused' ? waited : { ...waited, replayed: true }
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
  storeFault(type: string, fault: unknown, item?: AcceptItem): Refusal {
    if (item?.execute === true) this.#o.suspect()
    if (!isNobodysFault(fault)) {
      this.#o.log.error({ err: fault, type, operation: item?.id }, 'an operation could not be stored')
      return this.refuse(type, {
        code: 'internal_error',
        detail: 'The operation could not be stored.',
        gate: 'store',
      })
    }
    return this.refuse(type, {
      code: 'store_unavailable',
      detail: 'The store did not confirm. Repeat the request with the same Idempotency-Key.',
      retryAfterMs: codeOf(fault) === 'disk_full' ? 30_000 : storeAwayRetryMs,
      gate: 'store',
    })
  }
}

function refusalOf(
  bound: Bound,
  { identity, request, body }: Submission,
  { tiers, limited }: PendingItem,
  accepted: Extract<Accepted, { verdict: 'refuse' }>,
): Refusal {
  const refusal = refusedBy(bound, gateRequestOf(identity, request), body, tiers, accepted)
  return limited === undefined ? refusal : { ...refusal, extensions: { ...refusal.extensions, ...limited } }
}

function claimedBy(item: AcceptItem, accepted: Extract<Accepted, { verdict: 'execute' }>): Claimed {
  return {
    fence: accepted.fence,
    lane: item.lane,
    seq: accepted.seq,
    id: item.id,
    type: item.type,
    queue: item.queue,
    partition: item.partition,
    priority: item.priority,
    identity: item.identity,
    payload: item.payload,
    waitedMs: 0,
    careful: false,
    due: true,
    attempts: 0,
    maxAttempts: item.maxAttempts,
    timeoutMs: item.timeoutMs,
    traceparent: item.traceparent,
    idempotencyKey: item.idempotency?.key ?? null,
    gate: item.gate,
  }
}

const cancelled = {
  error: 'The operation was cancelled.',
  said: { code: 'operation_cancelled', status: 409 },
}

/** For an operation that has left its lane. */
function settledAnswer(operationId: string, outcome: Exclude<Outcome, { kind: 'retry' | 'released' }>): Answer {
  switch (outcome.kind) {
    case 'completed':
      return { kind: 'done', operationId, result: outcome.result ?? null, replayed: false }
    case 'failed':
      return failedAnswer(operationId, outcome)
    case 'expired':
      return failedAnswer(operationId, expired)
    case 'cancelled':
      return failedAnswer(operationId, cancelled)
  }
}

/** The answer that an idempotency key stored. */
function replayed(operationId: string, answer: StoredAnswer): Answer {
  switch (answer.v) {
    case 'queue':
      return {
        kind: 'queued',
        operationId,
        position: answer.place,
        waitMs: answer.wait_ms,
        reason: answer.reason,
        replayed: true,
      }
    case 'done':
      return { kind: 'done', operationId, result: answer.result, replayed: true }
    case 'failed': {
      const { error, result, code, status } = answer
      const said = code === undefined || status === undefined ? undefined : { code, status }
      return { ...failedAnswer(operationId, { error, result, said }), replayed: true }
    }
    case 'cancelled':
      return { ...failedAnswer(operationId, cancelled), replayed: true }
  }
}

/** Null while the operation is not finished. */
function finishedAnswer(ticket: Ticket): Extract<Answer, { kind: 'done' | 'failed' }> | null {
  switch (ticket.status) {
    case 'completed':
      return { kind: 'done', operationId: ticket.id, result: ticket.result, replayed: false }
    case 'failed':
      return failedAnswer(ticket.id, ticket)
    case 'cancelled':
      return failedAnswer(ticket.id, cancelled)
    default:
      return null
  }
}
