/** Pops and acks: both go to the store in batches, each on their own connections. */
import { randomUUID } from 'node:crypto'
import type { AckStatus } from '@spillway/protocol/wire'
import { codeOf, Flush, ProblemError, retryConflicts } from 'spillway/workload'
import type { Hold } from '../../../traffic/buffer-budget.js'
import { deadline } from '../../../traffic/deadline.js'
import type { MessagesContext } from '../context.js'
import { SealError, type SealedRow } from '../seal.js'
import { type Acknowledgment, type Outcome, writeAcks } from './acks.js'
import { Arrivals, markOf, type NamedTarget } from './arrivals.js'

export interface PopRequest {
  /** The identity whose share of the buffers the answer uses. */
  identity: string
  queue: string | null
  namespace: string | null
  task: string | null
  partition: string | null
  group: string
  batch: number
  partitions: number
  autoAck: boolean
  /** Where a new group starts. */
  mode: 'all' | 'new' | 'time'
  from: string | null
}

/** The caller of a pop. */
export interface PopClient {
  /** No answer can reach it. */
  isCut(): boolean
  /** Also fires when the client half-closes. */
  goneSignal(): AbortSignal
}

export interface PoppedMessage {
  id: string
  transactionId: string
  traceId: string | null
  partition: string
  partitionId: string
  /** JSON; null: it cannot be decrypted. */
  data: string | null
  createdAt: string
  retryCount: number
}

export interface Popped {
  queue: string
  namespace: string | null
  task: string | null
  group: string
  /** Empty: the messages are already settled. */
  leaseId: string
  /** Settle after reading: a sealed payload may fail to open. */
  settles: boolean
  messages: PoppedMessage[]
}

/** The popped messages with their reserved space, which must be bound to the answer or released. */
export interface HandedOut {
  popped: Popped
  space: Hold
}

/** A pop being sent to the store. */
interface Taking extends PopRequest {
  lease: string
  /** The space for its answer. */
  bytes: number
}

interface PopRow extends Record<string, unknown> {
  queue: string | null
  namespace: string | null
  task: string | null
  parts: string[]
  names: string[]
  ix: number[]
  ids: string[]
  transactions: string[]
  traces: (string | null)[]
  sealed: boolean[]
  payloads: string
  created_ms: number[]
  tries: number[]
  due_ms: number | null
  leased: boolean
  more: boolean
  missing: number[] | null
}

interface Found {
  popped: Popped | null
  /** When a message may be due. */
  dueMs: number | null
  /** So far only expired messages were found. */
  more: boolean
  /** Queues that the group has not joined yet. */
  missing: readonly number[]
}

const separator = '\x1e'
const flushItemsMax = 64
/** Payload bytes in the answer to one statement; pops beyond that are sent again. */
const flushBytesMax = 16 * 1_048_576
const ackItemsMax = 2_000
const waitingMax = 10_000
const flushTimeoutMs = 5_000
const attemptsMax = 5
const partitionsKnownMax = 100_000
const uuidCharacters = 36

export class Consume {
  readonly #context: MessagesContext
  readonly #pops: Flush<Taking, Found>
  readonly #acks: Flush<readonly Acknowledgment[], readonly Outcome[]>
  /** Queues by partition, for partitions popped here. */
  readonly #queueOf = new Map<string, string>()
  readonly arrivals: Arrivals

  constructor(context: MessagesContext) {
    this.#context = context
    const bounds = {
      isPoison: (fault: unknown) => codeOf(fault) === 'data',
      bytesMax: flushBytesMax,
      waitingMax,
      timeoutMs: flushTimeoutMs,
      timeoutFault: () =>
        new ProblemError({ code: 'store_unavailable', detail: 'The store did not answer in time. Try again later.' }),
    }
    this.#pops = new Flush({
      ...bounds,
      write: (all) => retryConflicts(attemptsMax, () => this.#take(all)),
      // All answers of one statement are in memory together.
      sizeOf: ({ bytes }) => bytes,
      itemsMax: flushItemsMax,
    })
    this.#acks = new Flush({
      ...bounds,
      write: (units) => retryConflicts(attemptsMax, () => this.#answer(units)),
      sizeOf: (unit) => unit.length * 200,
      countOf: (unit) => unit.length,
      itemsMax: ackItemsMax,
    })
    this.arrivals = new Arrivals({
      due: (targets) => this.#due(targets),
      onFault: (fault) => context.log.warn({ err: fault }, 'could not look for messages, retrying'),
      onWaiting: (count) => context.metrics.waiting.set(count),
    })
  }

  get isFull(): boolean {
    return this.#pops.isFull
  }

  /** Null: nothing arrived within `waitMs`; with 0 it checks once. */
  async pop(request: PopRequest, waitMs: number, client: PopClient): Promise<HandedOut | null> {
    if (waitMs === 0) return (await this.#look(request, client.isCut, client.goneSignal)).handedOut
    const gone = client.goneSignal()
    const { signal: over, clear } = deadline(waitMs, gone)
    try {
      return await this.#waitFor(request, over, client.isCut, gone)
    } finally {
      clear()
    }
  }

  /** The first check is answered even if the client half-closes meanwhile; later ones take nothing then. */
  async #waitFor(
    request: PopRequest,
    over: AbortSignal,
    isCut: () => boolean,
    gone: AbortSignal,
  ): Promise<HandedOut | null> {
    for (let hasLeft = isCut; ; hasLeft = () => gone.aborted) {
      // Registered before the check, so that no arrival is missed.
      const { woken, leave } = this.arrivals.wait(request, over)
      const { handedOut, dueMs } = await this.#look(request, hasLeft, () => gone).catch((fault: unknown) => {
        leave()
        throw fault
      })
      if (handedOut !== null || over.aborted || this.arrivals.isClosed) {
        leave()
        return handedOut
      }
      if (dueMs !== null) this.arrivals.expect(request, dueMs)
      await woken
      if (over.aborted || this.arrivals.isClosed) return null
    }
  }

  /** Takes messages only with reserved space. Holds no space while it waits for messages. */
  async #look(
    request: PopRequest,
    hasLeft: () => boolean,
    gone: () => AbortSignal,
  ): Promise<{ handedOut: HandedOut | null; dueMs: number | null }> {
    const { buffers, sizes, pageBytesMax, metrics } = this.#context
    const key = sizesKey(request)
    const estimate = (): number => sizes.estimate(key, request.batch, pageBytesMax)
    for (;;) {
      const reserved = buffers.budget.reserve(request.identity, estimate, gone)
      const space = reserved instanceof Promise ? await reserved : reserved
      if (space === null) {
        if (gone().aborted) return { handedOut: null, dueMs: null }
        throw new ProblemError(buffers.noRoom)
      }
      let isHandedOver = false
      try {
        const taking: Taking = { ...request, lease: randomUUID(), bytes: space.bytes }
        const { popped, dueMs, more, missing } = await this.#pops.submit(taking)
        await this.#joinAll(missing, request, popped !== null)
        if (popped === null && (missing.length > 0 || more) && !hasLeft()) continue
        if (popped === null) {
          sizes.foundEmpty(key)
          return { handedOut: null, dueMs }
        }
        this.arrivals.found({ queue: popped.queue, group: popped.group })
        const readable = await this.#readable(popped)
        // All of them became dead letters: there may be more.
        if (readable === null) continue
        // Settled messages cannot be returned: this answer is their only delivery.
        if (readable.leaseId !== '' && hasLeft()) {
          await this.#handBack(readable)
          return { handedOut: null, dueMs: null }
        }
        metrics.popped.inc(readable.messages.length)
        if (readable.settles) await this.ack(acksOf(readable, 'completed'))
        isHandedOver = true
        return { handedOut: { popped: readable.settles ? { ...readable, leaseId: '' } : readable, space }, dueMs: null }
      } finally {
        if (!isHandedOver) space.release()
      }
    }
  }

  async #joinAll(queues: readonly number[], request: PopRequest, hasFound: boolean): Promise<void> {
    for (const queue of queues) {
      await this.#join(queue, request).catch((fault: unknown) => {
        if (!hasFound) throw fault
        // The messages found are delivered; the next pop joins.
        this.#context.log.warn({ err: fault, group: request.group }, 'a consumer group could not join partitions')
      })
    }
  }

  /** A group starts with its first pop, and joins some of its queue's partitions with each pop until it has all. */
  async #join(queue: number, { group, mode, from, partition }: PopRequest): Promise<void> {
    const { intake, schema, settings } = this.#context
    const { rows } = await retryConflicts(attemptsMax, () =>
      intake.statements.take<{ grp: number | null }>(`SELECT ${schema}.mq_subscribe($1, $2, $3, $4, $5, $6) AS grp`, [
        queue,
        group,
        mode,
        from,
        partition,
        settings.groupsMax,
      ]),
    )
    if (rows[0]?.grp !== 0) return
    throw new ProblemError({
      code: 'group_limit',
      detail: `The queue has ${settings.groupsMax} consumer groups, the most that are allowed. Use one of them, or have an operator delete one.`,
    })
  }

  /** Messages that were altered, or sealed with another key, become dead letters, and the partition continues. */
  async #readable(popped: Popped): Promise<Popped | null> {
    const broken = popped.messages.filter(({ data }) => data === null)
    if (broken.length === 0) return popped
    if (this.#context.seal === null) {
      await this.#handBack(popped)
      throw new SealError('messages are encrypted and there is no key')
    }
    this.#context.log.error({ queue: popped.queue, messages: broken.length }, 'messages could not be decrypted')
    await this.ack(acksOf({ ...popped, messages: broken }, 'dlq', 'The message could not be decrypted.'))
    const messages = popped.messages.filter(({ data }) => data !== null)
    return messages.length === 0 ? null : { ...popped, messages }
  }

  /** The caller has left: others need not wait for the lease to expire. */
  async #handBack(popped: Popped): Promise<void> {
    if (popped.leaseId !== '') await this.ack(acksOf(popped, 'retry'))
  }

  /** Wakes waiting pops of this queue in this process. */
  wake(queue: string): void {
    this.arrivals.came(new Set([markOf(queue)]))
  }

  async ack(items: readonly Acknowledgment[]): Promise<readonly Outcome[]> {
    const outcomes = await this.#acks.submit(items)
    this.count(outcomes)
    this.released(items)
    return outcomes
  }

  /** These partitions may be free and have more. Other instances notice within a second. */
  released(items: readonly Acknowledgment[]): void {
    for (const key of new Set(items.map(({ partitionId, group }) => `${partitionId} ${group}`))) {
      const queue = this.#queueOf.get(key.slice(0, uuidCharacters))
      if (queue !== undefined) this.arrivals.found({ queue, group: key.slice(uuidCharacters + 1) })
    }
  }

  /** Call when the outcomes are durable. */
  count(outcomes: readonly Outcome[]): void {
    for (const outcome of outcomes) this.#context.metrics.answered.labels(outcome).inc()
  }

  async #answer(units: readonly (readonly Acknowledgment[])[]): Promise<(readonly Outcome[])[]> {
    const { release } = this.#context.intake.statements
    return inUnits(units, await writeAcks(release, this.#context.schema, units.flat()))
  }

  async #take(all: readonly Taking[]): Promise<Found[]> {
    const { rows } = await this.#context.intake.statements.take<PopRow>(
      `SELECT p.* FROM unnest($1::text[], $2::text[], $3::text[], $4::text[], $5::text[], $6::int[], $7::int[], $8::boolean[], $9::uuid[], $10::text[], $11::timestamptz[])
         WITH ORDINALITY u(queue, namespace, task, partition, grp, batch, partitions, auto, lease, mode, since, i),
         LATERAL ${this.#context.schema}.mq_pop(u.queue, u.namespace, u.task, u.partition, u.grp, u.batch, u.partitions, u.auto, u.lease, u.mode, u.since, $12, $13) p`,
      [
        all.map(({ queue }) => queue),
        all.map(({ namespace }) => namespace),
        all.map(({ task }) => task),
        all.map(({ partition }) => partition),
        all.map(({ group }) => group),
        all.map(({ batch }) => batch),
        all.map(({ partitions }) => partitions),
        all.map(({ autoAck }) => autoAck),
        all.map(({ lease }) => lease),
        all.map(({ mode }) => mode),
        all.map(({ from }) => from),
        this.#context.pageBytesMax,
        Math.max(flushBytesMax, this.#context.pageBytesMax),
      ],
    )
    return all.map((request, i) => {
      const row = rows[i]
      if (row === undefined) throw new Error(`no answer for pop ${i}`)
      return { popped: this.#toPopped(request, row), dueMs: row.due_ms, more: row.more, missing: row.missing ?? [] }
    })
  }

  #toPopped(request: Taking, row: PopRow): Popped | null {
    if (row.queue === null) return null
    if (this.#queueOf.size > partitionsKnownMax) this.#queueOf.clear()
    for (const part of row.parts) this.#queueOf.set(part, row.queue)
    const payloads = row.payloads.split(separator)
    this.#context.sizes.saw(
      sizesKey(request),
      payloads.reduce((most, { length }) => Math.max(most, length), 0),
    )
    return {
      queue: row.queue,
      namespace: row.namespace,
      task: row.task,
      group: request.group,
      leaseId: request.autoAck && !row.leased ? '' : request.lease,
      settles: request.autoAck && row.leased,
      messages: row.ids.map((id, i) => {
        const at = (row.ix[i] ?? 1) - 1
        const partitionId = row.parts[at] ?? ''
        const payload = payloads[i] ?? 'null'
        return {
          id,
          transactionId: row.transactions[i] ?? '',
          traceId: row.traces[i] ?? null,
          partition: row.names[at] ?? '',
          partitionId,
          data: row.sealed[i] === true ? this.#opened(payload, { partition: partitionId, id }) : payload,
          createdAt: new Date(row.created_ms[i] ?? 0).toISOString(),
          retryCount: row.tries[i] ?? 0,
        }
      }),
    }
  }

  #opened(payload: string, row: SealedRow): string | null {
    try {
      return this.#context.seal?.open(payload, row) ?? null
    } catch (fault) {
      if (fault instanceof SealError) return null
      throw fault
    }
  }

  async #due(targets: readonly NamedTarget[]): Promise<NamedTarget[]> {
    const { rows } = await this.#context.intake.statements.take<NamedTarget>(
      `SELECT queue, grp AS "group" FROM ${this.#context.schema}.mq_due($1, $2)`,
      [targets.map(({ queue }) => queue), targets.map(({ group }) => group)],
    )
    return rows
  }
}

/** A pop without a queue is estimated by earlier pops for the same namespace and task. */
const sizesKey = ({ queue, namespace, task }: PopRequest): string => queue ?? `\0${namespace ?? ''}\0${task ?? ''}`

function acksOf(
  { messages, group, leaseId }: Popped,
  status: AckStatus,
  error: string | null = null,
): Acknowledgment[] {
  return messages.map(({ transactionId, partitionId }) => ({
    ...{ transactionId, partitionId, group, leaseId },
    ...{ status, error },
  }))
}

/** Splits the answers to a flat list into the original lists. */
function inUnits<T>(units: readonly (readonly unknown[])[], flat: readonly T[]): (readonly T[])[] {
  let end = 0
  return units.map((unit) => {
    end += unit.length
    return flat.slice(end - unit.length, end)
  })
}
