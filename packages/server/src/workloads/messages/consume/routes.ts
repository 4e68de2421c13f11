/** The routes that consume: pop, ack, transaction, lease. Push has its own mount. */
import {
  AckBatchRequest,
  AckRequest,
  ExtendLease,
  PopPlace,
  PopQuery,
  TransactionRequest,
} from '@spillway/protocol/schema'
import {
  carry,
  compileValidator,
  digestUuid,
  each,
  goneSignal,
  newOperationId,
  ProblemError,
  parseIdempotencyKey,
} from 'spillway/workload'
import type { Static } from 'typebox'
import type { AppReply as Reply } from '../../../app.js'
import { type RouteRequest, routeFor } from '../../../route-table.js'
import type { Messages } from '../context.js'
import { refusalProblem } from '../push-mount.js'
import { queueProblem } from '../queues.js'
import { SealError } from '../seal.js'
import { instant } from '../timestamps.js'
import { extendLease, groupOf, ownAcks, toAck, toResult } from './acks.js'
import type { Popped, PopRequest } from './consume.js'
import { runTransaction } from './transaction.js'

const route = routeFor<Messages>()
const access = { role: 'consume' } as const
const popAccess = { ...access, consumes: true } as const
const ackAccess = { ...access, isAck: true } as const
const popTimeoutMsDefault = 30_000
/** The limit, whatever the caller asks for: the statement handles each partition in turn. */
const popPartitionsOnce = 100
/** Above this load pops are refused. Only writes count, because pops have their own connections. */
const busyPopAbove = 0.95
const busyRetryAfterMs = 2_000
const transactionPayloads = ['operations', each, 'items', each, 'payload'] as const

type Query = Static<typeof PopQuery>
type PopSource = Pick<PopRequest, 'queue' | 'partition' | 'namespace' | 'task'>

const summary = 'Take messages: 204 when there are none'
const popRoutes = [
  ...(['/api/v1/pop/queue/:queue', '/api/v1/pop/queue/:queue/partition/:partition'] as const).map((url) =>
    route('GET', url, popAccess, {
      summary,
      params: PopPlace,
      query: PopQuery,
      handle(messages, request, reply) {
        const { queue, partition = null } = request.params as Static<typeof PopPlace>
        const problem = queueProblem(request.principal.queues, queue)
        if (problem !== null) throw new ProblemError(problem)
        return pop(messages, request, reply, { queue, partition, namespace: null, task: null })
      },
    }),
  ),
  route('GET', '/api/v1/pop', popAccess, {
    summary: `${summary}; from any queue of a namespace or task`,
    query: PopQuery,
    handle(messages, request, reply) {
      const { namespace = null, task = null } = request.query
      if (request.principal.queues !== undefined) {
        throw new ProblemError({ code: 'forbidden', detail: 'A key that is bound to queues has to name one.' })
      }
      return pop(messages, request, reply, { queue: null, partition: null, namespace, task })
    },
  }),
]

async function pop(
  { consume, intake, buffers }: Messages,
  { query, principal, raw }: RouteRequest<Query>,
  reply: Reply,
  source: PopSource,
): Promise<Reply> {
  const from = subscriptionOf(query)
  if (intake.pipeline.writesBusy > busyPopAbove || consume.isFull) {
    throw new ProblemError({
      code: 'overloaded',
      detail: 'This instance is too busy to hand out messages. Try again later.',
      retryAfterMs: busyRetryAfterMs,
    })
  }
  try {
    const waitMs = query.wait === true ? (query.timeout ?? popTimeoutMsDefault) : 0
    const handedOut = await consume.pop(
      {
        identity: principal.identity,
        ...source,
        ...from,
        group: groupOf(query.consumerGroup),
        batch: query.batch ?? 1,
        partitions: Math.min(popPartitionsOnce, query.partitions ?? 1),
        autoAck: query.autoAck === true,
      },
      waitMs,
      { isCut: () => reply.raw.destroyed, goneSignal: () => goneSignal(reply.raw, 'wait') },
    )
    if (handedOut === null) return reply.code(204).send()
    buffers.bindReserved(raw, reply.raw, handedOut.space)
    const text = popText(handedOut.popped)
    return reply.header('content-type', 'application/json; charset=utf-8').serializer(asIs).send(text)
  } catch (fault) {
    if (!(fault instanceof SealError)) throw fault
    throw new ProblemError({
      code: 'store_unavailable',
      detail: 'The messages are encrypted and this server has no key (SPILLWAY_ENCRYPTION_KEY).',
      retryAfterMs: busyRetryAfterMs,
    })
  }
}

/** Where a new group starts. */
function subscriptionOf({ subscriptionMode = 'all', subscriptionFrom }: Query): Pick<PopRequest, 'mode' | 'from'> {
  if (subscriptionFrom === 'now') return { mode: 'new', from: null }
  if (subscriptionFrom === undefined) return { mode: subscriptionMode === 'all' ? 'all' : 'new', from: null }
  return { mode: 'time', from: instant('subscriptionFrom', subscriptionFrom).toISOString() }
}

const asIs = (payload: unknown): string => payload as string

/** The payloads are already JSON; parsing and writing them again would cost more than all the rest. */
function popText({ queue, namespace, task, group, leaseId, messages }: Popped): string {
  const tail = `,"queue":${JSON.stringify(queue)},"leaseId":${JSON.stringify(leaseId)},"consumerGroup":${JSON.stringify(group)},"namespace":${JSON.stringify(namespace)},"task":${JSON.stringify(task)}}`
  const texts = messages.map((m) => {
    const { id, transactionId, traceId, partition, partitionId, createdAt, retryCount } = m
    const head = JSON.stringify({ id, transactionId, traceId, partition, partitionId, createdAt, retryCount })
    return `${head.slice(0, -1)},"data":${m.data ?? 'null'}${tail}`
  })
  const [first] = messages
  const source = { queue, partition: first?.partition ?? null, partitionId: first?.partitionId ?? null, leaseId }
  return `{"success":true,${JSON.stringify({ ...source, consumerGroup: group }).slice(1, -1)},"messages":[${texts.join()}]}`
}

const validateExtension = compileValidator(ExtendLease)

const ackRoutes = [
  route('POST', '/api/v1/ack', ackAccess, {
    summary: 'Answer for one message',
    body: AckRequest,
    async handle(messages, { body, principal }) {
      const [outcome] = await messages.consume.ack(await ownAcks(messages, principal.queues, [toAck(body)]))
      return toResult(body, outcome)
    },
  }),
  route('POST', '/api/v1/ack/batch', ackAccess, {
    summary: 'Answer for several messages',
    body: AckBatchRequest,
    async handle(messages, { body: { acknowledgments, consumerGroup }, principal }) {
      const acks = acknowledgments.map((ack) => toAck(ack, ack.consumerGroup ?? consumerGroup))
      const outcomes = await messages.consume.ack(await ownAcks(messages, principal.queues, acks))
      return acknowledgments.map((ack, i) => toResult(ack, outcomes[i], i))
    },
  }),
  route('POST', '/api/v1/lease/:leaseId/extend', ackAccess, {
    // The body is optional, which a route schema cannot express.
    summary: 'Keep messages for longer: {seconds?}',
    async handle(messages, request) {
      const { leaseId } = request.params
      const body = validateExtension(request.body ?? {})
      if (!body.ok) {
        throw new ProblemError({ code: 'invalid_request', detail: 'The body is not valid.', errors: body.errors })
      }
      const until = await extendLease(messages, request.principal.queues, leaseId, body.value.seconds ?? null)
      if (until === null) throw new ProblemError({ code: 'not_found', detail: 'Lease not found, or expired.' })
      const newExpiresAt = until.toISOString()
      return { leaseId, success: true, newExpiresAt, expiresAt: newExpiresAt, error: null }
    },
  }),
]

const transactionRoute = route('POST', '/api/v1/transaction', access, {
  summary: 'Pushes and acks, all or nothing',
  body: TransactionRequest,
  async handle(messages, request, reply) {
    const { principal, bodyText = '' } = request
    carry(request.body, bodyText, transactionPayloads)
    const { operations, requiredLeases } = request.body
    const key = parseIdempotencyKey(request.headers['idempotency-key'] as string | undefined)
    if (!key.ok) throw new ProblemError({ code: 'invalid_request', detail: key.detail })
    const items = operations.flatMap((operation) => (operation.type === 'push' ? operation.items : []))
    if (items.length > 0 && !principal.roles.has('submit') && !principal.roles.has('operate')) {
      throw new ProblemError({ code: 'forbidden', detail: 'Pushing needs the role submit.' })
    }
    const wrong = messages.push.check(items, principal.queues)
    if (wrong !== null) throw new ProblemError(wrong)
    const named = operations.flatMap((operation) => (operation.type === 'ack' ? [toAck(operation)] : []))
    const acks = await ownAcks(messages, principal.queues, named)
    const done = await runTransaction(
      messages,
      { operations, items, acks, leases: requiredLeases ?? [] },
      {
        identity: principal.identity,
        traceparent: request.trace.traceparent,
        ...(key.key !== undefined && { idempotencyKey: key.key, keyedOn: digestUuid(bodyText) }),
      },
    )
    if (done.kind === 'refused') throw new ProblemError(refusalProblem(done.refusal, messages.intake.queueDepth))
    // A repeated request with its key gets the same id.
    const transactionId =
      key.key === undefined ? newOperationId() : digestUuid(`transaction\0${principal.identity}\0${key.key}`)
    if (done.kind === 'failed') return { transactionId, success: false, error: done.error, results: done.results }
    if (done.replayed) reply.header('idempotent-replayed', 'true')
    return { transactionId, success: true, results: done.results }
  },
})

export const consumeRoutes = [...popRoutes, ...ackRoutes, transactionRoute]
