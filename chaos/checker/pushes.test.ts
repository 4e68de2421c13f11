/** Pushes in the evidence: what may be answered and stored, and what is found. */
import { describe, expect, it } from 'vitest'
import { queueName, transactionIdOf } from '../workload.js'
import { found, lane, last, messagesIn, queue, runWithMessages } from './clean-messages.js'
import { effect, idOf, made, pushResult, type Run, submitted, without } from './clean-run.js'
import type { Rule } from './finding.js'

describe('allowed values', () => {
  it('one that was queued first', () => {
    const run = runWithMessages()
    queue(run, 2)
    expect(found(run)).toEqual([])
  })

  it('an operation whose answer was lost, and which is known by its message', () => {
    const run = runWithMessages()
    queue(run, 2)
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
    'an operation in an answer, without a record',
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
    'a push that waits for an operation which is not in the answer',
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
    'one key, two operations in the answers',
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
]

describe('findings', () => {
  it.each(violations)('%s', (_, rule, change) => {
    const run = runWithMessages()
    change(run)
    expect(found(run)).toEqual([rule])
  })
})
