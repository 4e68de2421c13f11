/**
 * A call and its possible outcomes:
 *
 *   asked ──throttled──────────────┐
 *     │ sent to a healthy endpoint
 *     ├─2xx, 304──► answer         │
 *     ├─final────► error           ▼
 *     └─may pass────────────────► pause: Retry-After + jitter, or the budget if that is longer ──► asked again
 *                                  └─ past the deadline, or no attempt left ──► the last error, at once
 */
import { number } from '../checks.js'
import { type Clock, within } from '../clock.js'
import { SpillwayError } from '../error.js'
import type { Settings } from '../options.js'
import { type Endpoint, Endpoints } from '../policy/endpoints.js'
import { pauseMs } from '../policy/pause.js'
import { RetryBudget } from '../policy/retry-budget.js'
import { Throttle } from '../policy/throttle.js'
import { isAccepted, isEndpointFault, isUnknown, type Verdict, verdictOn } from '../policy/verdict.js'
import { attempt } from './attempt.js'
import type { Answer, Call, Received, Send, Service } from './call.js'

/** A throttled call costs the server nothing, so it is checked again soon. */
const heldBackMsMax = 5_000

export function createSender(settings: Settings, clock: Clock): Send {
  const sender = new Sender(settings, clock)
  return (call) => sender.send(call)
}

/** One call under way. */
interface Course {
  call: Call
  deadline: number
  /** How often it was tried, including throttled tries. */
  tries: number
  /** How often it was sent. */
  sent: number
}

class Sender {
  readonly #settings: Settings
  readonly #clock: Clock
  readonly #endpoints: Endpoints
  readonly #budget: RetryBudget | null
  readonly #throttles = new Map<Service, Throttle>()

  constructor(settings: Settings, clock: Clock) {
    this.#settings = settings
    this.#clock = clock
    this.#endpoints = new Endpoints(settings.bases, clock)
    this.#budget = settings.budget === false ? null : new RetryBudget(settings.budget, () => clock.now())
  }

  async send(call: Call): Promise<Answer> {
    number('the time to wait', call.waitMs ?? 0)
    const deadlineMs = number('deadlineMs', call.deadlineMs ?? this.#settings.deadlineMs)
    const course: Course = { call, deadline: this.#clock.now() + deadlineMs, tries: 0, sent: 0 }
    this.#budget?.earn()
    let last: SpillwayError | null = null
    let isRepeat = false
    for (;;) {
      call.signal?.throwIfAborted()
      course.tries++
      const { answer, fault, endpoint } = await this.#try(course, await this.#token(course))
      if (answer !== null) return { ...answer, isRepeat }
      isRepeat ||= isUnknown(fault)
      // The real error says more than `throttled`.
      if (last === null || fault.code !== 'throttled') last = fault
      const delayMs = this.#delayOf(course, fault, endpoint)
      if (delayMs === null) {
        last.isUnknown = isRepeat
        throw last
      }
      const { method, path } = call
      const { logger, hooks } = this.#settings
      logger.debug('trying again', { method, path, attempts: course.sent, delayMs, code: fault.code })
      hooks.onRetry({ method, path, attempts: course.sent, delayMs, error: fault })
      await this.#clock.sleep(delayMs, call.signal)
    }
  }

  /** Errors from the caller's own code pass through unchanged. */
  async #token({ call, deadline, sent }: Course): Promise<string | undefined> {
    const { token } = this.#settings
    if (typeof token !== 'function') return token
    const late = () => new SpillwayError('unreachable', 'No token came before the deadline', { attempts: sent })
    return within(deadline - this.#clock.now(), token(), late, call.signal)
  }

  async #try(
    course: Course,
    token: string | undefined,
  ): Promise<{ answer: Received; fault: null; endpoint: Endpoint } | Failed> {
    const { call } = course
    const throttle = this.#throttleOf(call.service)
    if (throttle?.lets() === false) {
      const detail = `held back: the server refuses most of what this client sends (${call.service})`
      return { answer: null, endpoint: null, fault: new SpillwayError('throttled', detail, { attempts: course.sent }) }
    }
    course.sent++
    const endpoint = this.#endpoints.pick(call.isRepeatable)
    const patienceMs = this.#settings.attemptTimeoutMs + (call.waitMs ?? 0)
    try {
      const answer = await attempt(call, {
        settings: this.#settings,
        clock: this.#clock,
        base: endpoint.base,
        token,
        attempts: course.sent,
        timeoutMs: Math.max(1, Math.min(patienceMs, course.deadline - this.#clock.now())),
      })
      throttle?.accepted()
      this.#endpoints.answered(endpoint)
      return { answer, fault: null, endpoint }
    } catch (fault) {
      if (!(fault instanceof SpillwayError)) {
        this.#endpoints.left(endpoint)
        throttle?.unanswered()
        throw fault
      }
      // The budget and the endpoints handle an unreachable server; the throttle handles one that refuses.
      if (fault.status === null) throttle?.unanswered()
      else if (isAccepted(fault)) throttle?.accepted()
      if (isEndpointFault(fault)) this.#endpoints.failed(endpoint)
      else this.#endpoints.answered(endpoint)
      return { answer: null, fault, endpoint }
    }
  }

  /** Null: no retry. */
  #delayOf(course: Course, fault: SpillwayError, endpoint: Endpoint | null): number | null {
    const { retryOn429, honorRetryAfter, attemptsMax, maxRetryDelayMs } = this.#settings
    const { isRepeatable } = course.call
    const verdict: Verdict = verdictOn(fault, { isRepeatable, retryOn429 })
    if (verdict === 'final' || course.sent >= attemptsMax) return null
    const leftMs = course.deadline - this.#clock.now()
    const isElsewhere = verdict === 'elsewhere' && endpoint !== null && this.#endpoints.hasOther(endpoint)
    const ownMs = isElsewhere
      ? 0
      : pauseMs({
          tries: course.tries,
          retryAfterMs: honorRetryAfter ? (fault.retryAfterMs ?? 0) : 0,
          maxMs: fault.code === 'throttled' ? Math.min(heldBackMsMax, maxRetryDelayMs) : maxRetryDelayMs,
          leftMs,
          random: this.#clock.random(),
        })
    if (ownMs === null) return null
    // A throttled call has cost the server nothing.
    const budgetMs = fault.code === 'throttled' ? 0 : (this.#budget?.take() ?? 0)
    const delayMs = Math.max(ownMs, budgetMs)
    if (delayMs < leftMs) return delayMs
    this.#budget?.refund()
    return null
  }

  #throttleOf(service: Service): Throttle | null {
    const { throttle } = this.#settings
    if (throttle === false) return null
    let own = this.#throttles.get(service)
    if (own === undefined) {
      own = new Throttle(throttle, this.#clock)
      this.#throttles.set(service, own)
    }
    return own
  }
}

interface Failed {
  answer: null
  fault: SpillwayError
  /** Null: it was not sent. */
  endpoint: Endpoint | null
}
