/** The evidence of a run whose messages were pushed and consumed as they should, for tests to break. */
import type { Ack, Pop, Ticket } from '../records.js'
import { queueName, tokenOf, transactionIdOf } from '../workload.js'
import { check } from './check.js'
import { add, cleanRun, idOf, made, pushResult, type Run, start, submitted } from './clean-run.js'
import type { Rule } from './finding.js'

export const lane = 'push-9'
export const group = 'mail'
export const leaseMs = 1_000
export const consumedAt = start + 500
export const server = { slot: 'server-1', pid: 2, end: 'answered', status: 200 } as const

export const message = (n: number, leaseId: string) => ({
  ...{ id: idOf(lane, n), transactionId: transactionIdOf(lane, n), queue: queueName, partition: lane },
  ...{ partitionId: idOf(lane, 0), leaseId, consumerGroup: group, data: { lane, n, token: tokenOf(7, lane, n) } },
})

export function pop(run: Run, ns: readonly number[], at: number, leaseId = `lease ${at}`): Pop {
  const body = { success: true, messages: ns.map((n) => message(n, leaseId)) }
  const popped: Pop = { ...server, consumer: 'mail-1', group, sentAt: at, endedAt: at + 5, body }
  run.pops.push(popped)
  return popped
}

export function ack(run: Run, ns: readonly number[], at: number, leaseId: string, success = true): Ack {
  const asked = ns.map((n) => ({ ...message(n, leaseId), status: 'completed' as const }))
  const body = asked.map(({ transactionId }, index) => ({ index, transactionId, success, error: null, dlq: false }))
  const acked: Ack = { ...server, consumer: 'mail-1', group, sentAt: at, endedAt: at + 5, asked, body }
  run.acks.push(acked)
  return acked
}

/** Three messages, one behind the other; a group takes 1 and 2, agrees to them, and then to 3. */
export function runWithMessages(): Run {
  const run = cleanRun()
  run.consumers = { groups: [group], leaseMs }
  for (const n of [1, 2, 3]) add(run, { lane, n, route: 'push', poison: false, at: start + n * 20 })
  pop(run, [1, 2], consumedAt, 'a')
  ack(run, [1, 2], consumedAt + 10, 'a')
  pop(run, [3], consumedAt + 20, 'b')
  ack(run, [3], consumedAt + 30, 'b')
  return run
}

export const last = <T>(list: readonly T[]): T => {
  const found = list.at(-1)
  if (found === undefined) throw new Error('nothing is there')
  return found
}
export const found = (run: Run): Rule[] => [...new Set(check(run).findings.map((finding) => finding.rule))]
export const unanswered = ({ status: _, body: __, ...asked }: Pop, end: Pop['end']): Pop => ({ ...asked, end })
export const messagesIn = ({ body }: Pop) => (body as { messages: ReturnType<typeof message>[] }).messages

/** Answered as queued, and brought by an operation that has a record. */
export function queue(run: Run, n: number): Ticket {
  const operationId = idOf('operation', n)
  const ticket: Ticket = {
    ...{
      id: operationId,
      lane,
      type: 'messages.push',
      status: 'completed',
      finishedAt: start + n * 20 + 8,
      error: null,
    },
    message: idOf(lane, n),
  }
  run.tickets.push(ticket)
  submitted(run, lane, n).operationId = operationId
  Object.assign(made(run, lane, n), {
    status: 202,
    location: `/api/v1/operations/${operationId}`,
    body: {
      ...{ status: 'queued', operationId, queuePosition: 0, reason: 'requested' },
      operations: [{ queue: queueName, partition: lane, operationId, queuePosition: 0, reason: 'requested' }],
      results: [pushResult(lane, n, 'pending')],
    },
  })
  return ticket
}
