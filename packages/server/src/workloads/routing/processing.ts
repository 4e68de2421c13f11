/** One task, from envelope to answer: the same for the broker and the operation queue. */
import { setTimeout as delay } from 'node:timers/promises'
import type { RouteDecision, RouteTask, RoutingCode } from '@spillway/protocol/wire'
import { digestUuid } from 'spillway/workload'
import type { RoutingParts } from './context.js'
import { decide } from './decision.js'
import type { Keyed, KeyUse } from './decision-store.js'
import { type RouteContext, taskDigest } from './envelope.js'

export type RouteAnswer =
  | { ok: true; decision: RouteDecision; context: RouteContext; replayed?: true }
  | {
      ok: false
      error: { code: RoutingCode | 'internal_error'; message: string }
      errors?: readonly { path: string; message: string }[]
      context: Partial<RouteContext>
    }

export interface TaskOptions {
  /** The task as received. */
  text: string
  traceId: string
  /** The request's key; one in the body takes precedence. It includes its owner, whatever tenant the body names. */
  key?: string | undefined
  /** The caller reads the answer later: store it before answering. */
  isTicket: boolean
  /** It was processed before and may have been answered; policies may have changed since. */
  isRepeat: boolean
}

/** No tenant has an empty name. */
const noTenant = ''

/** Throws if the store fails: retry. */
export async function answerTask(
  { settings, policies, decisions, log }: RoutingParts,
  task: RouteTask,
  { text, traceId, key: outer, isTicket, isRepeat }: TaskOptions,
): Promise<RouteAnswer> {
  if (settings.simulateDelayMs > 0) await delay(settings.simulateDelayMs)
  const context = { request_id: task.request_id, trace_id: task.trace_id ?? traceId }
  const keyed = keyedBy(task, text, outer)
  const used = keyed === undefined ? null : await decisions.replay(keyed)
  if (used !== null) return fromKey(used, context)
  if (isRepeat) {
    const known = await decisions.find(task.tenant_id, task.request_id)
    if (known !== null) return { ok: true, decision: known.decision, context }
  }
  const decided = decide(await policies.loaded, task)
  if ('code' in decided) return { ok: false, error: decided, context }
  const { tenant_id: tenant, request_id: requestId } = task
  const recorded = decisions.record({ tenant, requestId, decision: decided, traceId: context.trace_id, keyed })
  if (keyed === undefined && !isTicket) {
    // The waiting caller gets it; only a later read would miss it.
    recorded.catch((fault: unknown) =>
      log.warn({ err: fault }, 'a decision was sent but could not be stored; later reads will not find it'),
    )
    return { ok: true, decision: decided, context }
  }
  const kept = await recorded
  return kept.kind === 'stored' ? { ok: true, decision: decided, context } : fromKey(kept, context)
}

/** A request's key covers the body as received; a key in the body covers the task's content. */
function keyedBy(task: RouteTask, text: string, outer: string | undefined): Keyed | undefined {
  const { idempotency_key: own, tenant_id: scope } = task
  if (own !== undefined) return { key: own, scope, digest: taskDigest(text) }
  return outer === undefined ? undefined : { key: outer, scope: noTenant, digest: digestUuid(text) }
}

function fromKey(used: KeyUse, context: RouteContext): RouteAnswer {
  if (used.kind === 'replay') return { ok: true, decision: used.decision, context, replayed: true }
  const message = 'This idempotency key was used for another request.'
  return { ok: false, error: { code: 'IDEMPOTENCY_VIOLATION', message }, context }
}
