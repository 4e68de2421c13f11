/** `http.request`: a durable, ordered HTTP call. A webhook outbox that uses the same public API as a user's route. */
import { Executed, ForwardPayload, Problem, Queued, SubmitHeaders, SubmitOperation } from '@spillway/protocol/schema'
import { defaultPartition, type ForwardResult } from '@spillway/protocol/wire'
import {
  carry,
  type Definition,
  FailOperation,
  failureAsResult,
  type Intake,
  isReservedQueue,
  LeaveOperation,
  mayUseQueue,
  mountOf,
  pressure,
  RetryOperation,
  reservedQueuePrefix,
} from 'spillway/workload'
import Type from 'typebox'
import type { Workload, WorkloadContext } from '../../workload.js'
import type { AllowList } from './allow-list.js'
import { createForwarder, type Forwarder } from './forward.js'
import { validateForwardPayload } from './payload.js'
import { demoEchoPath, ownAddress, type TargetRules, targetsOf } from './targets.js'

const httpRequestType = 'http.request'

/** The body of `POST /api/v1/operations` for this type. */
const HttpRequestBody = Type.Object(
  { ...SubmitOperation.properties, type: Type.Literal(httpRequestType) },
  { additionalProperties: false },
)

const submitSchema = {
  tags: ['operations'],
  summary: 'Hand over work: done now, or queued with a ticket',
  description:
    'The target’s 2xx is done; 408, 429, 5xx and the network are retried; the rest is a failure. A redirect within the allowed origins is followed if it repeats the call: 307 and 308, and any of a GET or HEAD. 301, 302 and 303 of another method are a failure.',
  headers: SubmitHeaders,
  /** With a detailed payload. */
  body: Type.Object({ ...HttpRequestBody.properties, payload: ForwardPayload }, { additionalProperties: false }),
  response: { 201: Executed, 202: Queued, '4xx': Problem, '5xx': Problem },
}

export const httpRequest: Workload = {
  name: 'http-request',
  define: (context) => {
    const { intake, version } = context
    const forwarder = createForwarder({ userAgent: `spillway/${version}` })
    const definition = defineHttpRequest(intake, forwarder, () => targetRules(context))
    return {
      namedTypes: [httpRequestType],
      routes: async (add) => {
        const submit = mountOf(intake, definition, { encode: failureAsResult(intake.bound(definition)) })
        add.mounted({ url: '/api/v1/operations', mount: submit, schema: submitSchema })
      },
      close: () => forwarder.close(),
    }
  },
}

/** Call it when the server listens: a port of 0 is known only then. */
function targetRules({ config, isLoopback, origin }: WorkloadContext): TargetRules {
  const own = origin()
  return {
    origins: config.operations.forwardAllow ?? (isLoopback ? ownOrigins(own) : []),
    own: own === '' ? null : ownAddress(config.server.host, Number(new URL(own).port || 80)),
  }
}

/** The server's own origin under both names: the landing page shows the one that the visitor used. */
function ownOrigins(origin: string): string[] {
  if (origin === '') return []
  const byName = new URL(origin)
  byName.hostname = 'localhost'
  return [origin, byName.origin]
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

/** `rules`: what this instance may call. Read once, at the first check. */
function defineHttpRequest(
  intake: Intake,
  forwarder: Forwarder,
  rules: () => TargetRules,
): Definition<Type.Static<typeof HttpRequestBody>, ForwardResult> {
  let known: AllowList | undefined
  const targets = (): AllowList => {
    known ??= targetsOf(rules())
    return known
  }
  return intake.define(httpRequestType, {
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
    announces: () => JSON.stringify(rules()),
    priority: (body) => body.priority ?? 5,
    delayMs: (body) => (body.delay_seconds ?? 0) * 1_000,
    timeoutMs: (body) => Math.max(1, Math.round((body.timeout_seconds ?? 30) * 1_000)),
    maxRetries: (body) => body.max_retries ?? 3,
    run: async (body, ctx, text): Promise<ForwardResult> => {
      carry(body, text, ['payload', 'body'])
      const payload = validateForwardPayload(body.payload)
      if (!payload.ok) throw new FailOperation('The stored payload is not valid.', { deadLetter: true })
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
      })
      switch (outcome.kind) {
        case 'done':
          return outcome.result
        case 'failed':
          throw new FailOperation(outcome.error.message, { result: outcome.result, deadLetter: true })
        case 'retry':
          throw new RetryOperation(outcome.error.message, {
            result: outcome.result,
            ...(outcome.retryAfterMs !== undefined && { afterMs: outcome.retryAfterMs }),
          })
      }
    },
  })
}
