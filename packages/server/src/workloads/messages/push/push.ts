/**
 * Pushing: a request's messages for one partition are one submission, whose effect is the messages
 * (sql/functions/push.sql). A partition is a lane, so each submission is stored now or waits behind earlier pushes:
 *
 *   request ──by lane──► submissions ──one statement──► stored (201) │ some lane has to wait (202) │ queue full: nothing (429)
 *
 * Payloads are carried as text, from the request through the operation queue to the message (http/carried-json.ts).
 * Messages of encrypted queues are sealed here, before they are submitted, so they are also sealed in the operation queue.
 */
import type { PushRequest } from '@spillway/protocol/schema'
import { defaultPartition, type PushResult, priorities } from '@spillway/protocol/wire'
import {
  type Answer,
  CarriedJson,
  carry,
  type Definition,
  digestUuid,
  type EffectItem,
  each,
  jsonOf,
  laneOf,
  newOperationId,
  type Problem,
  pressure,
  type SubmitAllOptions,
  type Tx,
} from 'spillway/workload'
import type { Static, TUnsafe } from 'typebox'
import type { MessagesContext } from '../context.js'
import { queueProblem } from '../queues.js'

export const pushType = 'messages.push'
/** Separates payloads; JSON and base64 cannot contain it. In SQL E'\\x1e'. */
const separator = '\x1e'
/** The payloads in the queued body. */
const queuedPayloads = ['messages', each, 'payload'] as const

interface MessageBody {
  id: string
  transactionId: string
  traceId: string | null
  sealed: boolean
  payload: unknown
  /** As stored, if it has not come through the queue. */
  text?: string
}

/** The messages for one partition. */
interface PushBody {
  queue: string
  partition: string
  messages: MessageBody[]
}

interface Stored {
  ids: string[]
  duplicates: Record<string, string> | null
  failed: Record<string, string> | null
}

export type PushItem = Static<typeof PushRequest>['items'][number]

export type Pushed =
  | { kind: 'results'; results: PushResult[]; queued: QueuedPush[]; replayed: boolean }
  | { kind: 'refused'; refusal: Extract<Answer, { kind: 'refused' }>['refusal'] }

export interface QueuedPush {
  queue: string
  partition: string
  answer: Extract<Answer, { kind: 'queued' }>
}

function textOf({ text, sealed, payload }: MessageBody): string {
  if (text !== undefined) return text
  return sealed ? String(payload instanceof CarriedJson ? payload.value : payload) : jsonOf(payload)
}

/** A submission in progress. */
interface Submission {
  body: PushBody
  /** Of the messages, as JSON. */
  texts: string[]
  /** Of the messages in the request. */
  positions: number[]
}

export class Push {
  readonly #context: MessagesContext
  readonly definition: Definition<PushBody, Stored>

  constructor(context: MessagesContext) {
    this.#context = context
    // No schema: bodies are built here, of requests that their route has checked.
    this.definition = context.intake.define<TUnsafe<PushBody>, Stored>(pushType, {
      lane: ({ queue, partition }) => [queue, partition],
      gates: [pressure()],
      priority: priorities.PUSH,
      pendingMax: context.settings.pushPendingMax,
      apply: {
        function: `${context.schema}.mq_pushed`,
        prepare: (items) => this.#prepare(items),
        values: (items, queued) => this.#values(items, queued),
      },
    })
  }

  /** Why a caller with these queue patterns may not push; null if it may. */
  check(items: readonly PushItem[], queues: readonly string[] | undefined): Problem | null {
    for (const { queue } of items) {
      const problem = queueProblem(queues, queue)
      if (problem !== null) return problem
    }
    return null
  }

  /** Call when the results are durable. */
  count(results: readonly PushResult[]): void {
    for (const { status } of results) this.#context.metrics.pushed.labels(status === 'queued' ? 'stored' : status).inc()
  }

  /** With `tx`: in that transaction. */
  async push(items: readonly PushItem[], options: SubmitAllOptions, tx?: Tx): Promise<Pushed> {
    const { queues, seal } = this.#context
    const sealed = await queues.sealed(new Set(items.map(({ queue }) => queue)))
    const first = await this.#submit(items, sealed, options, tx)
    if (first.kind === 'refused') return first
    // This instance did not know yet that the queue is encrypted. Nothing was stored, and it knows now.
    const late = first.results.filter(({ code }) => code === 'encryption_required')
    if (late.length === 0 || seal === null) return first
    const again = late.flatMap(({ index }) => items[index] ?? [])
    const changed = new Set(again.map(({ queue }) => queue))
    for (const queue of changed) queues.forget(queue)
    const { idempotencyKey: _, ...rest } = options
    const second = await this.#submit(again, changed, rest, tx)
    if (second.kind === 'refused') return second
    const results = [...first.results]
    for (const [i, { index }] of late.entries()) {
      const result = second.results[i]
      if (result !== undefined) results[index] = { ...result, index }
    }
    return { kind: 'results', results, queued: [...first.queued, ...second.queued], replayed: false }
  }

  async #submit(
    items: readonly PushItem[],
    sealed: ReadonlySet<string>,
    options: SubmitAllOptions,
    tx?: Tx,
  ): Promise<Pushed> {
    if (sealed.size > 0 && this.#context.seal === null) return unsealable(items, sealed)
    // The key covers the request, not the ids that are generated here.
    const keyedOn = options.idempotencyKey === undefined ? null : (options.keyedOn ?? digestUuid(jsonOf(items)))
    // A repeated request with its key gets the same ids.
    const base = keyedOn === null ? null : `${options.identity ?? ''}\0${options.idempotencyKey}\0${keyedOn}`
    const submissions = this.#submissions(items, sealed, base)
    const answers = await this.#context.intake.submitAll(
      this.definition,
      submissions.map(({ body }) => body),
      {
        ...options,
        texts: submissions.map((submission) => this.#queuedText(submission)),
        ...(keyedOn !== null && { keyedOn }),
      },
      tx,
    )
    const refused = answers.find((answer) => answer.kind === 'refused')
    if (refused?.kind === 'refused') return refused
    const results = new Array<PushResult>(items.length)
    const queued: QueuedPush[] = []
    for (const [i, submission] of submissions.entries()) {
      const answer = answers[i]
      if (answer === undefined || answer.kind === 'refused') throw new Error(`no answer for submission ${i}`)
      if (answer.kind === 'queued') {
        queued.push({ queue: submission.body.queue, partition: submission.body.partition, answer })
      }
      this.#addResults(submission, answer, items, results)
    }
    const replayed = answers.every((answer) => answer.kind !== 'refused' && answer.replayed)
    return { kind: 'results', results, queued, replayed }
  }

  #addResults(
    { body: { queue, partition, messages }, positions }: Submission,
    answer: Exclude<Answer, { kind: 'refused' }>,
    items: readonly PushItem[],
    out: PushResult[],
  ): void {
    const stored = answer.kind === 'done' ? (answer.result as Stored) : null
    for (const [n, index] of positions.entries()) {
      const message = messages[n]
      const id = stored?.ids[n] ?? message?.id ?? ''
      const failed = answer.kind === 'failed' ? 'push_failed' : stored?.failed?.[n]
      const isDuplicate = stored?.duplicates?.[n] !== undefined
      out[index] = {
        ...resultOf({ ...items[index], queue, partition }, index, id),
        status:
          answer.kind === 'queued' ? 'pending' : failed !== undefined ? 'failed' : isDuplicate ? 'duplicate' : 'queued',
        ...(failed !== undefined && {
          code: failed,
          error: answer.kind === 'failed' ? answer.error : (reasons[failed] ?? failed),
        }),
      }
    }
  }

  #submissions(items: readonly PushItem[], sealed: ReadonlySet<string>, base: string | null): Submission[] {
    const submissions = new Map<string, Submission>()
    for (const [index, item] of items.entries()) {
      const { queue } = item
      const partition = item.partition ?? defaultPartition
      const key = `${queue}\0${partition}`
      let submission = submissions.get(key)
      if (submission === undefined) {
        submission = { body: { queue, partition, messages: [] }, texts: [], positions: [] }
        submissions.set(key, submission)
      }
      const id = base === null ? newOperationId() : digestUuid(`${base}\0${index}`)
      const message = this.#message(id, item, sealed.has(queue), laneOf([queue, partition]).id)
      submission.body.messages.push(message)
      submission.positions.push(index)
      const { transactionId, traceId } = message
      const payload = message.sealed ? JSON.stringify(message.text) : message.text
      submission.texts.push(
        `{"id":"${id}","transactionId":${JSON.stringify(transactionId)},"traceId":${JSON.stringify(traceId)},"sealed":${message.sealed},"payload":${payload}}`,
      )
    }
    return [...submissions.values()]
  }

  /** Also records sizes for pops. Messages are measured only if all of them together exceed the largest so far. */
  #queuedText({ body: { queue, partition }, texts }: Submission): string {
    const { sizes } = this.#context
    const text = `{"queue":${JSON.stringify(queue)},"partition":${JSON.stringify(partition)},"messages":[${texts.join()}]}`
    if (text.length > (sizes.largest(queue) ?? 0)) for (const { length } of texts) sizes.saw(queue, length)
    return text
  }

  #message(id: string, item: PushItem, isSealed: boolean, partitionId: string): MessageBody {
    const { seal } = this.#context
    const plain = jsonOf(item.payload ?? null)
    const text = isSealed && seal !== null ? seal.seal(plain, { partition: partitionId, id }) : plain
    return {
      id,
      transactionId: item.transactionId ?? id,
      traceId: item.traceId ?? null,
      sealed: isSealed,
      payload: isSealed ? text : item.payload,
      text,
    }
  }

  #values(items: readonly EffectItem<PushBody>[], queued: boolean) {
    if (queued) for (const { body, text } of items) carry(body, text, queuedPayloads)
    const all = items.flatMap(({ body, queue, partition }, index) =>
      body.messages.map((message) => ({
        index,
        message: queued ? this.#sealLate(message, queue, laneOf([queue, partition]).id) : message,
      })),
    )
    return [
      items.map(({ queue, partition }) => laneOf([queue, partition]).id),
      items.map(({ queue }) => queue),
      items.map(({ partition }) => partition),
      all.map(({ index }) => index + 1),
      all.map(({ message }) => message.id),
      all.map(({ message }) => message.transactionId),
      all.map(({ message }) => message.traceId),
      all.map(({ message }) => message.sealed),
      all.map(({ message }) => textOf(message)).join(separator),
      queued,
    ]
  }

  /** A queue may have been encrypted since its messages were queued. */
  async #prepare(items: readonly EffectItem<PushBody>[]): Promise<void> {
    const { seal, queues } = this.#context
    if (seal === null) return
    const plain = items.filter(({ body }) => body.messages.some(({ sealed }) => !sealed))
    if (plain.length > 0) await queues.lookUp([...new Set(plain.map(({ queue }) => queue))])
  }

  #sealLate(message: MessageBody, queue: string, partition: string): MessageBody {
    const { seal, queues } = this.#context
    if (message.sealed || seal === null || !queues.isSealed(queue)) return message
    return { ...message, sealed: true, payload: seal.seal(jsonOf(message.payload), { partition, id: message.id }) }
  }
}

/** The key was removed from the configuration: such messages are refused, never stored as plain text. */
function unsealable(items: readonly PushItem[], sealed: ReadonlySet<string>): Pushed {
  const code = 'encryption_unavailable'
  const results = items.map((item, index): PushResult => {
    const error = sealed.has(item.queue)
      ? (reasons[code] ?? code)
      : 'Nothing was stored: another item of this push cannot be encrypted.'
    return { ...resultOf(item, index, newOperationId()), status: 'failed', code, error }
  })
  return { kind: 'results', results, queued: [], replayed: false }
}

function resultOf(
  { queue, partition, transactionId, traceId }: Omit<PushItem, 'payload'>,
  index: number,
  id: string,
): Omit<PushResult, 'status'> {
  return {
    index,
    message_id: id,
    transaction_id: transactionId ?? id,
    partition_id: laneOf([queue, partition ?? defaultPartition]).id,
    trace_id: traceId ?? null,
    queueName: queue,
  }
}

const reasons: Readonly<Record<string, string>> = {
  queue_full: 'The queue holds as many messages as its maxSize allows.',
  encryption_required: 'The queue is encrypted.',
  encryption_unavailable: 'The queue is encrypted and this server has no key (SPILLWAY_ENCRYPTION_KEY).',
}
