/**
 * Order, as it can be seen from outside: when one operation's acceptance was known before another was even sent, the first
 * must have taken effect before the second began to. For a client that waits for each answer this is its whole order; for
 * several clients in one lane it is all that their answers promise.
 */
import type { Delivery, Effect, Evidence, Submitted } from '../records.js'
import { groupBy, keyOf } from './by-key.js'
import type { Finding } from './finding.js'

interface Placed {
  submitted: Submitted
  /** Where its effect began, and where it was done: places in the table's or the sink's own order, or times. */
  begin: number
  done: number
}

/**
 * Two clocks of one machine are compared, one of which counts whole milliseconds; between the effects of two operations
 * of one lane there is a commit, which takes longer than this.
 */
const clockToleranceMs = 2

export function checkOrder(evidence: Evidence): Finding[] {
  const byLane = groupBy(evidence.submitted, (s) => s.lane)
  const effects = firstEffects(evidence.effects)
  const deliveries = spansOf(evidence.deliveries)
  const findings: Finding[] = []
  for (const submitted of byLane.values()) {
    const table: Placed[] = []
    const sink: Placed[] = []
    const both: Placed[] = []
    for (const one of submitted) {
      const key = keyOf(one)
      const effect = effects.get(key)
      const delivered = deliveries.get(key)
      if (effect !== undefined) {
        table.push({ submitted: one, begin: effect.ord, done: effect.ord })
        both.push({ submitted: one, begin: effect.at, done: effect.at })
      }
      if (delivered !== undefined) {
        sink.push({ submitted: one, begin: delivered.first, done: delivered.done })
        both.push({ submitted: one, begin: delivered.firstAt, done: delivered.doneAt })
      }
    }
    findings.push(...overtaken(table, 0, 'in the table'), ...overtaken(sink, 0, 'at the sink'))
    if (table.length > 0 && sink.length > 0) {
      findings.push(...overtaken(both, clockToleranceMs, 'between table and sink'))
    }
  }
  return findings
}

/** A sweep over the acceptances: the latest effect of all that were certain before this one was sent. */
function overtaken(placed: readonly Placed[], tolerance: number, where: string): Finding[] {
  const findings: Finding[] = []
  const certain = placed
    .filter((p) => p.submitted.certainAt !== null)
    .sort((a, b) => (a.submitted.certainAt ?? 0) - (b.submitted.certainAt ?? 0))
  const sent = [...placed].sort((a, b) => a.submitted.firstSentAt - b.submitted.firstSentAt)
  let next = 0
  let latest: Placed | undefined
  for (const later of sent) {
    for (; next < certain.length; next++) {
      const earlier = certain[next]
      if (earlier === undefined || (earlier.submitted.certainAt ?? 0) >= later.submitted.firstSentAt) break
      if (latest === undefined || earlier.done > latest.done) latest = earlier
    }
    if (latest === undefined || later.begin + tolerance >= latest.done || latest === later) continue
    const { submitted: first } = latest
    findings.push({
      rule: 'reordered',
      detail: `${first.lane}: ${later.submitted.n} took effect before ${first.n}, which was accepted ${(later.submitted.firstSentAt - (first.certainAt ?? 0)).toFixed(1)} ms before it was sent (${where})`,
    })
  }
  return findings
}

/** Further rows of the same operation are another rule's matter. */
function firstEffects(effects: readonly Effect[]): Map<string, Effect> {
  const found = new Map<string, Effect>()
  for (const effect of effects) {
    const known = found.get(keyOf(effect))
    if (known === undefined || effect.ord < known.ord) found.set(keyOf(effect), effect)
  }
  return found
}

interface Span {
  first: number
  firstAt: number
  done: number
  doneAt: number
}

/** From the first delivery to the first that the sink agreed to or refused for good. What is repeated later is allowed. */
function spansOf(deliveries: readonly Delivery[]): Map<string, Span> {
  const found = new Map<string, Span & { settled: boolean }>()
  for (const [index, delivery] of deliveries.entries()) {
    const settled = delivery.status !== 503
    const known = found.get(keyOf(delivery))
    if (known === undefined) {
      found.set(keyOf(delivery), { first: index, firstAt: delivery.at, done: index, doneAt: delivery.at, settled })
    } else if (!known.settled) {
      known.done = index
      known.doneAt = delivery.at
      known.settled = settled
    }
  }
  return found
}

/** Repeated deliveries behind a later operation's first: allowed after a crash, and reported as a number. */
export function countLateRepeats(deliveries: readonly Delivery[], submitted: readonly Submitted[]): number {
  const sentAt = new Map(submitted.map((s) => [keyOf(s), s.firstSentAt]))
  const newest = new Map<string, number>()
  const settled = new Set<string>()
  let repeats = 0
  for (const delivery of deliveries) {
    const key = keyOf(delivery)
    const at = sentAt.get(key) ?? 0
    const seen = newest.get(delivery.lane) ?? 0
    if (settled.has(key) && at < seen) repeats++
    if (delivery.status !== 503) settled.add(key)
    newest.set(delivery.lane, Math.max(seen, at))
  }
  return repeats
}
