/** The administration of messages on a database of its own: its routes in an app, and pushes, pops and acks as the store does them. */
import { randomUUID } from 'node:crypto'
import { pino } from 'pino'
import { buildApp } from '../src/http/app.js'
import type { Authenticator } from '../src/http/auth.js'
import type { Principal } from '../src/http/identity.js'
import type { FastifyLike } from '../src/http/operations-routes.js'
import type { IntakeApi } from '../src/index.js'
import { laneOf } from '../src/operations/lane.js'
import { messageAdministrationRoutes } from '../src/workloads/messages/administration-routes.js'
import { Seal } from '../src/workloads/messages/seal.js'
import { type Bench, bench } from './pipeline-fixture.js'

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
  sealed?: boolean
}

export interface Popped {
  lease: string
  partitions: string[]
  transactions: string[]
  payloads: string[]
}

export interface MessagesBench {
  bench: Bench
  intake: IntakeApi
  seal: Seal
  /** Queues that were told to have something. */
  woken: string[]
  maintenance: { enabled: boolean }
  call(method: 'GET' | 'POST' | 'DELETE', url: string, given?: { body?: unknown; as?: string }): Promise<Called>
  configure(queue: string, columns: Record<string, unknown>): Promise<void>
  push(queue: string, partition: string, messages: readonly PushedMessage[]): Promise<string[]>
  pop(queue: string, group: string, batch?: number, options?: { auto?: boolean; partitions?: number }): Promise<Popped>
  ack(popped: Popped, group: string, status?: string, error?: string): Promise<string[]>
  close(): Promise<void>
}

const schema = '"spillway"'
const partitionOf = (queue: string, partition: string): string => laneOf([queue, partition]).id

/** Whoever sends `Bearer <name>` is that one; with no principals, authentication is off. */
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
  options: { principals?: Readonly<Record<string, Principal>>; hasKey?: boolean } = {},
): Promise<MessagesBench> {
  const b = await bench()
  const intake = await b.intake()
  const seal = new Seal(new Uint8Array(32).fill(7))
  const woken: string[] = []
  const maintenance = { enabled: false }
  const { app } = buildApp({
    log: pino({ level: 'silent' }),
    authenticator: authenticatorOf(options.principals ?? null),
    bodyLimitBytes: 1_048_576,
    requestTimeoutMs: 30_000,
    headersTimeoutMs: 10_000,
    connectionsMax: 100,
    corsOrigins: [],
  })
  const routes = messageAdministrationRoutes(
    {
      intake,
      seal: options.hasKey === false ? null : seal,
      options: { schema, isAuthenticated: options.principals !== undefined },
    },
    {
      wake: (queue) => void woken.push(queue),
      maintenance: {
        on: async () => {
          maintenance.enabled = true
        },
        off: async () => {
          maintenance.enabled = false
        },
        state: async () => ({ maintenanceMode: maintenance.enabled, bufferedMessages: 3 }),
      },
    },
  )
  await app.register(async (inner) => routes(inner as unknown as FastifyLike))
  await app.ready()

  return {
    bench: b,
    intake,
    seal,
    woken,
    maintenance,
    call: async (method, url, { body, as } = {}) => {
      const answer = await app.inject({
        method,
        url,
        headers: { host: 'test', ...(as !== undefined && { authorization: `Bearer ${as}` }) },
        ...(body !== undefined && { payload: body as object }),
      })
      return { status: answer.statusCode, body: JSON.parse(answer.body) as Answered }
    },
    configure: async (queue, columns) => {
      const names = Object.keys(columns)
      await b.sql(
        `INSERT INTO spillway.mq_queues (name, created_at, ${names.join()}) VALUES ($1, now(), ${names.map((_, i) => `$${i + 2}`).join()})`,
        [queue, ...Object.values(columns)],
      )
    },
    push: async (queue, partition, messages) => {
      const id = partitionOf(queue, partition)
      const transactions = messages.map(({ transactionId }) => transactionId ?? randomUUID())
      const sealed = messages.map((message) => message.sealed === true)
      const payloads = messages.map(({ payload = null }, i) =>
        sealed[i] === true ? seal.seal(JSON.stringify(payload), id) : JSON.stringify(payload),
      )
      await b.sql('SELECT spillway.mq_pushed($1, $2, $3, $4, $5, $6, $7, $8, $9, $10, $11)', [
        [2],
        [1],
        [id],
        [queue],
        [partition],
        messages.map(() => 1),
        messages.map(() => randomUUID()),
        transactions,
        messages.map(() => null),
        sealed,
        payloads.join('\x1e'),
      ])
      return transactions
    },
    pop: async (queue, group, batch = 1, { auto = false, partitions = 1 } = {}) => {
      const lease = randomUUID()
      await b.sql(`SELECT spillway.mq_subscribe(spillway.mq_queue($1), $2, 'all', NULL)`, [queue, group])
      const [row] = await b.sql<{ parts: string[]; ix: number[]; transactions: string[]; payloads: string }>(
        `SELECT parts::text[], ix, transactions, payloads FROM spillway.mq_pop($1, NULL, NULL, NULL, $2, $3, $4, $5, $6, 'all', NULL)`,
        [queue, group, batch, partitions, auto, lease],
      )
      const ix = row?.ix ?? []
      return {
        lease,
        partitions: ix.map((i) => row?.parts[i - 1] ?? ''),
        transactions: ix.length === 0 ? [] : (row?.transactions ?? []),
        payloads: ix.length === 0 ? [] : (row?.payloads ?? '').split('\x1e'),
      }
    },
    ack: async ({ lease, partitions, transactions }, group, status = 'completed', error = 'it failed') => {
      const all = <T>(value: T): T[] => transactions.map(() => value)
      const [row] = await b.sql<{ outcomes: string[] }>('SELECT spillway.mq_ack($1, $2, $3, $4, $5, $6) AS outcomes', [
        partitions,
        all(group),
        all(lease),
        transactions,
        all(status),
        all(error),
      ])
      return row?.outcomes ?? []
    },
    close: async () => {
      await app.close()
      await b.close()
    },
  }
}

export { partitionOf }
