import type { OperationView, QueuedAnswer } from '@spillway/protocol/wire'
import { SpillwayError } from './error.js'
import type { Send } from './http.js'

/** Work to hand over. What `payload` holds is for its type to say. */
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

export interface SubmitOptions {
  /** The same key and order again give the same answer again. Repeat with it when an answer was lost. */
  idempotencyKey?: string
  /** Ask for a ticket instead of running it now. */
  respondAsync?: boolean
  /** Wait so long (60 at most) for one that was queued, and answer as if it had run now. */
  waitSeconds?: number
  signal?: AbortSignal
}

/** Done, failed for good, or queued: none of them is an error. */
export type Submitted = { replayed: boolean } & (
  | { status: 'executed'; operationId: string; result: unknown }
  | { status: 'failed'; operationId: string; error_message: string; result: unknown }
  | QueuedAnswer
)

export interface WaitOptions {
  /** Give up waiting after this time. Default 60,000. */
  timeoutMs?: number
  signal?: AbortSignal
}

export interface Operations {
  submit(order: Order, options?: SubmitOptions): Promise<Submitted>
  get(id: string, options?: { signal?: AbortSignal }): Promise<OperationView>
  /** Resolves when it is finished, or with what is known when the time is up: look at `status`. */
  wait(id: string, options?: WaitOptions): Promise<OperationView>
  cancel(id: string, options?: { signal?: AbortSignal }): Promise<OperationView>
}

const waitSecondsMax = 60
const waitMsDefault = 60_000
const pauseMsDefault = 500

export function operations(send: Send): Operations {
  const pathOf = (id: string): string => `/api/v1/operations/${encodeURIComponent(id)}`
  const view = async (method: 'GET' | 'POST', path: string, signal?: AbortSignal): Promise<OperationView> =>
    (await send({ method, path, ...(signal && { signal }) })).body as OperationView

  return {
    async submit(order, options = {}) {
      const prefer = [
        ...(options.respondAsync === true ? ['respond-async'] : []),
        ...(options.waitSeconds === undefined ? [] : [`wait=${Math.ceil(options.waitSeconds)}`]),
      ].join(', ')
      const { body, headers } = await send({
        method: 'POST',
        path: '/api/v1/operations',
        body: order,
        headers: {
          ...(options.idempotencyKey !== undefined && { 'idempotency-key': options.idempotencyKey }),
          ...(prefer !== '' && { prefer }),
        },
        ...(options.signal && { signal: options.signal }),
      })
      return { ...(body as Submitted), replayed: headers.get('idempotent-replayed') === 'true' }
    },

    get: (id, options = {}) => view('GET', pathOf(id), options.signal),

    async wait(id, { timeoutMs = waitMsDefault, signal } = {}) {
      const deadline = performance.now() + timeoutMs
      let seen: OperationView | undefined
      for (;;) {
        const leftMs = Math.max(0, deadline - performance.now())
        try {
          seen = await view('GET', `${pathOf(id)}?wait=${Math.min(waitSecondsMax, leftMs / 1_000).toFixed(3)}`, signal)
          if (seen.processed_at !== null || performance.now() >= deadline) return seen
        } catch (fault) {
          const pauseMs = pauseAfter(fault)
          if (pauseMs === null) throw fault
          // No pause that ends after the deadline: the caller then learns at once what stands in the way.
          if (performance.now() + pauseMs >= deadline) {
            if (seen !== undefined) return seen
            throw fault
          }
          await pause(pauseMs, signal)
        }
      }
    },

    cancel: (id, options = {}) => view('POST', `${pathOf(id)}/cancel`, options.signal),
  }
}

/** How long to pause before the same request again, spread upward; null when repeating would not help. */
function pauseAfter(fault: unknown): number | null {
  if (!(fault instanceof SpillwayError) || !fault.isTemporary) return null
  return (fault.retryAfterMs ?? pauseMsDefault) * (1 + Math.random() * 0.1)
}

function pause(ms: number, signal?: AbortSignal): Promise<void> {
  return new Promise((resolve, reject) => {
    const give = (): void => {
      clearTimeout(timer)
      reject(signal?.reason)
    }
    const timer = setTimeout(() => {
      signal?.removeEventListener('abort', give)
      resolve()
    }, ms)
    if (signal?.aborted === true) give()
    else signal?.addEventListener('abort', give, { once: true })
  })
}
