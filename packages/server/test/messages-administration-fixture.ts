/** The administration of messages on a database of its own: its routes in an app, beside what pushes, pops and acknowledges. */

import { pino } from 'pino'
import { Registry } from 'prom-client'
import { laneOf } from '../../spillway/src/core/ids.js'
import type { FastifyLike } from '../../spillway/src/http/fastify-tickets.js'
import type { Intake } from '../../spillway/src/intake/intake.js'
import { type Bench, bench } from '../../spillway/test/pipeline-fixture.js'
import { buildApp } from '../src/app.js'
import type { Authenticator } from '../src/auth/auth.js'
import type { Principal } from '../src/auth/identity.js'
import { Buffers } from '../src/traffic/buffers.js'
import { administrationRoutes } from '../src/workloads/messages/admin/routes.js'
import type { Acknowledgment } from '../src/workloads/messages/consume/acks.js'
import { Consume } from '../src/workloads/messages/consume/consume.js'
import type { MessagesContext } from '../src/workloads/messages/context.js'
import { MessageSizes } from '../src/workloads/messages/message-sizes.js'
import { createMessageMetrics } from '../src/workloads/messages/metrics.js'
import { Push } from '../src/workloads/messages/push/push.js'
import { Queues } from '../src/workloads/messages/queues.js'
import { Seal } from '../src/workloads/messages/seal.js'

/** What these tests look into, of answers of all kinds. */
export interface Entry {
  [member: string]: unknown
  id: string
  name: string
  queueName: string
  transactionId: string
  status: string
  maxTimeLag: number
  stats: { total: number }
}

export interface Answered extends Entry {
  messages: Entry[]
  queues: Entry[]
  partitions: Entry[]
  namespaces: Entry[]
  tasks: Entry[]
  traces: Entry[]
  consumerGroups: Entry[]
}

export interface Called {
  status: number
  body: Answered
}

export interface PushedMessage {
  payload?: unknown
  transactionId?: string
}

export interface Taken {
  leaseId: string
  partitions: string[]
  transactions: string[]
  payloads: unknown[]
}

export interface MessagesBench {
  bench: Bench
  intake: Intake
  /** Queues that were woken. */
  woken: string[]
  call(method: 'GET' | 'POST' | 'DELETE', url: string, given?: { body?: unknown; as?: string }): Promise<Called>
  configure(queue: string, columns: Record<string, unknown>): Promise<void>
  push(queue: string, partition: string, messages: readonly PushedMessage[]): Promise<void>
  pop(queue: string, group: string, batch?: number, options?: { auto?: boolean; partitions?: number }): Promise<Taken>
  ack(taken: Taken, group: string, status?: Acknowledgment['status'], error?: string): Promise<string[]>
  close(): Promise<void>
}

const schema = '"spillway"'
const partitionOf = (queue: string, partition: string): string => laneOf([queue, partition]).id

/** A request with `Bearer <name>` has that principal. Without principals, authentication is off. */
function authenticatorOf(principals: Readonly<Record<string, Principal>> | null): Authenticator {
  return {
    enabled: principals !== null,
    clientAddress: () => '127.0.0.1',
    authenticate: ({ authorization }) =>
      principals === null
        ? { identity: 'local', roles: new Set(['submit', 'consume', 'operate'] as const) }
        : (principals[authorization?.slice('Bearer '.length) ?? ''] ?? { refused: 'missing', detail: 'Nobody.' }),
  }
}

export async function messagesBench(
  options: { principals?: Readonly<Record<string, Principal>>; hasKey?: boolean; pageBytesMax?: number } = {},
): Promise<MessagesBench> {
  const b = await bench()
  // On a busy machine too, what is pushed is there.
  const intake = await b.intake({ busyQueueAbove: Number.POSITIVE_INFINITY })
  const log = pino({ level: 'silent' })
  const context: MessagesContext = {
    ...{ intake, schema, log },
    buffers: new Buffers({ bytesMax: 64 * 1_048_576 }),
    settings: { pushPendingMax: 10_000, groupsMax: 1_000, encryptionKey: null },
    pageBytesMax: options.pageBytesMax ?? 4_194_304,
    metrics: createMessageMetrics(new Registry()),
    seal: new Seal(new Uint8Array(32).fill(7)),
    queues: new Queues(intake, schema),
    sizes: new MessageSizes(),
  }
  const push = new Push(context)
  const consume = new Consume(context)
  const woken: string[] = []
  consume.wake = (queue) => void woken.push(queue)
  const { app } = buildApp({
    log,
    authenticator: authenticatorOf(options.principals ?? null),
    bodyLimitBytes: 1_048_576,
    requestTimeoutMs: 30_000,
    headersTimeoutMs: 10_000,
    connectionsMax: 100,
    corsOrigins: [],
  })
  const routes = administrationRoutes({
    ...context,
    ...(options.hasKey === false && { seal: null }),
    ...{ push, consume },
  })
  await app.register(async (inner) => routes(inner as unknown as FastifyLike))
  const origin = await app.listen({ host: '127.0.0.1', port: 0 })

  return {
    bench: b,
    intake,
    woken,
    call: async (method, url, { body, as } = {}) => {
      const answer = await fetch(`${origin}${url}`, {
        method,
        headers: {
          ...(body !== undefined && { 'content-type': 'application/json' }),
          ...(as !== undefined && { authorization: `Bearer ${as}` }),
        },
        ...(body !== undefined && { body: JSON.stringify(body) }),
      })
      return { status: answer.status, body: (await answer.json()) as Answered }
    },
    configure: async (queue, columns) => {
      const names = Object.keys(columns)
      await b.sql(
        `INSERT INTO spillway.mq_queues (name, created_at, ${names.join()}) VALUES ($1, now(), ${names.map((_, i) => `$${i + 2}`).join()})`,
        [queue, ...Object.values(columns)],
      )
    },
    push: async (queue, partition, messages) => {
      const items = messages.map(({ payload = null, ...rest }) => ({ queue, partition, payload, ...rest }))
      const pushed = await push.push(items, { identity: 'test' })
      if (pushed.kind !== 'results' || pushed.results.some(({ status }) => status !== 'queued')) {
        throw new Error(`not stored: ${JSON.stringify(pushed)}`)
      }
    },
    pop: async (queue, group, batch = 1, { auto = false, partitions = 1 } = {}) => {
      const handedOut = await consume.pop(
        {
          identity: 'test',
          ...{ queue, group, batch, partitions, autoAck: auto },
          ...{ namespace: null, task: null, partition: null, mode: 'all', from: null },
        },
        0,
        { isCut: () => false, goneSignal: () => new AbortController().signal },
      )
      handedOut?.space.release()
      const popped = handedOut?.popped
      const taken = popped?.messages ?? []
      return {
        leaseId: popped?.leaseId ?? '',
        partitions: taken.map(({ partitionId }) => partitionId),
        transactions: taken.map(({ transactionId }) => transactionId),
        payloads: taken.map(({ data }) => JSON.parse(data ?? 'null') as unknown),
      }
    },
    ack: async ({ leaseId, partitions, transactions }, group, status = 'completed', error = 'it failed') => {
      const items = transactions.map((transactionId, i) => ({
        ...{ transactionId, partitionId: partitions[i] ?? '', group },
        ...{ leaseId, status, error },
      }))
      return [...(await consume.ack(items))]
    },
    close: async () => {
      consume.arrivals.close()
      await app.close()
      await b.close()
    },
  }
}

export { partitionOf }
