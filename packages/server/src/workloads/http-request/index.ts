/** `http.request`: a durable, ordered HTTP call. A webhook outbox that uses the same public API as a user's route. */
import { ForwardPayload, SubmitOperation } from '@spillway/protocol/schema'
import { defaultPartition, type ForwardResult, limits } from '@spillway/protocol/wire'
import {
  carry,
  type Definition,
  FailOperation,
  type IntakeApi,
  isReservedQueue,
  LeaveOperation,
  mayUseQueue,
  pressure,
  RetryOperation,
  reservedQueuePrefix,
} from 'spillway/workload'
import Type from 'typebox'
import type { AllowList } from './allow-list.js'
import { createForwarder, type Forwarder } from './forward.js'
import { validateForwardPayload } from './payload.js'
import { demoEchoPath, type TargetRules, targetsOf } from './targets.js'

export const httpRequestType = 'http.request'

/** The body of `POST /api/v1/operations` for this type. */
const HttpRequestBody = Type.Object(
  { ...SubmitOperation.properties, type: Type.Literal(httpRequestType) },
  { additionalProperties: false },
)

/** The same with a detailed payload, for the API description. */
export const httpRequestBody = Type.Object(
  { ...HttpRequestBody.properties, payload: ForwardPayload },
  { additionalProperties: false },
)

export interface HttpRequestOptions {
  /** What this instance may call. Read once, at the first check. */
  targets: () => TargetRules
  version: string
}

export interface HttpRequestWorkload {
  definition: Definition<Type.Static<typeof HttpRequestBody>, ForwardResult>
  close(): Promise<void>
}

const announcedMax = 100
const announcedKnown = new Map<string, AllowList>()

/** What another instance may call. There is one text per different setting in the fleet. */
function announcedTargets(text: string): AllowList {
  const known = announcedKnown.get(text)
  if (known !== undefined) return known
  if (announcedKnown.size >= announcedMax) announcedKnown.clear()
  const targets = targetsOf(JSON.parse(text) as TargetRules)
  announcedKnown.set(text, targets)
  return targets
}

export function defineHttpRequest(intake: IntakeApi, options: HttpRequestOptions): HttpRequestWorkload {
  const forwarder: Forwarder = createForwarder({ userAgent: `spillway/${options.version}` })
  let known: AllowList | undefined
  const targets = (): AllowList => {
    known ??= targetsOf(options.targets())
    return known
  }
  const definition = intake.define(httpRequestType, {
    body: HttpRequestBody,
    lane: (body) => [body.queue, body.partition ?? defaultPartition],
    gates: [pressure()],
    check: (body, request) => {
      if (isReservedQueue(body.queue)) {
        return { code: 'forbidden', detail: `Queues that begin with ${reservedQueuePrefix} are the server's own.` }
      }
      if (request.user !== null && !mayUseQueue(request.user.queues, body.queue)) {
        return { code: 'forbidden', detail: `You may not use the queue ${JSON.stringify(body.queue)}.` }
      }
      const payload = validateForwardPayload(body.payload)
      if (!payload.ok) {
        const errors = payload.errors.map((e) => ({ path: `/payload${e.path}`, message: e.message }))
        return { code: 'invalid_request', detail: 'The payload is not valid.', errors }
      }
      if (targets().allows(payload.url)) return null
      return {
        code: 'target_not_allowed',
        detail: `The target is not in SPILLWAY_FORWARD_ALLOW, or is this server and not ${demoEchoPath}.`,
      }
    },
    announces: () => JSON.stringify(options.targets()),
    priority: (body) => body.priority ?? 5,
    delayMs: (body) => (body.delay_seconds ?? 0) * 1_000,
    timeoutMs: (body) => Math.max(1, Math.round((body.timeout_seconds ?? 30) * 1_000)),
    maxRetries: (body) => body.max_retries ?? 3,
    run: async (body, ctx, text): Promise<ForwardResult> => {
      carry(body, text, ['payload', 'body'])
      const payload = validateForwardPayload(body.payload)
      if (!payload.ok) throw new FailOperation('The stored payload is not valid.')
      const { url } = payload
      if (!targets().allows(url)) {
        throw new LeaveOperation(`No running instance may call ${url.origin}: add it to SPILLWAY_FORWARD_ALLOW.`, {
          key: url.pathname === demoEchoPath ? `${url.origin}${demoEchoPath}` : url.origin,
          may: (announced) => announcedTargets(announced).allows(url),
        })
      }
      const outcome = await forwarder.forward(payload.request, {
        allow: targets(),
        operationId: ctx.id,
        traceparent: ctx.traceparent,
        signal: ctx.signal,
        answerBytesMax: limits.forwardAnswerBytes,
      })
      switch (outcome.kind) {
        case 'done':
          return outcome.result
        case 'failed':
          throw new FailOperation(outcome.error.message, { result: outcome.result })
        case 'retry':
          throw new RetryOperation(outcome.error.message, {
            result: outcome.result,
            ...(outcome.retryAfterMs !== undefined && { afterMs: outcome.retryAfterMs }),
          })
      }
    },
  })
  return { definition, close: () => forwarder.close() }
}
