/**
 * `intake.on`: what this process did, for its own code. An event follows the commit that it reports; if the process dies in
 * between, the event is lost and the operation is not. Events are not stored and not repeated, and those of other processes
 * are theirs alone.
 *
 * Listeners are called in a microtask, never inside the code that reports. So none can disturb it, and nothing queues up: the
 * microtasks of a turn end before the next turn of the event loop begins. Without a listener no event is made.
 */
import type { ProblemCode } from '@spillway/protocol/wire'
import { check, isFunction, oneOf } from '../core/options.js'
import { expired } from '../core/outcome.js'
import type { IntakeLog } from '../core/settings.js'
import type { AcceptItem, Claimed } from '../store/port.js'
import type { Outcome } from '../work/attempt.js'
import type { Refusal } from './refusal.js'

interface OperationEvent {
  id: string
  type: string
  queue: string
  partition: string
  identity: string
  /** The attempt that ended: 1 for the first. */
  attempt: number
  maxAttempts: number
  traceparent: string
}

export interface IntakeEvents {
  completed: OperationEvent & { result: unknown }
  /** An attempt failed, and another one follows. */
  retried: OperationEvent & { error: string; retryInMs: number }
  /** It failed for good: status `failed`. */
  failed: OperationEvent & { error: string; result: unknown }
  /** It failed for good, and is a dead letter now; after `failed`. */
  dead: OperationEvent & { error: string; result: unknown }
  /** Not accepted: by a gate, the load, or its idempotency key. */
  refused: {
    /** The definition's type, or the admission's name. */
    type: string
    code: ProblemCode
    detail: string
    /** `rate`, `capacity`, `halt`, `pressure`, …; null: an own refusal of a gate. */
    gate: string | null
    retryAfterMs: number | null
  }
}

export type IntakeListener<Name extends keyof IntakeEvents> = (event: IntakeEvents[Name]) => unknown

const names = ['completed', 'retried', 'failed', 'dead', 'refused'] as const

export class Events {
  readonly #log: IntakeLog
  readonly #listeners = new Map<string, Set<{ call: (event: never) => unknown }>>()

  constructor(log: IntakeLog) {
    this.#log = log
  }

  /** Returns a function that ends it. */
  on<Name extends keyof IntakeEvents>(name: Name, listener: IntakeListener<Name>): () => void {
    check('on', 'the event', name, oneOf(...names))
    check('on', 'the listener', listener, isFunction)
    const own = { call: listener as (event: never) => unknown }
    const listeners = this.#listeners.get(name) ?? new Set()
    this.#listeners.set(name, listeners.add(own))
    return () => {
      listeners.delete(own)
    }
  }

  /** An attempt is settled. */
  settled(op: Claimed, outcome: Outcome): void {
    const about = (): OperationEvent => aboutOperation(op, op.attempts + 1)
    if (outcome.kind === 'completed') this.#emit('completed', () => ({ ...about(), result: outcome.result ?? null }))
    if (outcome.kind === 'retry') {
      this.#emit('retried', () => ({ ...about(), error: outcome.error, retryInMs: outcome.delayMs }))
    }
    if (outcome.kind === 'expired') {
      this.#emit('failed', () => ({ ...aboutOperation(op, op.attempts), error: expired.error, result: null }))
    }
    if (outcome.kind === 'failed') {
      const failure = () => ({ ...about(), error: outcome.error, result: outcome.result ?? null })
      this.#emit('failed', failure)
      // A caller who was answered with it takes the place of the dead letter.
      if (outcome.answered !== true) this.#emit('dead', failure)
    }
  }

  /** An effect was written with its acceptance. */
  applied(item: AcceptItem, result: unknown): void {
    this.#emit('completed', () => ({ ...aboutOperation(item, 1), result: result ?? null }))
  }

  refused(type: string, { code, detail, gate, retryAfterMs }: Refusal): void {
    this.#emit('refused', () => ({ type, code, detail, gate: gate ?? null, retryAfterMs: retryAfterMs ?? null }))
  }

  #emit<Name extends keyof IntakeEvents>(name: Name, make: () => IntakeEvents[Name]): void {
    const listeners = this.#listeners.get(name)
    if (listeners === undefined || listeners.size === 0) return
    const event = make()
    queueMicrotask(() => {
      for (const listener of [...listeners]) if (listeners.has(listener)) this.#call(name, listener.call, event)
    })
  }

  #call(name: string, listener: (event: never) => unknown, event: IntakeEvents[keyof IntakeEvents]): void {
    const failed = (fault: unknown): void => {
      const about = 'id' in event ? { operation: event.id } : {}
      this.#log.error({ err: fault, event: name, type: event.type, ...about }, 'a listener of intake.on failed')
    }
    try {
      const returned = listener(event as never)
      if (returned instanceof Promise) returned.catch(failed)
    } catch (fault) {
      failed(fault)
    }
  }
}

function aboutOperation(op: Claimed | AcceptItem, attempt: number): OperationEvent {
  const { id, type, queue, partition, identity, maxAttempts, traceparent } = op
  return { id, type, queue, partition, identity, attempt, maxAttempts, traceparent }
}
