/** What tests of messages say to a real server, and what they look at beside its answers: its tables. */
import pg from 'pg'
import { expect } from 'vitest'
import { type Answer, type Body, call, get, post, until } from './server-process.js'

type Server = { origin: string }
type Headers = Record<string, string>
type Members = Record<string, unknown>

export interface PushItem {
  queue: string
  partition?: string | null
  payload?: unknown
  transactionId?: string | null
  traceId?: string | null
  [member: string]: unknown
}

export interface PushResult {
  index: number
  message_id: string
  transaction_id: string
  queueName: string
  status: 'queued' | 'duplicate' | 'failed' | 'pending'
  code?: string
  error?: string
}

export interface Message {
  id: string
  transactionId: string
  traceId: string | null
  queue: string
  partition: string
  partitionId: string
  leaseId: string
  consumerGroup: string
  data: unknown
  createdAt: string
  retryCount: number
  namespace: string | null
  task: string | null
}

export interface AckResult {
  index: number
  transactionId: string
  success: boolean
  error: string | null
  dlq: boolean
}

export interface QueuedOperation {
  queue: string
  partition: string
  operationId: string
  queuePosition: number
  reason: string
}

export interface PopOptions {
  partition?: string
  batch?: number
  wait?: boolean
  timeout?: number
  consumerGroup?: string
  autoAck?: boolean
  partitions?: number
  subscriptionMode?: string
  subscriptionFrom?: string
  namespace?: string
  task?: string
}

/** For tests in which a push has to run at once, on whatever machine: nothing short of a full pool reads as busy. */
export const calm = { SPILLWAY_ACCEPT_WAIT_BUDGET_MS: '60000', SPILLWAY_BUSY_QUEUE_ABOVE: '1' }
export const later: Headers = { prefer: 'respond-async' }

export const configure = (server: Server, queue: string, options: Members = {}, more: Members = {}) =>
  post(server, '/api/v1/configure', { queue, options, ...more })

export const push = (server: Server, items: readonly unknown[], headers: Headers = {}) =>
  post(server, '/api/v1/push', { items }, headers)

export const pushResults = ({ body }: Answer): PushResult[] =>
  (Array.isArray(body) ? body : body.results) as unknown as PushResult[]

/** All of them are stored when this is answered. */
export async function pushed(server: Server, items: readonly PushItem[], headers: Headers = {}): Promise<PushResult[]> {
  const answer = await push(server, items, headers)
  expect(answer.status, answer.text).toBe(201)
  return pushResults(answer)
}

export function popPath(queue: string | null, { partition, ...query }: PopOptions = {}): string {
  const where = queue === null ? '' : `/queue/${encodeURIComponent(queue)}`
  const at = partition === undefined ? '' : `/partition/${encodeURIComponent(partition)}`
  const pairs = Object.entries(query).map(([name, value]): [string, string] => [name, String(value)])
  return `/api/v1/pop${where}${at}?${new URLSearchParams(pairs)}`
}

export const pop = (server: Server, queue: string | null, options: PopOptions = {}, timeoutMs?: number) =>
  call(server, 'GET', popPath(queue, options), timeoutMs === undefined ? {} : { timeoutMs })

export const messagesOf = ({ body }: Answer): Message[] => (body.messages ?? []) as Message[]

/** The messages available now; empty if there are none. Retries as a client would when the answer asks for it. */
export async function take(server: Server, queue: string | null, options: PopOptions = {}): Promise<Message[]> {
  const answer = await until('a pop that is not refused', async () => {
    const given = await pop(server, queue, options)
    return given.status !== 503 && given
  })
  expect([200, 204], answer.text).toContain(answer.status)
  return messagesOf(answer)
}

/** The first messages that come: what is due by time alone is asked for until it is there. */
export const takeSome = (server: Server, queue: string, options: PopOptions = {}, ms = 15_000) =>
  until(
    `messages of ${queue}`,
    async () => {
      const found = await take(server, queue, options)
      return found.length > 0 && found
    },
    ms,
  )

/** Takes and settles until `count` have come and there is no more. */
export async function takeAll(server: Server, queue: string, count: number, options: PopOptions = {}, ms = 30_000) {
  const seen: Message[] = []
  await until(
    `${count} messages of ${queue}`,
    async () => {
      const found = await take(server, queue, { autoAck: true, batch: 200, partitions: 100, ...options })
      seen.push(...found)
      return found.length === 0 && seen.length >= count
    },
    ms,
  ).catch((fault: unknown) => Promise.reject(new Error(`There were ${seen.length} of ${count}.`, { cause: fault })))
  return seen
}

export const ackOf = ({ transactionId, partitionId, leaseId, consumerGroup }: Message, more: Members = {}) => ({
  ...{ transactionId, partitionId, leaseId, consumerGroup },
  ...{ status: 'completed', ...more },
})

export const ack = async (server: Server, message: Message, more: Members = {}): Promise<AckResult> =>
  (await post(server, '/api/v1/ack', ackOf(message, more))).body as unknown as AckResult

export async function acked(server: Server, messages: readonly Message[], more: Members = {}): Promise<void> {
  const results = await ackBatch(
    server,
    messages.map((message) => ackOf(message, more)),
  )
  expect(results.filter(({ success }) => !success)).toEqual([])
}

export async function ackBatch(server: Server, acknowledgments: readonly Members[], more: Members = {}) {
  const answer = await post(server, '/api/v1/ack/batch', { ...more, acknowledgments })
  expect(answer.status, answer.text).toBe(200)
  return answer.body as unknown as AckResult[]
}

export const transaction = (
  server: Server,
  operations: readonly unknown[],
  more: Members = {},
  headers: Headers = {},
) => post(server, '/api/v1/transaction', { operations, ...more }, headers)

export const extend = (server: Server, leaseId: string, seconds?: number) =>
  post(server, `/api/v1/lease/${leaseId}/extend`, seconds === undefined ? undefined : { seconds })

export const pauseLane = (server: Server, queue: string, partition?: string) =>
  post(server, '/api/v1/lanes/pause', { queue, ...(partition !== undefined && { partition }) })
export const resumeLane = (server: Server, queue: string, partition?: string) =>
  post(server, '/api/v1/lanes/resume', { queue, ...(partition !== undefined && { partition }) })

export const operationsOf = ({ body }: Answer): QueuedOperation[] => body.operations as QueuedOperation[]

/** Every operation that a 202 lists has ended. */
export async function drained(server: Server, answer: Answer, ms = 20_000): Promise<void> {
  for (const { operationId } of operationsOf(answer)) {
    await until(
      `operation ${operationId} is completed`,
      async () => ((await get(server, `/api/v1/operations/${operationId}?wait=1`)).body as Body).status === 'completed',
      ms,
    )
  }
}

export const dataOf = (messages: readonly Message[]): unknown[] => messages.map(({ data }) => data)

/** A plain connection to the server's database. */
export interface MessageTables {
  query<Row extends Record<string, unknown>>(text: string, values?: unknown[]): Promise<Row[]>
  /** How many messages, leases and waiting operations there are. */
  counts(): Promise<{ messages: number; leases: number; operations: number }>
  /** Holds up every push after it has its place and before it is stored, until `release`. */
  holdPushes(): Promise<{ release(): Promise<void> }>
  /** A transaction of its own, which is never committed. */
  begin(): Promise<{
    query(text: string, values?: unknown[]): Promise<{ rows: Record<string, unknown>[] }>
    rollback(): Promise<void>
  }>
  close(): Promise<void>
}

export function openMessageTables(url: string, schema = 'spillway'): MessageTables {
  const pool = new pg.Pool({ connectionString: url, max: 3, options: `-c search_path=${schema}` })
  pool.on('error', () => undefined)
  const query = async <Row extends Record<string, unknown>>(text: string, values: unknown[] = []) =>
    (await pool.query<Row>(text, values)).rows
  // What a failed test left open would hold up everybody else.
  const open = new Set<{ rollback(): Promise<void> }>()
  const begin = async () => {
    const client = await pool.connect()
    await client.query('BEGIN')
    const held = {
      query: (text: string, values: unknown[] = []) => client.query(text, values),
      rollback: async () => {
        if (!open.delete(held)) return
        await client.query('ROLLBACK')
        client.release()
      },
    }
    open.add(held)
    return held
  }
  return {
    query,
    counts: async () => {
      const [row] = await query<{ messages: number; leases: number; operations: number }>(
        `SELECT (SELECT count(*)::int FROM mq_messages) AS messages, (SELECT count(*)::int FROM mq_leases) AS leases,
           (SELECT count(*)::int FROM ops) AS operations`,
      )
      return row ?? { messages: -1, leases: -1, operations: -1 }
    },
    holdPushes: async () => {
      const held = await begin()
      await held.query('LOCK TABLE mq_messages IN SHARE MODE')
      return { release: held.rollback }
    },
    begin,
    close: async () => {
      for (const client of [...open]) await client.rollback()
      await pool.end()
    },
  }
}
