/**
 * Runs accepted operations: decides a task here if there is no broker, or takes it to the broker and waits for the
 * router's answer.
 */
import type { RouteTask } from '@spillway/protocol/wire'
import { FailOperation, RetryOperation, type RunContext, traceIdOf } from 'spillway/workload'
import type { RouterBroker } from '../../brokers/nats/broker.js'
import { BrokerFault } from '../../brokers/nats/faults.js'
import { readBurial } from './burials.js'
import type { RoutingParts } from './context.js'
import { answerTask, type RouteAnswer } from './processing.js'

/** How long a worker waits in one attempt, because it holds a slot meanwhile. A retry finds an earlier decision. */
const messageMs = 10_000

type RunTask = (parts: RoutingParts, task: RouteTask, context: RunContext, text: string) => Promise<RouteAnswer>

/** Without a broker: the operation queue is the intake, and its workers are the routers. */
export const decideHere: RunTask = async (parts, task, context, text) => {
  const { metrics, signals } = parts
  const isRepeat = context.attempt > 1
  metrics.delivered.inc()
  if (isRepeat) metrics.redelivered.inc()
  signals.began()
  try {
    const traceId = traceIdOf(context.traceparent)
    const answer = await answerTask(parts, task, { text, traceId, isTicket: true, isRepeat })
    signals.ended(answer.ok ? 'ok' : 'undecided', sinceAccepted(context), true)
    return answer
  } catch (fault) {
    if (context.attempt >= context.maxAttempts) signals.ended('exhausted', sinceAccepted(context), false)
    else signals.putBack()
    throw fault
  }
}

/** Accepted with 202: the router's answer becomes the operation's result. */
export const deliver: RunTask = async (parts, task, context, text) => {
  const run = parts.broker === null ? decideHere : askRouter(parts.broker)
  const answer = await run(parts, task, context, text)
  if (!answer.ok) throw new FailOperation(`${answer.error.code}: ${answer.error.message}`, { deadLetter: true })
  return answer
}

const askRouter =
  (broker: RouterBroker): RunTask =>
  async (parts, task, context, text) => {
    const isFirst = context.attempt === 1
    // An earlier attempt may have been decided and only its answer lost: the broker would drop a second message.
    const known = isFirst ? null : await parts.decisions.find(task.tenant_id, task.request_id)
    if (known !== null) {
      return { ok: true, decision: known.decision, context: { request_id: task.request_id, trace_id: known.traceId } }
    }
    // A late first attempt may have been redriven, or returned by a process that ended.
    const isNew = isFirst && sinceAccepted(context) < messageMs
    const error = isNew ? null : await readBurial(parts, context.id, isFirst)
    if (error !== null) throw new FailOperation(error, { deadLetter: true })
    const headers = { traceparent: context.traceparent, 'Spillway-Ticket': context.id }
    try {
      const reply = await broker.ask({ data: Buffer.from(text), id: context.id, headers }, messageMs, context.signal)
      const answer = decodeAnswer(reply)
      const buried = answer.ok ? null : await readBurial(parts, context.id, false)
      if (buried !== null) throw new FailOperation(buried, { deadLetter: true })
      return answer
    } catch (fault) {
      if (!(fault instanceof BrokerFault)) throw fault
      if (fault.code === 'too_large') {
        throw new FailOperation('PAYLOAD_TOO_LARGE: more than the broker takes', { cause: fault, deadLetter: true })
      }
      throw new RetryOperation(`the broker: ${fault.code}`, { cause: fault })
    }
  }

/** The form on the broker. */
export const encodeAnswer = (answer: RouteAnswer): Uint8Array => Buffer.from(JSON.stringify(answer))
export const decodeAnswer = (data: Uint8Array): RouteAnswer => JSON.parse(Buffer.from(data).toString()) as RouteAnswer

/** The first 48 bits of the id are the time of acceptance. */
function sinceAccepted({ id }: RunContext): number {
  return Math.max(0, Date.now() - Number.parseInt(id.slice(0, 8) + id.slice(9, 13), 16))
}
