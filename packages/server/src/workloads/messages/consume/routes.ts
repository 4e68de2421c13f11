/** The routes that consume: pop, ack, transaction, lease. Push has its own mount. */
import {
  AckBatchRequest,
  AckRequest,
  ExtendLease,
  PopPlace,
  PopQuery,
  TransactionRequest,
} from '@spillway/protocol/schema'
import type { AckResult } from '@spillway/protocol/wire'
import type { FastifyLike as App } from 'spillway/workload'
import {
  carry,
  compileValidator,
  digestUuid,
  each,
  goneSignal,
  newOperationId,
  parseIdempotencyKey,
  refuseUntilReady,
  sendProblem,
} from 'spillway/workload'
import type { Static } from 'typebox'
import type { AppReply as Reply, AppRequest as Request } from '../../../app.js'
import type { MessagesWorkload } from '../index.js'
import { refusalProblem } from '../push-mount.js'
import { queueProblem } from '../queues.js'
import { SealError } from '../seal.js'
import { instant } from '../timestamps.js'
import { type Acknowledgment, extendLease, type Outcome, outcomeErrors, ownAcks } from './acks.js'
import { groupOf, type Popped, type PopRequest } from './consume.js'
import { runTransaction, type Step } from './transaction.js'

const tags = ['messages']
const popTimeoutMsDefault = 30_000
/** The limit, whatever the caller asks for: the statement handles each partition in turn. */
const popPartitionsOnce = 100
/** Above this load pops are refused. Only writes count, because pops have their own connections. */
const busyPopAbove = 0.95
const busyRetryAfterMs = 2_000
const transactionPayloads = ['operations', each, 'items', each, 'payload'] as const

type Query = Static<typeof PopQuery>
type AckBody = Static<typeof AckRequest>

export function messageRoutes(workload: MessagesWorkload): (app: App) => Promise<void> {
  return async (app) => {
    app.setSerializerCompiler(() => JSON.stringify)
    refuseUntilReady(app, workload.intake)
    addPops(app, workload)
    addAcks(app, workload)
    addTransaction(app, workload)
    addLeases(app, workload)
  }
}

type PopSource = Pick<PopRequest, 'queue' | 'partition' | 'namespace' | 'task'>

function addPops(app: App, workload: MessagesWorkload): void {
  // A HEAD would take messages that nobody sees.
  const route = { config: { role: 'consume', errorForm: true, consumes: true }, exposeHeadRoute: false } as const
  const summary = 'Take messages: 204 when there are none'
  for (const url of ['/api/v1/pop/queue/:queue', '/api/v1/pop/queue/:queue/partition/:partition']) {
    app.get<{ Params: Static<typeof PopPlace>; Querystring: Query }>(
      url,
      { ...route, schema: { tags, summary, params: PopPlace, querystring: PopQuery } },
      async (request, reply) => {
        const { queue, partition = null } = request.params
        const problem = queueProblem(request.principal.queues, queue)
        if (problem !== null) return sendProblem(reply, problem)
        return pop(workload, request, reply, { queue, partition, namespace: null, task: null })
      },
    )
  }
  app.get<{ Querystring: Query }>(
    '/api/v1/pop',
    {
      ...route,
      schema: { tags, summary: `${summary}; from any queue of a namespace or task`, querystring: PopQuery },
    },
    async (request, reply) => {
      const { namespace = null, task = null } = request.query
      if (request.principal.queues !== undefined) {
        return sendProblem(reply, { code: 'forbidden', detail: 'A key that is bound to queues has to name one.' })
      }
      return pop(workload, request, reply, { queue: null, partition: null, namespace, task })
    },
  )
}

async function pop({ consume, intake, options }: MessagesWorkload, request: Request, reply: Reply, source: PopSource) {
  const query = request.query as Query
  const from = subscriptionOf(query)
  if (intake.pipeline.writesBusy > busyPopAbove || consume.isFull) {
    return sendProblem(reply, {
      code: 'overloaded',
      detail: 'This instance is too busy to hand out messages. Try again later.',
      retryAfterMs: busyRetryAfterMs,
    })
  }
  try {
    const waitMs = query.wait === true ? (query.timeout ?? popTimeoutMsDefault) : 0
    const handedOut = await consume.pop(
      {
        identity: request.principal.identity,
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
    options.buffers.bindReserved(request.raw, reply.raw, handedOut.space)
    const text = popText(handedOut.popped)
    return reply.header('content-type', 'application/json; charset=utf-8').serializer(asIs).send(text)
  } catch (fault) {
    if (!(fault instanceof SealError)) throw fault
    return sendProblem(reply, {
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

function addAcks(app: App, { consume, intake, options: { schema } }: MessagesWorkload): void {
  const config = { role: 'consume', errorForm: true, isAck: true } as const
  const own = (request: Request, acks: readonly Acknowledgment[]) =>
    ownAcks(intake, schema, request.principal.queues, acks)
  app.post<{ Body: AckBody }>(
    '/api/v1/ack',
    { schema: { tags, summary: 'Answer for one message', body: AckRequest }, config },
    async (request) => {
      const { body } = request
      const [outcome = 'unknown'] = await consume.ack(await own(request, [toAck(body, body.consumerGroup)]))
      return toResult(body, outcome, 0)
    },
  )
  app.post<{ Body: Static<typeof AckBatchRequest> }>(
    '/api/v1/ack/batch',
    { schema: { tags, summary: 'Answer for several messages', body: AckBatchRequest }, config },
    async (request) => {
      const { acknowledgments, consumerGroup } = request.body
      const acks = acknowledgments.map((ack) => toAck(ack, ack.consumerGroup ?? consumerGroup))
      const outcomes = await consume.ack(await own(request, acks))
      return acknowledgments.map((ack, i) => toResult(ack, outcomes[i] ?? 'unknown', i))
    },
  )
}

function toAck(ack: Omit<AckBody, 'consumerGroup'>, group: string | null | undefined): Acknowledgment {
  const { transactionId, partitionId, status, error = null, leaseId } = ack
  return {
    transactionId,
    partitionId,
    status: status === 'success' ? 'completed' : (status ?? 'completed'),
    error,
    group: groupOf(group),
    leaseId: leaseId === '' ? null : (leaseId ?? null),
  }
}

function toResult({ transactionId }: AckBody, outcome: Outcome, index: number): AckResult {
  const error = outcomeErrors[outcome] ?? null
  return { index, transactionId, success: error === null, error, dlq: outcome === 'dead' }
}

function addTransaction(app: App, workload: MessagesWorkload): void {
  const { push, intake, options } = workload
  app.post<{ Body: Static<typeof TransactionRequest> }>(
    '/api/v1/transaction',
    {
      schema: { tags, summary: 'Pushes and acks, all or nothing', body: TransactionRequest },
      config: { role: 'consume', errorForm: true },
    },
    async (request, reply) => {
      const { principal, bodyText = '' } = request
      carry(request.body, bodyText, transactionPayloads)
      const { operations, requiredLeases } = request.body
      const key = parseIdempotencyKey(request.headers['idempotency-key'] as string | undefined)
      if (!key.ok) return sendProblem(reply, { code: 'invalid_request', detail: key.detail })
      const named = operations.flatMap((operation) =>
        operation.type === 'ack' ? [toAck(operation, operation.consumerGroup)] : [],
      )
      const acks = [...(await ownAcks(intake, options.schema, principal.queues, named))]
      const steps = operations.flatMap((operation): Step[] => {
        if (operation.type === 'push') return [operation]
        const ack = acks.shift()
        return ack === undefined ? [] : [{ type: 'ack', ack }]
      })
      const items = steps.flatMap((step) => (step.type === 'push' ? step.items : []))
      if (items.length > 0 && !principal.roles.has('submit') && !principal.roles.has('operate')) {
        return sendProblem(reply, { code: 'forbidden', detail: 'Pushing needs the role submit.' })
      }
      const wrong = push.check(items, principal.queues)
      if (wrong !== null) return sendProblem(reply, wrong)
      const done = await runTransaction(workload, steps, requiredLeases ?? [], {
        identity: principal.identity,
        traceparent: request.trace.traceparent,
        ...(key.key !== undefined && { idempotencyKey: key.key, keyedOn: digestUuid(bodyText) }),
      })
      if (done.kind === 'refused') return sendProblem(reply, refusalProblem(done.refusal, intake.queueDepth))
      // A repeated request with its key gets the same id.
      const transactionId =
        key.key === undefined ? newOperationId() : digestUuid(`transaction\0${principal.identity}\0${key.key}`)
      if (done.kind === 'failed') return { transactionId, success: false, error: done.error, results: done.results }
      if (done.replayed) reply.header('idempotent-replayed', 'true')
      return { transactionId, success: true, results: done.results }
    },
  )
}

function addLeases(app: App, { intake, options: { schema } }: MessagesWorkload): void {
  const validate = compileValidator(ExtendLease)
  app.post<{ Params: { leaseId: string }; Body: unknown }>(
    '/api/v1/lease/:leaseId/extend',
    {
      // The body is optional, which a route schema cannot express.
      schema: { tags, summary: 'Keep messages for longer: {seconds?}' },
      config: { role: 'consume', errorForm: true, isAck: true },
    },
    async (request, reply) => {
      const { leaseId } = request.params
      const body = validate(request.body ?? {})
      if (!body.ok) {
        return sendProblem(reply, { code: 'invalid_request', detail: 'The body is not valid.', errors: body.errors })
      }
      const { queues } = request.principal
      const until = await extendLease(intake, schema, queues, leaseId, body.value.seconds ?? null)
      if (until === null) {
        return sendProblem(reply, { code: 'not_found', detail: 'Lease not found, or expired.' })
      }
      const newExpiresAt = until.toISOString()
      return { leaseId, success: true, newExpiresAt, expiresAt: newExpiresAt, error: null }
    },
  )
}
