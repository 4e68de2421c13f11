/**
 * Many bodies in one call. First everything is checked and validated, so that a mistake throws before anything is written.
 * Then the operations go to the store in flushes, one after the other: the process holds no more of them than the caller does.
 */

import { OptionError } from '../core/options.js'
import type { Permit } from '../gates/gate.js'
import type { Answer } from './answer.js'
import type { Refusal } from './refusal.js'
import type { PendingItem, Submission } from './submission.js'

export interface Prepared {
  submission: Submission
  pending: PendingItem
}

type Refused = Extract<Answer, { kind: 'refused' }>

/** As a flush takes them (accept/accepting.ts). In a transaction of the caller all are one flush, whatever their number. */
const flushItems = 500
const flushCharacters = 4 * 1_048_576
/** Of all bodies of a call, as JSON. */
const charactersMax = 64 * 1_048_576

export const refused = (refusal: Refusal): Refused => ({ kind: 'refused', refusal })

export interface Steps {
  call: string
  /** The gates that need no body; once for each identity. */
  enter(identity: string): Promise<Refusal | readonly Permit[]>
  /** Validates a body and makes its row. */
  prepare(submission: Submission): Promise<Prepared | Refused>
  /**
   * The caller's transaction keeps the locks of all that was written. A flush takes its locks in one order, and two flushes
   * would not: then two transactions may wait for each other.
   */
  inOneFlush?: boolean
  /** Writes up to a flush of them. */
  write(prepared: readonly Prepared[]): Promise<readonly Answer[]>
}

/** One answer per submission, in their order. */
export async function answerMany(submissions: readonly Submission[], steps: Steps): Promise<Answer[]> {
  const entered = new Map<string, Refusal | readonly Permit[]>()
  try {
    const answers = new Array<Answer>(submissions.length)
    const ready: { index: number; prepared: Prepared }[] = []
    let characters = 0
    for (const [index, submission] of submissions.entries()) {
      // Others have a turn, too.
      if (index % flushItems === flushItems - 1) await new Promise((resolve) => setImmediate(resolve))
      const { identity } = submission
      let gate = entered.get(identity)
      if (gate === undefined) {
        gate = await steps.enter(identity)
        entered.set(identity, gate)
      }
      const prepared = 'code' in gate ? refused(gate) : await steps.prepare(submission)
      if ('kind' in prepared) {
        answers[index] = prepared
        continue
      }
      characters += prepared.pending.item.payload.length
      if (characters > charactersMax) {
        throw new OptionError(
          `${steps.call}: the bodies have more than ${charactersMax} characters of JSON; nothing was written. Use several calls`,
        )
      }
      ready.push({ index, prepared })
    }
    for (const flush of steps.inOneFlush === true && ready.length > 0 ? [ready] : flushesOf(ready)) {
      const written = await steps.write(flush.map(({ prepared }) => prepared))
      for (const [i, { index }] of flush.entries()) answers[index] = written[i] ?? missing()
    }
    return answers
  } finally {
    for (const gate of entered.values()) if (!('code' in gate)) for (const permit of gate) permit.release()
  }
}

function* flushesOf<Item extends { prepared: Prepared }>(ready: readonly Item[]): Generator<readonly Item[]> {
  let from = 0
  let characters = 0
  for (const [i, { prepared }] of ready.entries()) {
    const { length } = prepared.pending.item.payload
    if (i > from && (i - from === flushItems || characters + length > flushCharacters)) {
      yield ready.slice(from, i)
      from = i
      characters = 0
    }
    characters += length
  }
  if (from < ready.length) yield ready.slice(from)
}

function missing(): never {
  throw new Error('the store gave no verdict')
}
