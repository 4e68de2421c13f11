/** Each violation, made by hand in the evidence of a clean run, is found; the clean run is clean. */
import { describe, expect, it } from 'vitest'
import type { Evidence } from '../records.js'
import { check } from './check.js'
import {
  add,
  cleanRun,
  delivery,
  effect,
  fault,
  idOf,
  made,
  perLane,
  poisoned,
  type Run,
  start,
  submitted,
  ticket,
  without,
} from './clean-run.js'
import type { Rule } from './finding.js'

const found = (run: Evidence): Rule[] => [...new Set(check(run).findings.map((finding) => finding.rule))]

describe('a clean run', () => {
  it('is clean', () => {
    expect(check(cleanRun()).findings).toEqual([])
  })

  it('may repeat deliveries under the same key, and counts them', () => {
    const run = cleanRun()
    run.deliveries.push({ ...delivery(run, 'forward-1', 2), at: start + 900 })
    expect(check(run)).toMatchObject({ findings: [], counts: { repeats: 1, lateRepeats: 1 } })
  })

  it('may deliver again what the sink refused at first', () => {
    const run = cleanRun()
    const first = delivery(run, 'forward-1', 2)
    run.deliveries.splice(run.deliveries.indexOf(first), 0, { ...first, status: 503 })
    expect(check(run)).toMatchObject({ findings: [], counts: { repeats: 0 } })
  })

  it('may have no ticket for an item applied at once', () => {
    const run = cleanRun()
    run.tickets = without(run.tickets, ticket(run, 'mixed-2', 5))
    expect(submitted(run, 'mixed-2', 5).route).toBe('apply')
    expect(found(run)).toEqual([])
  })

  it('may take effect in any order where several clients sent at the same time', () => {
    const run = cleanRun()
    for (const n of [1, 2]) add(run, { lane: 'crowd', n, route: 'tx', poison: false, at: start + 500 + n })
    const [first, second] = [effect(run, 'crowd', 1), effect(run, 'crowd', 2)]
    ;[first.ord, second.ord] = [second.ord, first.ord]
    expect(found(run)).toEqual([])
  })

  it('may leave a request without an answer while its process is stopped', () => {
    const run = cleanRun()
    run.tries.push({ ...made(run, 'tx-0', 1), end: 'deadline', sentAt: start, endedAt: start + 1_000 })
    run.faults.push(fault({ kind: 'pause', from: start + 10, to: start + 900 }))
    expect(found(run)).toEqual([])
  })
})

/** What is done to the clean run, and the only rule that notices. */
const violations: readonly [what: string, rule: Rule, change: (run: Run) => void][] = [
  [
    'an accepted operation without its row',
    'lost',
    (run) => {
      run.effects = without(run.effects, effect(run, 'tx-0', 3))
    },
  ],
  [
    'an accepted operation that was never delivered',
    'lost',
    (run) => {
      run.deliveries = without(run.deliveries, delivery(run, 'forward-1', 3))
    },
  ],
  [
    'one that the sink only ever refused',
    'lost',
    (run) => {
      delivery(run, 'forward-1', 3).status = 503
    },
  ],
  [
    'an operation that the store has no record of',
    'lost',
    (run) => {
      run.tickets = without(run.tickets, ticket(run, 'tx-0', 3))
    },
  ],
  [
    'an operation that was never finished',
    'lost',
    (run) => {
      Object.assign(ticket(run, 'tx-0', 3), { status: 'pending', finishedAt: null })
    },
  ],
  [
    'a ticket that a process does not know',
    'lost',
    (run) => {
      run.reads.push({
        lane: 'tx-0',
        n: 3,
        operationId: idOf('tx-0', 3),
        slot: 'app-1',
        at: start,
        status: 404,
        state: null,
      })
    },
  ],
  [
    'two rows in the wrong order',
    'reordered',
    (run) => {
      const [a, b] = [effect(run, 'tx-0', 2), effect(run, 'tx-0', 3)]
      ;[a.ord, b.ord] = [b.ord, a.ord]
    },
  ],
  [
    'two first deliveries in the wrong order',
    'reordered',
    (run) => {
      const [a, b] = [delivery(run, 'forward-1', 2), delivery(run, 'forward-1', 3)]
      ;[a.n, b.n, a.key, b.key] = [b.n, a.n, b.key, a.key]
    },
  ],
  [
    'a delivery before the one before it had succeeded',
    'reordered',
    (run) => {
      const first = delivery(run, 'forward-1', 2)
      run.deliveries.push({ ...first, at: start + 900 })
      first.status = 503
    },
  ],
  [
    'a row before the delivery that came before it',
    'reordered',
    (run) => {
      const row = run.effects.find(
        (e) => e.lane === 'mixed-2' && submitted(run, 'mixed-2', e.n - 1).route === 'outside',
      )
      if (row === undefined) throw new Error('no row behind a delivery')
      row.at = delivery(run, 'mixed-2', row.n - 1).at - 5
    },
  ],
  [
    'a lane of several clients, against what their answers allow',
    'reordered',
    (run) => {
      for (const n of [1, 2]) add(run, { lane: 'crowd', n, route: 'tx', poison: false, at: start + 500 + n * 50 })
      const [first, second] = [effect(run, 'crowd', 1), effect(run, 'crowd', 2)]
      ;[first.ord, second.ord] = [second.ord, first.ord]
    },
  ],
  [
    'a second row of one operation',
    'doubled',
    (run) => {
      run.effects.push({ ...effect(run, 'tx-0', 3), ord: 99 })
    },
  ],
  [
    'an operation that is recorded twice',
    'doubled',
    (run) => {
      run.tickets.push({ ...ticket(run, 'tx-0', 3) })
    },
  ],
  [
    'a row that nobody asked for',
    'unasked',
    (run) => {
      run.effects.push({ ...effect(run, 'tx-0', 3), n: 99, ord: 99 })
    },
  ],
  [
    'a delivery that nobody asked for',
    'unasked',
    (run) => {
      run.deliveries.push({ ...delivery(run, 'forward-1', 3), n: 99 })
    },
  ],
  [
    'a row of an operation that failed',
    'unasked',
    (run) => {
      run.effects.push({
        ...effect(run, 'tx-0', 3),
        n: poisoned,
        ord: effect(run, 'tx-0', 3).ord + 0.5,
        operation: idOf('tx-0', poisoned),
        at: start + 85,
      })
    },
  ],
  [
    'a row of an operation that was refused',
    'unasked',
    (run) => {
      Object.assign(submitted(run, 'mixed-2', 5), { refused: true, certainAt: null })
    },
  ],
  [
    'a row under the id of another operation',
    'unasked',
    (run) => {
      effect(run, 'tx-0', 3).operation = idOf('tx-0', 99)
    },
  ],
  [
    'an operation that no caller has an answer for',
    'unasked',
    (run) => {
      run.tickets.push({ ...ticket(run, 'tx-0', 3), id: idOf('tx-0', 99) })
    },
  ],
  [
    'a delivery without a key',
    'key',
    (run) => {
      delivery(run, 'forward-1', 3).key = null
    },
  ],
  [
    'a delivery under another key',
    'key',
    (run) => {
      delivery(run, 'forward-1', 3).key = idOf('tx-0', 99)
    },
  ],
  [
    'a repeat under another key',
    'key',
    (run) => {
      run.deliveries.push({ ...delivery(run, 'forward-1', 3), key: idOf('tx-0', 99) })
    },
  ],
  [
    'an operation that failed though it should not',
    'ended_otherwise',
    (run) => {
      ticket(run, 'tx-0', 3).status = 'failed'
    },
  ],
  [
    'a poisoned operation that is said to be completed',
    'ended_otherwise',
    (run) => {
      ticket(run, 'tx-0', poisoned).status = 'completed'
    },
  ],
  [
    "an answer with another operation's result",
    'answer',
    (run) => {
      made(run, 'tx-0', 3).body = made(run, 'tx-0', 2).body
      const { body } = made(run, 'tx-0', 3) as { body: { operationId: string } }
      made(run, 'tx-0', 3).body = { ...body, operationId: idOf('tx-0', 3) }
    },
  ],
  [
    'an executed answer for what never succeeds',
    'answer',
    (run) => {
      made(run, 'tx-0', poisoned).body = {
        ...(made(run, 'tx-0', 3).body as object),
        operationId: idOf('tx-0', poisoned),
      }
    },
  ],
  [
    'an internal error',
    'answer',
    (run) => {
      Object.assign(made(run, 'tx-0', 3), { status: 500, code: 'internal_error' })
    },
  ],
  [
    'a 202 without its Location',
    'answer',
    (run) => {
      const body = { status: 'queued', operationId: idOf('tx-0', 3), queuePosition: 0 }
      Object.assign(made(run, 'tx-0', 3), { status: 202, body })
    },
  ],
  [
    'two operations for one key',
    'idempotency',
    (run) => {
      const body = { ...(made(run, 'tx-0', 3).body as object), operationId: idOf('tx-0', 99) }
      run.tries.push({ ...made(run, 'tx-0', 3), body })
    },
  ],
  [
    'a refusal that does not say when to come back',
    'retry_after',
    (run) => {
      run.tries.push({ ...made(run, 'tx-0', 3), status: 503, code: 'overloaded', body: {} })
    },
  ],
  [
    'a refusal until a time that is no time',
    'retry_after',
    (run) => {
      run.tries.push({ ...made(run, 'tx-0', 3), status: 429, retryAfter: '0', body: { retry_after_seconds: 0 } })
    },
  ],
  [
    'a refusal that contradicts itself',
    'retry_after',
    (run) => {
      run.tries.push({ ...made(run, 'tx-0', 3), status: 503, retryAfter: '2', body: { retry_after_seconds: 3 } })
    },
  ],
  [
    'a request that was never answered',
    'hung',
    (run) => {
      run.tries.push({ ...made(run, 'tx-0', 3), end: 'deadline', endedAt: start + 1_060 })
    },
  ],
  [
    'one more than a limit allows',
    'limit',
    (run) => {
      run.rated.push({ lane: 'tx-0', limit: perLane - 2 })
    },
  ],
  [
    'a refusal though the limit was not reached',
    'limit',
    (run) => {
      run.rated.push({ lane: 'tx-0', limit: perLane })
      Object.assign(submitted(run, 'tx-0', poisoned), { refused: true })
    },
  ],
  [
    'a place that nobody gives back',
    'limit',
    (run) => {
      run.placesHeld.push({ gate: 'chaos', held: 1 })
    },
  ],
  [
    'work of a dead process that is done too late',
    'recovery',
    (run) => {
      run.faults.push(fault({ from: start + 70, held: [idOf('tx-0', 3)] }))
      ticket(run, 'tx-0', 3).finishedAt = start + 70 + 30_001
    },
  ],
  [
    'nobody accepting after PostgreSQL is back',
    'recovery',
    (run) => {
      run.faults.push(fault({ kind: 'postgres', slot: 'postgres', from: start + 3_000, to: start + 3_100 }))
      add(run, { lane: 'tx-0', n: 7, route: 'tx', poison: false, at: start + 5_100 })
    },
  ],
  [
    'a table that contradicts another',
    'audit',
    (run) => {
      run.audit.push('lane x with 2 operations is in 0 places')
    },
  ],
  [
    'a process that ended by itself',
    'process',
    (run) => {
      run.lives.push({ slot: 'app-2', pid: 2, gateway: true, upAt: start, endedAt: start, unasked: 'ended with 1' })
    },
  ],
  [
    'a process that did not end when asked',
    'process',
    (run) => {
      run.faults.push(fault({ kind: 'term', exit: { code: null, afterMs: 15_000 } }))
    },
  ],
  [
    'a queue that does not drain',
    'undrained',
    (run) => {
      run.drained = false
    },
  ],
]

describe('a violation is found, and nothing else', () => {
  it.each(violations)('%s: %s', (_, rule, change) => {
    const run = cleanRun()
    change(run)
    expect(found(run)).toEqual([rule])
  })
})

describe('times', () => {
  it('count from the last fault that hit an operation, and not while PostgreSQL is away', () => {
    const run = cleanRun()
    const held = [idOf('tx-0', 3)]
    run.faults.push(
      fault({ from: start + 100, held }),
      fault({ from: start + 40_000, held }),
      fault({ kind: 'postgres', slot: 'postgres', from: start + 50_000, to: start + 90_000 }),
    )
    ticket(run, 'tx-0', 3).finishedAt = start + 90_400
    add(run, { lane: 'tx-0', n: 7, route: 'tx', poison: false, at: start + 90_100 })
    expect(check(run)).toMatchObject({ findings: [], recovery: { redone: { count: 1, maxMs: 400 } } })
  })

  it('show how long each process took to accept again, unless something else kept it from it', () => {
    const run = cleanRun()
    run.lives.push({ slot: 'app-2', pid: 2, gateway: true, upAt: start, endedAt: null, unasked: null })
    Object.assign(made(run, 'tx-0', 1), { slot: 'app-2', pid: 2 })
    const crash = fault({ kind: 'postgres', slot: 'postgres', from: start + 5_000, to: start + 6_000 })
    run.faults.push(crash)
    add(run, { lane: 'tx-0', n: 7, route: 'tx', poison: false, at: start + 6_190 })
    add(run, { lane: 'tx-0', n: 8, route: 'tx', poison: false, at: start + 9_000 })
    Object.assign(made(run, 'tx-0', 8), { slot: 'app-2', pid: 2 })
    expect(check(run).recovery).toMatchObject({ accepting: { maxMs: 200 }, acceptingEach: { count: 2, maxMs: 3_010 } })
    expect(found(run)).toEqual(['recovery'])
    run.faults.push(fault({ kind: 'pause', slot: 'app-2', pid: 2, from: start + 6_100, to: start + 8_900 }))
    expect(found(run)).toEqual([])
    run.faults.pop()
    // One that had not accepted anything before is still starting.
    Object.assign(made(run, 'tx-0', 1), { slot: 'app-1', pid: 1 })
    expect(found(run)).toEqual([])
  })

  it('show which kills hit a process that held work', () => {
    const run = cleanRun()
    run.faults.push(fault({ held: [idOf('tx-0', 1)] }), fault({ held: [] }), fault({ kind: 'postgres', held: null }))
    expect(check(run).counts).toMatchObject({ kills: 3, killsOfHolders: 1 })
  })
})
