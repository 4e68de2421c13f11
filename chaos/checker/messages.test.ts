/** Consumers in the evidence: what they may receive as messages and answers, and what is found. */
import { describe, expect, it } from 'vitest'
import type { Pop } from '../records.js'
import { tokenOf, transactionIdOf } from '../workload.js'
import { check } from './check.js'
import {
  ack,
  consumedAt,
  found,
  group,
  lane,
  last,
  leaseMs,
  message,
  messagesIn,
  pop,
  runWithMessages,
  server,
  unanswered,
} from './clean-messages.js'
import { fault, type Run, without } from './clean-run.js'
import type { Rule } from './finding.js'

describe('allowed values', () => {
  it('messages that exist once, in order, and consumed', () => {
    expect(check(runWithMessages())).toMatchObject({
      findings: [],
      counts: { handed: 3, handedAgain: 0, agreed: 3, acksRefused: 0 },
    })
  })

  it('one that was handed out again when its lease was over, or its answer was not heard', () => {
    const run = runWithMessages()
    Object.assign(last(run.acks), { end: 'network', status: undefined, body: undefined })
    pop(run, [3], consumedAt + 20 + leaseMs, 'c')
    ack(run, [3], consumedAt + 30 + leaseMs, 'c')
    expect(check(run)).toMatchObject({ findings: [], counts: { handed: 4, handedAgain: 1 } })
  })

  it('one that failed, and was redelivered after its batch', () => {
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
    run.pops.push(unanswered(asked, 'cut'))
    expect(found(run)).toEqual([])
  })

  it('a consumer without an answer while its server is stopped', () => {
    const run = runWithMessages()
    run.pops.push(unanswered(last(run.pops), 'deadline'))
    run.faults.push(fault({ kind: 'pause', pid: server.pid, from: consumedAt, to: consumedAt + 900 }))
    expect(found(run)).toEqual([])
  })
})

const violations: readonly [what: string, rule: Rule, change: (run: Run) => void][] = [
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
    'a refused consumer without a time to come again',
    'retry_after',
    (run) => {
      run.pops.push({ ...last(run.pops), status: 503, code: 'overloaded', body: {} })
    },
  ],
  [
    'a consumer who gets no answer',
    'hung',
    (run) => {
      run.pops.push(unanswered(last(run.pops), 'deadline'))
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

describe('findings', () => {
  it.each(violations)('%s', (_, rule, change) => {
    const run = runWithMessages()
    change(run)
    expect(found(run)).toEqual([rule])
  })
})
