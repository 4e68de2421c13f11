/** From a verdict to the answer: run now, wait, or replay. */

import type { IntakeLog } from '../core/settings.js'
import type { Accepted, AcceptItem, Claimed, Store } from '../store/port.js'
import type { Waiters } from '../work/waiters.js'
import { type Answer, finishedAnswer, replayed, settledAnswer } from './answer.js'
import type { Bound, Submission } from './submission.js'

export interface DispatchOptions {
  store: Store
  waiters: Waiters
  log: IntakeLog
  directWaitMs: number
}

export class Dispatch {
  readonly #o: DispatchOptions

  constructor(options: DispatchOptions) {
    this.#o = options
  }

  /** Runs an operation that its acceptance assigned to this process. */
  async execute(
    { slots }: Bound,
    item: AcceptItem,
    accepted: Extract<Accepted, { verdict: 'execute' }>,
    submission: Submission,
  ): Promise<Answer> {
    const patienceMs = submission.waitMs ?? this.#o.directWaitMs
    const started = performance.now()
    let timer: NodeJS.Timeout | undefined
    const late = new Promise<'late'>((resolve) => {
      timer = setTimeout(() => resolve('late'), patienceMs)
    })
    const outcome = await Promise.race([slots.work.execute(claimedBy(item, accepted)), late])
    clearTimeout(timer)
    if (outcome === 'late') return this.#becameTicket(item, 'still_running', 0)
    if (outcome === null) return this.#afterLoss(item)
    if (outcome.kind !== 'retry' && outcome.kind !== 'released') return settledAnswer(item.id, outcome)
    // It will be retried. A caller that set a waiting time waits for the retry, too.
    const leftMs = submission.waitMs === undefined ? 0 : patienceMs - (performance.now() - started)
    const ticket = leftMs > 0 ? await this.#o.waiters.wait(item.id, leftMs, submission.signal) : null
    const answer = ticket === null ? null : finishedAnswer(ticket)
    if (answer !== null) return answer
    return outcome.kind === 'retry'
      ? this.#becameTicket(item, 'retrying', outcome.delayMs)
      : this.#becameTicket(item, 'still_running', 0)
  }

  /** The same for a caller that has its ticket already: nobody waits for the end. */
  start({ slots }: Bound, item: AcceptItem, accepted: Extract<Accepted, { verdict: 'execute' }>): void {
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
    return { kind: 'queued', operationId: item.id, place: 0, waitMs: answer.wait_ms, reason, replayed: false }
  }

  /** The lease was lost during the run, or the settlement's answer was lost: the ticket has the outcome. */
  async #afterLoss(item: AcceptItem): Promise<Answer> {
    const ticket = await this.#o.store.ticket(item.id).catch(() => null)
    const answer = ticket === null ? null : finishedAnswer(ticket)
    return answer ?? this.#becameTicket(item, 'still_running', 0)
  }

  /** Waits for a queued operation and answers as if it had run now. */
  async waitFor(queued: Extract<Answer, { kind: 'queued' }>, ms: number, signal?: AbortSignal): Promise<Answer> {
    const ticket = await this.#o.waiters.wait(queued.operationId, ms, signal)
    const answer = ticket === null ? null : finishedAnswer(ticket)
    return answer === null ? queued : { ...answer, ...(queued.rate && { rate: queued.rate }) }
  }

  /** The stored answer; a caller that waits gets the same answer as the first one. */
  async replay(accepted: Extract<Accepted, { verdict: 'replay' }>, submission: Submission): Promise<Answer> {
    const answer = replayed(accepted.operationId, accepted.answer)
    if (answer.kind !== 'queued' || !submission.waitMs) return answer
    const waited = await this.waitFor(answer, submission.waitMs, submission.signal)
    return waited.kind === 'refused' ? waited : { ...waited, replayed: true }
  }
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
