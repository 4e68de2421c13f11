/**
 * What the consumers were handed, and what was made of their answers. Of a group, each message is there, whole, in the order of
 * the numbers, in one hand at a time, until it is agreed to once; and then never again.
 */
import { isRecord, type Message, messagesOf } from '../answer-body.js'
import type { Ack, Call, Effect, Evidence, Pop } from '../records.js'
import { queueName, tokenOf, transactionIdOf } from '../workload.js'
import { judgeRefusal, wasPaused } from './answers.js'
import { groupBy } from './by-key.js'
import type { Finding } from './finding.js'

/** What one pop handed out of one partition. */
interface Handed {
  pop: Pop
  lane: string
  messages: readonly Message[]
}

/** The ack of one message, and the answer to it. */
interface Answer {
  ack: Ack
  transactionId: string
  leaseId: string
  status: Ack['asked'][number]['status']
  /** Null: nobody heard. */
  success: boolean | null
}

export function checkMessages(evidence: Evidence): Finding[] {
  const stored = new Map(evidence.effects.filter((e) => e.route === 'push').map((e) => [e.operation, e]))
  const handed = evidence.pops.flatMap(handedBy)
  const answers = evidence.acks.flatMap(answersOf)
  return [
    ...checkCalls(evidence),
    ...checkContent(evidence, handed, stored),
    ...evidence.consumers.groups.flatMap((group) => {
      const ofGroup = handed.filter(({ pop }) => pop.group === group)
      const answered = groupBy(
        answers.filter(({ ack }) => ack.group === group),
        (answer) => answer.transactionId,
      )
      return [
        ...checkTurns(ofGroup, stored, group),
        ...checkHands(ofGroup, answered, evidence.consumers.leaseMs),
        ...checkAgreed(ofGroup, answered, [...stored.values()], group),
        ...checkLate(ofGroup, answered, evidence.consumers.leaseMs),
      ]
    }),
  ]
}

const name = ({ pop }: Handed): string => `${pop.consumer} at ${pop.slot}`

function handedBy(pop: Pop): Handed[] {
  if (pop.end !== 'answered' || pop.status !== 200) return []
  const lanes = groupBy(messagesOf(pop.body) ?? [], (message) => message.partition)
  return [...lanes].map(([lane, messages]) => ({ pop, lane, messages }))
}

function answersOf(ack: Ack): Answer[] {
  const results: readonly unknown[] = ack.end === 'answered' && Array.isArray(ack.body) ? ack.body : []
  return ack.asked.map(({ transactionId, leaseId, status }, i) => {
    const result = results[i]
    const success = isRecord(result) && typeof result.success === 'boolean' ? result.success : null
    return { ack, transactionId, leaseId, status, success }
  })
}

/** Every request is answered in time, as it may be. */
function checkCalls(evidence: Evidence): Finding[] {
  const findings: Finding[] = []
  const pauses = evidence.faults.filter((fault) => fault.kind === 'pause')
  const judge = (made: Call & { consumer: string }, wrong: string | null): void => {
    const who = `${made.consumer} at ${made.slot}`
    if (made.end === 'deadline' && !wasPaused(made, pauses)) {
      findings.push({ rule: 'hung', detail: `${who}: no answer in ${evidence.deadlineMs} ms` })
    }
    if (made.end !== 'answered') return
    const refusal = made.status === 503 || made.status === 429 ? judgeRefusal(made) : null
    if (refusal !== null) findings.push({ rule: refusal.rule, detail: `${who}: ${refusal.detail}` })
    else if (wrong !== null) findings.push({ rule: 'answer', detail: `${who}: ${wrong}` })
  }
  const isRefusal = ({ status }: Call): boolean => status === 503 || status === 429
  const shown = ({ status, body }: Call): string => `${status} ${JSON.stringify(body)}`
  for (const pop of evidence.pops) {
    const may = isRefusal(pop) || pop.status === 204 || (pop.status === 200 && messagesOf(pop.body) !== null)
    judge(pop, may ? null : shown(pop))
  }
  for (const ack of evidence.acks) judge(ack, isRefusal(ack) || isAckAnswer(ack) ? null : shown(ack))
  return findings
}

/** One result for each, in order. */
function isAckAnswer({ status, body, asked }: Ack): boolean {
  if (status !== 200 || !Array.isArray(body) || body.length !== asked.length) return false
  const results: readonly unknown[] = body
  return results.every(
    (result, i) =>
      isRecord(result) && result.transactionId === asked[i]?.transactionId && typeof result.success === 'boolean',
  )
}

/** Nobody is handed what is not there, or what somebody else was to have. */
function checkContent(evidence: Evidence, handed: readonly Handed[], stored: ReadonlyMap<string, Effect>): Finding[] {
  const findings: Finding[] = []
  for (const one of handed) {
    for (const message of one.messages) {
      const there = stored.get(message.id)
      if (there === undefined || there.lane !== one.lane) {
        findings.push({ rule: 'unasked', detail: `${name(one)} was handed ${message.id}, which is not in ${one.lane}` })
        continue
      }
      const { lane, n } = there
      const { data } = message
      const isWhole =
        isRecord(data) && data.lane === lane && data.n === n && data.token === tokenOf(evidence.seed, lane, n)
      const isTheirs = message.queue === queueName && message.consumerGroup === one.pop.group && message.leaseId !== ''
      if (isWhole && isTheirs && message.transactionId === transactionIdOf(lane, n)) continue
      findings.push({ rule: 'answer', detail: `${name(one)}: ${lane}#${n} is ${JSON.stringify(message)}` })
    }
  }
  return findings
}

/** First deliveries are 1, 2, 3, …: none can be handed out before the one before it was answered for, or beside it. */
function checkTurns(handed: readonly Handed[], stored: ReadonlyMap<string, Effect>, group: string): Finding[] {
  const findings: Finding[] = []
  // What is not there has no number, and is another rule's matter.
  const seqsOf = (messages: readonly Message[], lane: string): number[] =>
    messages.flatMap(({ id }) => {
      const there = stored.get(id)
      return there?.lane === lane ? there.ord : []
    })
  for (const [lane, all] of groupBy(handed, (one) => one.lane)) {
    let last = 0
    for (const { messages } of all) {
      for (const seq of seqsOf(messages, lane)) {
        if (seq > last + 1) {
          findings.push({ rule: 'reordered', detail: `${group}: ${lane} came to message ${seq} behind ${last}` })
        }
        last = Math.max(last, seq)
      }
    }
    for (const { messages, pop } of all) {
      const seqs = seqsOf(messages, lane)
      if (seqs.every((seq, i) => i === 0 || seq > (seqs[i - 1] ?? 0))) continue
      findings.push({
        rule: 'reordered',
        detail: `${pop.consumer} was handed ${seqs.join(', ')} of ${lane} in one answer`,
      })
    }
  }
  return findings
}

/**
 * Who has a partition has it alone, until all is answered or the time is over. Reported only for pairs that leave no doubt: the
 * second asked when the first had its answer, and had its own before the first one's lease can have ended.
 */
function checkHands(
  handed: readonly Handed[],
  answered: ReadonlyMap<string, readonly Answer[]>,
  leaseMs: number,
): Finding[] {
  const findings: Finding[] = []
  for (const all of groupBy(handed, (one) => one.lane).values()) {
    for (const [i, second] of all.entries()) {
      for (const first of all.slice(0, i)) {
        const { endedAt } = second.pop
        if (first.pop.endedAt >= second.pop.sentAt || endedAt >= first.pop.sentAt + leaseMs) continue
        const open = first.messages.find(
          ({ transactionId, leaseId }) =>
            !(answered.get(transactionId) ?? []).some((a) => a.leaseId === leaseId && a.ack.sentAt < endedAt),
        )
        if (open === undefined) continue
        const who = `${name(second)} was handed ${second.messages[0]?.transactionId}`
        findings.push({ rule: 'two_hands', detail: `${who} while ${first.pop.consumer} had ${open.transactionId}` })
      }
    }
  }
  return findings
}

/** Once each, in the end; and then never again. */
function checkAgreed(
  handed: readonly Handed[],
  answered: ReadonlyMap<string, readonly Answer[]>,
  stored: readonly Effect[],
  group: string,
): Finding[] {
  const findings: Finding[] = []
  const agreedAt = new Map<string, number>()
  for (const { lane, n } of stored) {
    const key = transactionIdOf(lane, n)
    const agreed = (answered.get(key) ?? []).filter(
      (answer) => answer.status === 'completed' && answer.success !== false,
    )
    const heard = agreed.filter((answer) => answer.success === true)
    if (heard.length > 1) findings.push({ rule: 'doubled', detail: `${group} agreed to ${key} ${heard.length} times` })
    if (agreed.length === 0) findings.push({ rule: 'lost', detail: `${group} never agreed to ${key}` })
    if (heard.length > 0) agreedAt.set(key, Math.min(...heard.map(({ ack }) => ack.endedAt)))
  }
  for (const one of handed) {
    for (const { transactionId } of one.messages) {
      if (one.pop.sentAt <= (agreedAt.get(transactionId) ?? Number.POSITIVE_INFINITY)) continue
      findings.push({
        rule: 'doubled',
        detail: `${name(one)} was handed ${transactionId}, which ${group} had agreed to`,
      })
    }
  }
  return findings
}

/** A lease began before its messages came: who answers later than it lasts is late. */
function checkLate(
  handed: readonly Handed[],
  answered: ReadonlyMap<string, readonly Answer[]>,
  leaseMs: number,
): Finding[] {
  const findings: Finding[] = []
  for (const one of handed) {
    for (const { transactionId, leaseId } of one.messages) {
      const late = (answered.get(transactionId) ?? []).find(
        (a) => a.leaseId === leaseId && a.success === true && a.ack.sentAt > one.pop.endedAt + leaseMs,
      )
      if (late === undefined) continue
      const ms = Math.round(late.ack.sentAt - one.pop.endedAt)
      findings.push({
        rule: 'answer',
        detail: `${name(one)}: ${transactionId} was taken ${ms} ms after it was handed out`,
      })
    }
  }
  return findings
}

export interface MessageCounts {
  handed: number
  /** Beyond the first to the same group: after a failure, a lost answer, or a lease whose time was over. */
  handedAgain: number
  agreed: number
  /** Answers that came too late, or twice. */
  acksRefused: number
}

export function countMessages({ pops, acks }: Evidence): MessageCounts {
  const handed = pops.flatMap((pop) =>
    handedBy(pop).flatMap(({ messages }) => messages.map((m) => `${pop.group} ${m.id}`)),
  )
  const answers = acks.flatMap(answersOf)
  return {
    handed: handed.length,
    handedAgain: handed.length - new Set(handed).size,
    agreed: answers.filter((a) => a.status === 'completed' && a.success === true).length,
    acksRefused: answers.filter((a) => a.success === false).length,
  }
}
