import type { OperationView, PushResult, QueuedAnswer, QueuedLane } from '@spillway/protocol/wire'
import { type CallOptions, limitsOf } from '../http/call.js'
import { type KeyOptions, keyHeader } from '../idempotency.js'
import { finishedOf, polled, restOf } from '../operations/ticket.js'
import type { QueuedOperationBehavior } from '../options.js'
import type { Parts } from '../resources.js'
import { type Address, placeOf } from './address.js'

export interface Envelope {
  payload: unknown
  /** A second message with the same id in the same partition is a duplicate and is not stored. */
  transactionId?: string
  traceId?: string
}

export interface PushItem extends Envelope {
  queue: string
  partition?: string
}

export interface PushOptions extends CallOptions, KeyOptions {
  /** Default: the client's. */
  queuedOperationBehavior?: QueuedOperationBehavior
}

/** Every message is stored or refused: see `status`. */
export interface PushedNow {
  status: 'executed'
  /** In the order of the push. */
  messages: PushResult[]
}

/** Some messages are queued, durably. Those are `pending` in `messages`. */
export interface PushedLater extends QueuedAnswer {
  operations: QueuedLane[]
  messages: PushResult[]
}

export type Pushed = PushedNow | PushedLater

const envelopeMembers = new Set(['payload', 'transactionId', 'traceId'])

/** An object with only envelope members, including `payload`, is an envelope; anything else is a payload. */
export function envelopeOf(message: unknown): Envelope {
  const isEnvelope =
    typeof message === 'object' &&
    message !== null &&
    'payload' in message &&
    Object.keys(message).every((name) => envelopeMembers.has(name))
  return isEnvelope ? (message as Envelope) : { payload: message }
}

export function itemsOf(address: Address, messages: unknown): PushItem[] {
  const place = placeOf(address)
  return (Array.isArray(messages) ? messages : [messages]).map((message) => ({ ...envelopeOf(message), ...place }))
}

export async function push(parts: Parts, items: readonly PushItem[], options: PushOptions): Promise<Pushed> {
  const rest = restOf(parts, options)
  const { body } = await parts.send({
    method: 'POST',
    path: '/api/v1/push',
    body: { items },
    headers: keyHeader(options),
    service: 'messages',
    expects: ['[]', 'results'],
    isRepeatable: true,
    ...limitsOf(options),
  })
  if (Array.isArray(body)) return { status: 'executed', messages: body as PushResult[] }
  const { results, ...queued } = body as QueuedAnswer & { operations: QueuedLane[]; results: PushResult[] }
  const later: PushedLater = { ...queued, messages: results }
  const isPolled = (options.queuedOperationBehavior ?? parts.settings.whenQueued) === 'poll'
  const first = await finishedOf(parts, later, { isPolled, ...rest })
  if (first === null) return later
  const views = await Promise.all(
    later.operations.map(({ operationId }) => (operationId === first.id ? first : polled(parts, operationId, rest))),
  )
  if (!views.every((view) => view !== null)) return later
  return { status: 'executed', messages: settled(items, later, views) }
}

/** The result of a lane's operation, by the message's index in the push to that lane. */
interface StoredLane {
  ids?: string[]
  duplicates?: Record<string, string> | null
  failed?: Record<string, string> | null
}

/** The results of pending messages, from the operations of their lanes. */
function settled(items: readonly PushItem[], later: PushedLater, views: readonly OperationView[]): PushResult[] {
  const keyOf = ({ queue, partition = 'Default' }: { queue: string; partition?: string }): string =>
    `${queue}\0${partition}`
  const lanes = new Map(later.operations.map((lane, i) => [keyOf(lane), { view: views[i], next: 0 }]))
  return later.messages.map((result) => {
    const item = items[result.index]
    const lane = item === undefined ? undefined : lanes.get(keyOf(item))
    if (result.status !== 'pending' || lane?.view === undefined) return result
    const place = lane.next++
    const { view } = lane
    if (view.status !== 'completed') {
      return { ...result, status: 'failed', code: 'push_failed', error: view.error_message ?? view.status }
    }
    const { ids, duplicates, failed } = view.result as StoredLane
    const message_id = ids?.[place] ?? result.message_id
    const code = failed?.[place]
    if (code !== undefined) return { ...result, message_id, status: 'failed', code, error: code }
    return { ...result, message_id, status: duplicates?.[place] === undefined ? 'queued' : 'duplicate' }
  })
}
