/**
 * Pushes and acks in one transaction: all or nothing. The pushes are decided like any push; one whose lane must wait is
 * accepted into the operation queue by the same commit.
 */
import type { TransactionRequest } from '@spillway/protocol/schema'
import type { AckResult, PushResult } from '@spillway/protocol/wire'
import { type Refusal, retryConflicts, type SubmitOptions, type Tx } from 'spillway/workload'
import type { Static } from 'typebox'
import type { Messages } from '../context.js'
import type { PushItem } from '../push/push.js'
import { type Acknowledgment, type Outcome, toResult, writeAcks } from './acks.js'

export interface Transaction {
  operations: Static<typeof TransactionRequest>['operations']
  /** Of its pushes, in order. */
  items: readonly PushItem[]
  /** Of its acks, in order. */
  acks: readonly Acknowledgment[]
  leases: readonly string[]
}

export type TransactionResult =
  | ({ type: 'push'; success: boolean; transactionId: string; messageId: string; partitionId: string } & PushResult)
  | ({ type: 'ack' } & AckResult)

export type Transacted =
  | { kind: 'done'; results: TransactionResult[]; replayed: boolean }
  | { kind: 'failed'; error: string; results: TransactionResult[] }
  | { kind: 'refused'; refusal: Refusal }

/** Thrown to roll everything back. */
class Undo extends Error {
  readonly outcome: Exclude<Transacted, { kind: 'done' }>

  constructor(outcome: Exclude<Transacted, { kind: 'done' }>) {
    super('the transaction is rolled back')
    this.outcome = outcome
  }
}

/** Two transactions that lock each other's partitions deadlock; the database rolls one back, and it is retried. */
const attemptsMax = 5

export async function runTransaction(
  messages: Messages,
  transaction: Transaction,
  options: SubmitOptions,
): Promise<Transacted> {
  const { intake, push, consume } = messages
  try {
    const { results, pushed, outcomes, replayed } = await retryConflicts(attemptsMax, () =>
      intake.transaction((tx) => runSteps(messages, tx, transaction, options)),
    )
    if (!replayed) push.count(pushed)
    consume.count(outcomes)
    consume.released(transaction.acks)
    return { kind: 'done', results, replayed }
  } catch (fault) {
    if (fault instanceof Undo) return fault.outcome
    throw fault
  }
}

async function runSteps(messages: Messages, tx: Tx, transaction: Transaction, options: SubmitOptions) {
  const { operations, items, acks } = transaction
  let pushed: PushResult[] = []
  let replayed = false
  if (items.length > 0) {
    const answer = await messages.push.push(items, options, tx)
    if (answer.kind === 'refused') throw new Undo(answer)
    pushed = answer.results
    replayed = answer.replayed
  }
  // A replayed key was committed with its acks.
  const outcomes = replayed
    ? acks.map(({ status }): Outcome => (status === 'dlq' ? 'dead' : 'done'))
    : await ackWithLeases(messages, tx, transaction)
  const results = inOrder(operations, pushed, outcomes)
  const failed = results.find(({ success }) => !success)
  if (failed !== undefined) {
    const error = `${failed.type === 'ack' ? 'ACK' : 'PUSH'} operation failed: ${failed.error ?? 'refused'}`
    throw new Undo({ kind: 'failed', error, results: results.map(takenBack) })
  }
  return { results, pushed, outcomes: replayed ? [] : outcomes, replayed }
}

async function ackWithLeases({ schema }: Messages, tx: Tx, { acks, leases }: Transaction): Promise<readonly Outcome[]> {
  if (leases.length === 0) return acks.length === 0 ? [] : writeAcks(tx.query, schema, acks)
  // Locked until the commit, so that no consumer takes the messages over when the lease ends.
  const { rows } = await tx.query<{ id: string; partitions: string[] }>(
    `SELECT l.id, l.partitions FROM ${schema}.mq_leases l
     WHERE l.id::text = ANY ($1) AND l.until > ${schema}.clock() ORDER BY l.id FOR SHARE`,
    [leases.map((lease) => lease.toLowerCase())],
  )
  if (rows.length < new Set(leases).size) {
    throw new Undo({ kind: 'failed', error: 'A required lease is invalid or expired', results: [] })
  }
  // Such acks name no lease: they belong to one of these.
  const named = acks.map((ack) => ({
    ...ack,
    leaseId: ack.leaseId ?? rows.find(({ partitions }) => partitions.includes(ack.partitionId.toLowerCase()))?.id ?? '',
  }))
  return named.length === 0 ? [] : writeAcks(tx.query, schema, named)
}

/** A step that succeeded was rolled back with the others. */
function takenBack(result: TransactionResult): TransactionResult {
  if (!result.success) return result
  const error = 'Nothing was done: another operation of the transaction failed.'
  if (result.type === 'ack') return { ...result, success: false, error, dlq: false }
  return { ...result, success: false, status: 'failed', code: 'rolled_back', error }
}

function inOrder(
  operations: Transaction['operations'],
  pushed: readonly PushResult[],
  outcomes: readonly Outcome[],
): TransactionResult[] {
  const results: TransactionResult[] = []
  let pushAt = 0
  let ackAt = 0
  for (const operation of operations) {
    if (operation.type === 'push') {
      for (const _ of operation.items) {
        const result = pushed[pushAt++]
        if (result === undefined) throw new Error('a push has no result')
        results.push({
          ...result,
          type: 'push',
          index: results.length,
          success: result.status !== 'failed',
          transactionId: result.transaction_id,
          messageId: result.message_id,
          partitionId: result.partition_id,
        })
      }
    } else {
      results.push({ type: 'ack', ...toResult(operation, outcomes[ackAt++], results.length) })
    }
  }
  return results
}
