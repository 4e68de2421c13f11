/** Acks and leases, in the store. */
import type { AckRequest } from '@spillway/protocol/schema'
import { type AckResult, type AckStatus, queueModeGroup } from '@spillway/protocol/wire'
import { isUuid, mayUseQueue, type Tx } from 'spillway/workload'
import type { Static } from 'typebox'
import type { MessagesContext } from '../context.js'

/** The queues that a caller may use; undefined: all. */
type Queues = readonly string[] | undefined

export type Outcome = 'done' | 'retry' | 'dead' | 'skipped' | 'unknown' | 'lost'

const outcomeErrors: Readonly<Partial<Record<Outcome, string>>> = {
  unknown: 'Message not found, or not delivered to this consumer group',
  lost: 'Invalid or expired lease',
}

export interface Acknowledgment {
  transactionId: string
  partitionId: string
  status: AckStatus
  error: string | null
  group: string
  leaseId: string | null
}

export const groupOf = (name: string | null | undefined): string => name ?? queueModeGroup

export function toAck(ack: Static<typeof AckRequest>, group = ack.consumerGroup): Acknowledgment {
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

export function toResult(ack: { transactionId: string }, outcome: Outcome = 'unknown', index = 0): AckResult {
  const error = outcomeErrors[outcome] ?? null
  return { index, transactionId: ack.transactionId, success: error === null, error, dlq: outcome === 'dead' }
}

/** Replaces malformed ids; no row has this id. */
const nobody = '00000000-0000-0000-0000-000000000000'
const uuidOr = (text: string): string => (isUuid(text) ? text : nobody)

/** Outcomes in the order of the items. */
export async function writeAcks(
  query: Tx['query'],
  schema: string,
  items: readonly Acknowledgment[],
): Promise<readonly Outcome[]> {
  const { rows } = await query<{ outcomes: Outcome[] }>(`SELECT ${schema}.mq_ack($1, $2, $3, $4, $5, $6) AS outcomes`, [
    items.map(({ partitionId }) => uuidOr(partitionId)),
    items.map(({ group }) => group),
    items.map(({ leaseId }) => (leaseId === null ? null : uuidOr(leaseId))),
    items.map(({ transactionId }) => transactionId),
    items.map(({ status }) => status),
    items.map(({ error }) => error),
  ])
  return rows[0]?.outcomes ?? []
}

/** For a key that is bound to queues, other queues do not exist: their acks name no partition. */
export async function ownAcks(
  { intake, schema }: MessagesContext,
  queues: Queues,
  acks: readonly Acknowledgment[],
): Promise<readonly Acknowledgment[]> {
  if (queues === undefined) return acks
  const { rows } = await intake.read<{ id: string; name: string }>(
    `SELECT p.id, q.name FROM ${schema}.mq_partitions p JOIN ${schema}.mq_queues q ON q.id = p.queue WHERE p.id = ANY ($1)`,
    [[...new Set(acks.map(({ partitionId }) => uuidOr(partitionId)))]],
  )
  const usable = new Set(rows.filter(({ name }) => mayUseQueue(queues, name)).map(({ id }) => id))
  return acks.map((ack) => (usable.has(ack.partitionId.toLowerCase()) ? ack : { ...ack, partitionId: '' }))
}

/** Null: the lease no longer exists, or belongs to a queue that may not be used. */
export async function extendLease(
  { intake, schema }: MessagesContext,
  queues: Queues,
  leaseId: string,
  seconds: number | null,
): Promise<Date | null> {
  if (!isUuid(leaseId)) return null
  const { rows: leased } = await intake.read<{ name: string }>(
    `SELECT q.name FROM ${schema}.mq_leases l JOIN ${schema}.mq_groups g ON g.id = l.grp JOIN ${schema}.mq_queues q ON q.id = g.queue WHERE l.id = $1`,
    [leaseId],
  )
  if (!leased.some(({ name }) => mayUseQueue(queues, name))) return null
  const { rows } = await intake.statements.release<{ until: Date | null }>(
    `SELECT ${schema}.mq_extend($1, $2) AS until`,
    [leaseId, seconds],
  )
  return rows[0]?.until ?? null
}
