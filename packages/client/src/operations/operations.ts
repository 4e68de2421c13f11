import type { OperationStatus, OperationView, QueuedAnswer } from '@spillway/protocol/wire'
import { number } from '../checks.js'
import { type CallOptions, limitsOf } from '../http/call.js'
import { type KeyOptions, keyHeader } from '../idempotency.js'
import type { QueuedOperationBehavior } from '../options.js'
import type { Page, PageOptions, Parts } from '../resources.js'
import { type FollowOptions, follow, type OperationEvent } from './follow.js'
import { cancelAt, finishedOf, getAt, operationPath, restOf, viewMembers, waitFor } from './ticket.js'

/** Work to submit. The type defines the payload. */
export interface Order {
  type: string
  queue: string
  /** The lane within the queue: order holds in a lane. Default `Default`. */
  partition?: string
  /** 1 (first) to 10. Default 5. */
  priority?: number
  delay_seconds?: number
  timeout_seconds?: number
  max_retries?: number
  payload: unknown
}

export interface SubmitOptions extends CallOptions, KeyOptions {
  /** Ask for a ticket instead of running it now. */
  respondAsync?: boolean
  /** Wait up to this long (60 at most) for a queued operation, and answer as if it had run now. */
  waitSeconds?: number
  /** Default: the client's. */
  queuedOperationBehavior?: QueuedOperationBehavior
}

/** Done, failed for good, or queued: none of them is an error. */
export type Submitted = { replayed: boolean } & (
  | { status: 'executed'; operationId: string; result: unknown }
  | { status: 'failed'; operationId: string; error_message: string; result: unknown }
  | QueuedAnswer
)

export interface WaitOptions {
  /** Stop waiting after this time; the first request gets a second in any case. Default 60,000. */
  timeoutMs?: number
  signal?: AbortSignal
}

export interface OperationFilter {
  type?: string
  queue?: string
  partition?: string
  identity?: string
  /** RFC 3339. */
  from?: string
  to?: string
}

export interface Operations {
  submit(order: Order, options?: SubmitOptions): Promise<Submitted>
  get(id: string, options?: CallOptions): Promise<OperationView>
  list(
    filter?: OperationFilter & PageOptions & { status?: OperationStatus },
    options?: CallOptions,
  ): Promise<Page<OperationView>>
  /** Resolves when it is finished, or with the current state when the time is up: see `status`. */
  wait(id: string, options?: WaitOptions): Promise<OperationView>
  /** Its progress until it is finished; reconnects after a dropped connection. */
  follow(id: string, options?: FollowOptions): AsyncGenerator<OperationEvent, void, undefined>
  cancel(id: string, options?: CallOptions): Promise<OperationView>
  /** Puts a failed one back in its lane. */
  retry(id: string, options?: CallOptions): Promise<OperationView>
}

export const waitMsDefault = 60_000
export const lookMsMin = 1_000
const service = 'operations'

export function operations(parts: Parts): Operations {
  return {
    get: async (id, options = {}) => getAt(parts, operationPath(id), options),
    submit: (order, options = {}) => submit(parts, order, options),
    async list(filter = {}, options = {}) {
      const reading = { method: 'GET', service, expects: ['items'], isRepeatable: true } as const
      const { body } = await parts.send({
        ...reading,
        path: '/api/v1/operations',
        query: { ...filter },
        ...limitsOf(options),
      })
      return body as Page<OperationView>
    },
    async wait(id, { timeoutMs = waitMsDefault, signal } = {}) {
      return waitFor(parts, operationPath(id), { timeoutMs: number('timeoutMs', timeoutMs), lookMs: lookMsMin, signal })
    },
    follow: (id, options = {}) => follow(parts, id, options),
    cancel: async (id, options = {}) => cancelAt(parts, operationPath(id), options),
    async retry(id, options = {}) {
      const path = `${operationPath(id)}/retry`
      const { body } = await parts.send({
        ...{ method: 'POST', path, service, expects: viewMembers, isRepeatable: false },
        ...limitsOf(options),
      })
      return body as OperationView
    },
  }
}

async function submit(parts: Parts, order: Order, options: SubmitOptions): Promise<Submitted> {
  const { call, rest } = submission(parts, options)
  const path = '/api/v1/operations'
  const { body, headers } = await parts.send({ ...call, path, body: order, service, expects: ['operationId'] })
  const replayed = headers.get('idempotent-replayed') === 'true'
  const submitted = { ...(body as Submitted), replayed }
  if (submitted.status !== 'queued') return submitted
  const view = await finishedOf(parts, submitted, rest)
  if (view === null) return submitted
  const { id: operationId, result, error_message } = view
  if (view.status === 'completed') return { status: 'executed', operationId, result, replayed }
  return { status: 'failed', operationId, error_message: error_message ?? view.status, result, replayed }
}

/** What every submission has: a key, its preferences and its limits; and the time that is left to wait for a ticket. */
export function submission(parts: Parts, options: SubmitOptions) {
  const { respondAsync, waitSeconds, signal, queuedOperationBehavior, deadlineMs } = options
  const prefer = [
    ...(respondAsync === true ? ['respond-async'] : []),
    ...(waitSeconds === undefined ? [] : [`wait=${Math.ceil(waitSeconds)}`]),
  ].join(', ')
  const waitMs = (waitSeconds ?? 0) * 1_000
  return {
    call: {
      method: 'POST' as const,
      headers: { ...keyHeader(options), ...(prefer !== '' && { prefer }) },
      isRepeatable: true,
      ...{ waitMs, signal, deadlineMs: deadlineMs ?? parts.settings.deadlineMs + waitMs },
    },
    rest: {
      ...restOf(parts, options, waitMs),
      isPolled: (queuedOperationBehavior ?? parts.settings.whenQueued) === 'poll',
    },
  }
}
