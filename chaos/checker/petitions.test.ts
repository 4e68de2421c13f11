/** Petitions in the evidence: what may be, and what is found. */
import { describe, expect, it } from 'vitest'
import { check } from './check.js'
import { add, cleanRun, effect, made, type Run, start, submitted, ticket, without } from './clean-run.js'
import type { Rule } from './finding.js'

const lane = 'petition-9'

/** Two petitions of one submitter, one behind the other, beside the other lanes; no ticket of them is left. */
function runWithPetitions(): Run {
  const run = cleanRun()
  for (const n of [1, 2]) {
    add(run, { lane, n, route: 'petition', poison: false, at: start + n * 20 })
    run.tickets = without(run.tickets, ticket(run, lane, n))
  }
  return run
}

const found = (run: Run): Rule[] => [...new Set(check(run).findings.map((finding) => finding.rule))]

/** Sent without a key, and not answered. */
function abandon(run: Run): void {
  Object.assign(submitted(run, lane, 2), { abandoned: true, certainAt: null, operationId: null })
  Object.assign(made(run, lane, 2), { end: 'network', status: undefined, body: undefined })
}

describe('allowed values', () => {
  it('petitions that exist once, in order', () => {
    expect(check(runWithPetitions()).findings).toEqual([])
  })

  it('one without a key and without an answer, there or not', () => {
    const run = runWithPetitions()
    abandon(run)
    expect(found(run)).toEqual([])
    run.effects = without(run.effects, effect(run, lane, 2))
    expect(found(run)).toEqual([])
  })

  it('one that is moved on without a transition that was answered', () => {
    const run = runWithPetitions()
    run.petitionsMoved = [String(submitted(run, lane, 1).operationId)]
    expect(found(run)).toEqual([])
  })
})

const violations: readonly [what: string, rule: Rule, change: (run: Run) => void][] = [
  [
    'an accepted one that is not there',
    'lost',
    (run) => {
      run.effects = without(run.effects, effect(run, lane, 1))
    },
  ],
  ['one that is there twice, or has two receipts', 'doubled', (run) => run.effects.push(effect(run, lane, 1))],
  [
    'one without a key that is there twice',
    'doubled',
    (run) => {
      abandon(run)
      run.effects.push(effect(run, lane, 2))
    },
  ],
  ['one that nobody sent', 'unasked', (run) => run.effects.push({ ...effect(run, lane, 1), n: 3 })],
  [
    'two of one submitter in the wrong order',
    'reordered',
    (run) => {
      effect(run, lane, 1).ord = 1_000_000
    },
  ],
  [
    'one that was moved on, and is where it was',
    'lost',
    (run) => {
      submitted(run, lane, 1).moved = true
    },
  ],
  [
    'a receipt for another text',
    'answer',
    (run) => {
      made(run, lane, 1).body = {
        ...(made(run, lane, 2).body as object),
        petition_id: submitted(run, lane, 1).operationId,
      }
    },
  ],
  [
    'one key, two petitions',
    'idempotency',
    (run) => {
      const first = made(run, lane, 1)
      const petition_id = '00000000-0000-0000-0000-0000000000aa'
      run.tries.push({
        ...first,
        body: { ...(first.body as object), petition_id },
        location: `/api/v1/petition-submissions/${petition_id}`,
      })
    },
  ],
  ['a ledger whose chain is broken', 'audit', (run) => run.audit.push('ledger: row 5 does not follow')],
]

describe('findings', () => {
  it.each(violations)('%s', (_, rule, change) => {
    const run = runWithPetitions()
    change(run)
    expect(found(run)).toEqual([rule])
  })
})
