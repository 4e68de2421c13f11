/** Messages in the evidence, pushed and consumed: what may be, and what is found. */
import { describe, expect, it } from 'vitest'
import type { Ack, Pop, Ticket } from '../records.js'
import { queueName, tokenOf, transactionIdOf } from '../workload.js'
import { check } from './check.js'
import {
  add,
  cleanRun,
  effect,
  fault,
  idOf,
  made,
  pushResult,
  type Run,
  start,
  submitted,
  without,
} from './clean-run.js'
import type { Rule } from './finding.js'

const lane = 'push-9'
const group = 'mail'
const leaseMs = 1_000
const consumedAt = start + 500
const server = { slot: 'server-1', pid: 2, end: 'answered', status: 200 } as const

const message = (n: number, leaseId: string) => ({
  ...{ id: idOf(lane, n), transactionId: transactionIdOf(lane, n), queue: queueName, partition: lane },
  ...{ partitionId: idOf(lane, 0), leaseId, consumerGroup: group, data: { lane, n, token: tokenOf(7, lane, n) } },
})

function pop(run: Run, ns: readonly number[], at: number, leaseId = `lease ${at}`): Pop {
  const body = { success: true, messages: ns.map((n) => message(n, leaseId)) }
  const popped: Pop = { ...server, consumer: 'mail-1', group, sentAt: at, endedAt: at + 5, body }
  run.pops.push(popped)
  return popped
}

function ack(run: Run, ns: readonly number[], at: number, leaseId: string, success = true): Ack {
  const asked = ns.map((n) => ({ ...message(n, leaseId), status: 'completed' as const }))
  const body = asked.map(({ transactionId }, index) => ({ index, transactionId, success, error: null, dlq: false }))
  const acked: Ack = { ...server, consumer: 'mail-1', group, sentAt: at, endedAt: at + 5, asked, body }
  run.acks.push(acked)
  return acked
}

/** Three messages, one behind the other; a group takes 1 and 2, agrees to them, and then to 3. */
function runWithMessages(): Run {
  const run = cleanRun()
  run.consumers = { groups: [group], leaseMs }
  for (const n of [1, 2, 3]) add(run, { lane, n, route: 'push', poison: false, at: start + n * 20 })
  pop(run, [1, 2], consumedAt, 'a')
  ack(run, [1, 2], consumedAt + 10, 'a')
  pop(run, [3], consumedAt + 20, 'b')
  ack(run, [3], consumedAt + 30, 'b')
  return run
}

const last = <T>(list: readonly T[]): T => {
  const found = list.at(-1)
  if (found === undefined) throw new Error('nothing is there')
  return found
}
const found = (run: Run): Rule[] => [...new Set(check(run).findings.map((finding) => finding.rule))]
const messagesIn = ({ body }: Pop) => (body as { messages: ReturnType<typeof message>[] }).messages

/** Answered as queued, and brought by an operation that has a record. */
function queue(run: Run, n: number): Ticket {
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

describe('what may be', () => {
  it('messages that are there once, in order, and consumed', () => {
    expect(check(runWithMessages())).toMatchObject({
      findings: [],
      counts: { handed: 3, handedAgain: 0, agreed: 3, acksRefused: 0 },
    })
  })

  it('one that was queued first', () => {
    const run = runWithMessages()
    queue(run, 2)
    expect(found(run)).toEqual([])
  })

  it('an operation whose answer was lost, and which is known by its message', () => {
    const run = runWithMessages()
    const { id, lane: where, type, status, finishedAt, error, message: brought } = queue(run, 2)
    run.tickets = [
      ...without(run.tickets, last(run.tickets)),
      { id, lane: where, type, status, finishedAt, error, message: brought },
    ]
    Object.assign(made(run, lane, 2), { status: 201, body: [pushResult(lane, 2)] })
    submitted(run, lane, 2).operationId = null
    expect(found(run)).toEqual([])
  })

  it('one without a key that was sent again, and was there already', () => {
    const run = runWithMessages()
    submitted(run, lane, 2).keyed = false
    run.tickets.push({ ...queue(run, 2), id: idOf('operation', 99) })
    run.tries.push({ ...made(run, lane, 2), status: 201, body: [pushResult(lane, 2, 'duplicate')] })
    expect(found(run)).toEqual([])
  })

  it('one that was handed out again when its lease was over, or its answer was not heard', () => {
    const run = runWithMessages()
    Object.assign(last(run.acks), { end: 'network', status: undefined, body: undefined })
    pop(run, [3], consumedAt + 20 + leaseMs, 'c')
    ack(run, [3], consumedAt + 30 + leaseMs, 'c')
    expect(check(run)).toMatchObject({ findings: [], counts: { handed: 4, handedAgain: 1 } })
  })

  it('one that failed, and was handed out again behind those that came with it', () => {
    const run = runWithMessages()
    const first = run.acks[0]
    run.pops.splice(1, 0, { ...pop(run, [1], consumedAt + 16, 'c') })
    run.pops.pop()
    Object.assign(first?.asked[0] ?? {}, { status: 'failed' })
    ack(run, [1], consumedAt + 18, 'c')
    expect(found(run)).toEqual([])
  })

  it('an answer that is refused because it comes too late', () => {
    const run = runWithMessages()
    ack(run, [3], consumedAt + 30 + leaseMs, 'b', false)
    expect(check(run)).toMatchObject({ findings: [], counts: { acksRefused: 1 } })
  })

  it('consumers that find nothing, are refused for now, or leave', () => {
    const run = runWithMessages()
    const asked = pop(run, [], consumedAt + 50)
    Object.assign(asked, { status: 204, body: '' })
    run.pops.push({ ...asked, status: 503, code: 'overloaded', retryAfter: '2', body: { retry_after_seconds: 2 } })
    run.pops.push({ ...asked, end: 'cut', status: undefined })
    expect(found(run)).toEqual([])
  })

  it('a consumer without an answer while its server is stopped', () => {
    const run = runWithMessages()
    run.pops.push({ ...last(run.pops), end: 'deadline', status: undefined })
    run.faults.push(fault({ kind: 'pause', pid: server.pid, from: consumedAt, to: consumedAt + 900 }))
    expect(found(run)).toEqual([])
  })
})

const violations: readonly [what: string, rule: Rule, change: (run: Run) => void][] = [
  [
    'a push whose message is there under another id',
    'unasked',
    (run) => {
      const id = idOf(lane, 77)
      effect(run, lane, 3).operation = id
      for (const popped of run.pops) for (const one of messagesIn(popped)) if (one.data.n === 3) one.id = id
    },
  ],
  [
    'two messages in the wrong order',
    'reordered',
    (run) => {
      // Read in the order of their numbers, which is not that in which they were sent.
      Object.assign(effect(run, lane, 1), { ord: 2 })
      Object.assign(effect(run, lane, 2), { ord: 1 })
      messagesIn(run.pops[0] ?? last(run.pops)).reverse()
    },
  ],
  [
    'an operation that was told of, without a record',
    'lost',
    (run) => {
      run.tickets = without(run.tickets, queue(run, 2))
    },
  ],
  [
    'an operation that brought a message that is not there',
    'unasked',
    (run) => {
      run.tickets.push({ ...queue(run, 2), id: idOf('operation', 99), message: idOf(lane, 99) })
    },
  ],
  [
    'two operations for one key',
    'doubled',
    (run) => {
      run.tickets.push({ ...queue(run, 2), id: idOf('operation', 99) })
    },
  ],
  [
    'a push that failed',
    'answer',
    (run) => {
      made(run, lane, 2).body = [pushResult(lane, 2, 'failed')]
    },
  ],
  [
    'a repetition that is stored under a key',
    'answer',
    (run) => {
      made(run, lane, 2).body = [pushResult(lane, 2, 'duplicate')]
    },
  ],
  [
    'a result for another message',
    'answer',
    (run) => {
      made(run, lane, 2).body = [{ ...pushResult(lane, 2), transaction_id: transactionIdOf(lane, 1) }]
    },
  ],
  [
    'a push that waits for an operation which is not told',
    'answer',
    (run) => {
      queue(run, 2)
      Object.assign(made(run, lane, 2).body as object, { operations: [] })
    },
  ],
  [
    'one key, two messages',
    'idempotency',
    (run) => {
      run.tries.push({ ...made(run, lane, 2), body: [{ ...pushResult(lane, 2), message_id: idOf(lane, 99) }] })
    },
  ],
  [
    'one key, two operations that were told',
    'idempotency',
    (run) => {
      queue(run, 2)
      const first = made(run, lane, 2)
      const operationId = idOf('operation', 99)
      const operations = [{ queue: queueName, partition: lane, operationId, queuePosition: 0, reason: 'requested' }]
      const body = { ...(first.body as object), operationId, operations }
      run.tries.push({ ...first, body, location: `/api/v1/operations/${operationId}` })
    },
  ],
  [
    'a message that a group never agreed to',
    'lost',
    (run) => {
      run.acks = without(run.acks, last(run.acks))
    },
  ],
  [
    'one that another group alone agreed to',
    'lost',
    (run) => {
      run.consumers = { groups: [group, 'archive'], leaseMs }
      for (const popped of [...run.pops])
        run.pops.push({ ...popped, group: 'archive', body: theirs(popped, 'archive') })
      for (const acked of run.acks.slice(0, 1)) run.acks.push({ ...acked, group: 'archive' })
    },
  ],
  [
    'one of which the answer was refused, and nothing came of it',
    'lost',
    (run) => {
      Object.assign(last(run.acks), { body: [{ index: 0, transactionId: transactionIdOf(lane, 3), success: false }] })
    },
  ],
  [
    'one that counted twice',
    'doubled',
    (run) => {
      ack(run, [3], consumedAt + 40, 'b')
    },
  ],
  [
    'one that is handed out when it was agreed to',
    'doubled',
    (run) => {
      pop(run, [3], consumedAt + 60, 'c')
    },
  ],
  [
    'one that was passed by',
    'reordered',
    (run) => {
      messagesIn(run.pops[0] ?? last(run.pops)).pop()
    },
  ],
  [
    'one answer with messages in the wrong order',
    'reordered',
    (run) => {
      messagesIn(run.pops[0] ?? last(run.pops)).reverse()
    },
  ],
  [
    'one that is not there',
    'unasked',
    (run) => {
      messagesIn(last(run.pops)).push({ ...message(4, 'b') })
    },
  ],
  [
    'one of another partition',
    'unasked',
    (run) => {
      run.pops.push({
        ...last(run.pops),
        sentAt: consumedAt,
        body: { messages: [{ ...message(3, 'b'), partition: 'push-8' }] },
      })
    },
  ],
  [
    "another's content",
    'answer',
    (run) => {
      Object.assign(messagesIn(last(run.pops))[0] ?? {}, { data: { lane, n: 2, token: tokenOf(7, lane, 2) } })
    },
  ],
  [
    "another group's message",
    'answer',
    (run) => {
      Object.assign(messagesIn(last(run.pops))[0] ?? {}, { consumerGroup: 'archive' })
    },
  ],
  [
    'messages without an answer that names them',
    'answer',
    (run) => {
      run.pops.push({ ...last(run.pops), body: { success: true, messages: [] } })
    },
  ],
  [
    'a pop that fails',
    'answer',
    (run) => {
      run.pops.push({ ...last(run.pops), status: 500, body: {} })
    },
  ],
  [
    'an ack with fewer results than there were messages',
    'answer',
    (run) => {
      run.acks.push({ ...last(run.acks), body: [] })
    },
  ],
  [
    'an answer that counts when its lease is over',
    'answer',
    (run) => {
      last(run.acks).sentAt = last(run.pops).endedAt + leaseMs + 1
    },
  ],
  [
    'a refused consumer who is not told when to come again',
    'retry_after',
    (run) => {
      run.pops.push({ ...last(run.pops), status: 503, code: 'overloaded', body: {} })
    },
  ],
  [
    'a consumer who gets no answer',
    'hung',
    (run) => {
      run.pops.push({ ...last(run.pops), end: 'deadline', status: undefined })
    },
  ],
  [
    'a partition that two have at once',
    'two_hands',
    (run) => {
      const first = run.pops[0] ?? last(run.pops)
      run.pops.splice(1, 0, {
        ...first,
        sentAt: consumedAt + 6,
        endedAt: consumedAt + 9,
        body: theirs(first, group, 'c'),
      })
    },
  ],
  [
    'something that is left to read',
    'undrained',
    (run) => {
      run.consumed = false
    },
  ],
  [
    'a partition with a gap',
    'audit',
    (run) => run.audit.push('messages: push-9 has 2 messages from 1 to 3, behind 0 and up to 3'),
  ],
]

function theirs(popped: Pop, consumerGroup: string, leaseId?: string) {
  const messages = messagesIn(popped).map((one) => ({ ...one, consumerGroup, leaseId: leaseId ?? one.leaseId }))
  return { success: true, messages }
}

describe('what is found', () => {
  it.each(violations)('%s', (_, rule, change) => {
    const run = runWithMessages()
    change(run)
    expect(found(run)).toEqual([rule])
  })
})
