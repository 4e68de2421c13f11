/** Pops and acks: both go to the store in batches, each on their own connections. */
import { randomUUID } from 'node:crypto'
import { type AckStatus, queueModeGroup } from '@spillway/protocol/wire'
import { codeOf, Flush, type IntakeApi, ProblemError, retryConflicts, type Tx } from 'spillway/workload'
import type { Hold } from '../../http/buffer-budget.js'
import { deadline } from '../../http/deadline.js'
import { Arrivals, type Place } from './arrivals.js'
import type { MessageSizes } from './message-sizes.js'
import type { MessagesOptions } from './options.js'
import { type Seal, SealError, type SealedPlace } from './seal.js'

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

export type Outcome = 'done' | 'retry' | 'dead' | 'skipped' | 'unknown' | 'lost'

export interface Acknowledgment {
  transactionId: string
  partitionId: string
  status: AckStatus
  error: string | null
  group: string
  leaseId: string | null
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
const uuid = /^[0-9a-f]{8}-[0-9a-f]{4}-[0-9a-f]{4}-[0-9a-f]{4}-[0-9a-f]{12}$/i
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
  readonly #intake: IntakeApi
  readonly #options: MessagesOptions
  readonly #seal: Seal | null
  readonly #sizes: MessageSizes
  readonly #pops: Flush<Taking, Found>
  readonly #acks: Flush<readonly Acknowledgment[], readonly Outcome[]>
  /** Queues by partition, for partitions popped here. */
  readonly #queueOf = new Map<string, string>()
  readonly arrivals: Arrivals

  constructor(intake: IntakeApi, options: MessagesOptions, seal: Seal | null, sizes: MessageSizes) {
    this.#sizes = sizes
    this.#intake = intake
    this.#options = options
    this.#seal = seal
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
      due: (places) => this.#due(places),
      onFault: (fault) => options.log.warn({ err: fault }, 'could not look for messages; trying again'),
      onWaiting: (count) => options.metrics.waiting.set(count),
    })
  }

  get isFull(): boolean {
    return this.#pops.isFull
  }

  /** Null: nothing arrived within `waitMs`; with 0 it checks once. */
  async pop(request: PopRequest, waitMs: number, client: PopClient): Promise<HandedOut | null> {
    if (waitMs === 0) return (await this.#look(request, client.isCut, client.goneSignal)).handedOut
    const gone = client.goneSignal()
    const { queue, group, partition, namespace, task } = request
    const { signal: over, clear } = deadline(waitMs, gone)
    try {
      return await this.#waitFor(request, { queue, group, partition, namespace, task }, over, client.isCut, gone)
    } finally {
      clear()
    }
  }

  /** The first check is answered even if the client half-closes meanwhile; later ones take nothing then. */
  async #waitFor(
    request: PopRequest,
    place: Place,
    over: AbortSignal,
    isCut: () => boolean,
    gone: AbortSignal,
  ): Promise<HandedOut | null> {
    for (let hasLeft = isCut; ; hasLeft = () => gone.aborted) {
      // Registered before the check, so that no arrival is missed.
      const { woken, leave } = this.arrivals.wait(place, over)
      const { handedOut, dueMs } = await this.#look(request, hasLeft, () => gone).catch((fault: unknown) => {
        leave()
        throw fault
      })
      if (handedOut !== null || over.aborted || this.arrivals.isClosed) {
        leave()
        return handedOut
      }
      if (dueMs !== null) this.arrivals.expect(place, dueMs)
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
    for (;;) {
      const reserved = this.#reserve(request, gone)
      const space = reserved instanceof Promise ? await reserved : reserved
      if (space === null) {
        if (gone().aborted) return { handedOut: null, dueMs: null }
        throw new ProblemError(this.#options.buffers.noRoom)
      }
      let isHandedOver = false
      try {
        const taking: Taking = { ...request, lease: randomUUID(), bytes: space.bytes }
        const { popped, dueMs, more, missing } = await this.#pops.submit(taking)
        await this.#joinAll(missing, request, popped !== null)
        if (popped === null && (missing.length > 0 || more) && !hasLeft()) continue
        if (popped === null) {
          this.#sizes.foundEmpty(sizesKey(request))
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
        this.#options.metrics.popped.inc(readable.messages.length)
        const settled = readable.settles ? await this.#settled(readable) : readable
        isHandedOver = true
        return { handedOut: { popped: settled, space }, dueMs: null }
      } finally {
        if (!isHandedOver) space.release()
      }
    }
  }

  #reserve(request: PopRequest, gone: () => AbortSignal): Hold | null | Promise<Hold | null> {
    const key = sizesKey(request)
    const estimate = (): number => this.#sizes.estimate(key, request.batch, this.#options.pageBytesMax)
    return this.#options.buffers.budget.reserve(request.identity, estimate, gone)
  }

  async #joinAll(queues: readonly number[], request: PopRequest, hasFound: boolean): Promise<void> {
    for (const queue of queues) {
      await this.#join(queue, request).catch((fault: unknown) => {
        if (!hasFound) throw fault
        // The messages found are delivered; the next pop joins.
        this.#options.log.warn({ err: fault, group: request.group }, 'a consumer group could not join partitions')
      })
    }
  }

  /** A group starts with its first pop, and joins some of its queue's partitions with each pop until it has all. */
  async #join(queue: number, { group, mode, from, partition }: PopRequest): Promise<void> {
    const { schema, groupsMax } = this.#options
    const { rows } = await retryConflicts(attemptsMax, () =>
      this.#intake.statements.take<{ grp: number | null }>(
        `SELECT ${schema}.mq_subscribe($1, $2, $3, $4, $5, $6) AS grp`,
        [queue, group, mode, from, partition, groupsMax],
      ),
    )
    if (rows[0]?.grp !== 0) return
    throw new ProblemError({
      code: 'group_limit',
      detail: `The queue has ${groupsMax} consumer groups, the most that are allowed. Use one of them, or have an operator delete one.`,
    })
  }

  /** Messages that were altered, or sealed with another key, become dead letters, and the partition continues. */
  async #readable(popped: Popped): Promise<Popped | null> {
    const broken = popped.messages.filter(({ data }) => data === null)
    if (broken.length === 0) return popped
    if (this.#seal === null) {
      await this.#handBack(popped)
      throw new SealError('messages are encrypted and there is no key')
    }
    const { group, leaseId } = popped
    this.#options.log.error({ queue: popped.queue, messages: broken.length }, 'messages could not be decrypted')
    const error = 'The message could not be decrypted.'
    await this.ack(
      broken.map(({ transactionId, partitionId }) => ({
        ...{ transactionId, partitionId, group, leaseId },
        ...{ status: 'dlq', error },
      })),
    )
    const messages = popped.messages.filter(({ data }) => data !== null)
    return messages.length === 0 ? null : { ...popped, messages }
  }

  /** Acks messages that were popped with autoAck and could be read. */
  async #settled(popped: Popped): Promise<Popped> {
    const { group, leaseId } = popped
    await this.ack(
      popped.messages.map(({ transactionId, partitionId }) => ({
        ...{ transactionId, partitionId, group, leaseId },
        ...{ status: 'completed', error: null },
      })),
    )
    return { ...popped, leaseId: '' }
  }

  /** The caller has left: others need not wait for the lease to expire. */
  async #handBack({ messages, leaseId, group }: Popped): Promise<void> {
    if (leaseId === '') return
    await this.ack(
      messages.map(({ transactionId, partitionId }) => ({
        ...{ transactionId, partitionId, group, leaseId },
        ...{ status: 'retry', error: null },
      })),
    )
  }

  async ack(items: readonly Acknowledgment[]): Promise<readonly Outcome[]> {
    const outcomes = await this.#acks.submit(items)
    this.told(outcomes)
    this.released(items)
    return outcomes
  }

  /** The given partitions whose queues may be used. */
  async usable(partitionIds: readonly string[], mayUse: (queue: string) => boolean): Promise<ReadonlySet<string>> {
    const { rows } = await this.#intake.read<{ id: string; name: string }>(
      `SELECT p.id, q.name FROM ${this.#options.schema}.mq_partitions p JOIN ${this.#options.schema}.mq_queues q ON q.id = p.queue WHERE p.id = ANY ($1)`,
      [[...new Set(partitionIds.map(uuidOr))]],
    )
    return new Set(rows.filter(({ name }) => mayUse(name)).map(({ id }) => id))
  }

  /** Runs in the caller's transaction. Call `told` after its commit. */
  async ackWithin(tx: Tx, items: readonly Acknowledgment[]): Promise<readonly Outcome[]> {
    const { rows } = await tx.query<{ outcomes: Outcome[] }>(this.#ackSql, ackValues(items))
    return rows[0]?.outcomes ?? []
  }

  /** These partitions may be free and have more. Other instances notice within a second. */
  released(items: readonly Acknowledgment[]): void {
    for (const key of new Set(items.map(({ partitionId, group }) => `${partitionId} ${group}`))) {
      const queue = this.#queueOf.get(key.slice(0, uuidCharacters))
      if (queue !== undefined) this.arrivals.found({ queue, group: key.slice(uuidCharacters + 1) })
    }
  }

  told(outcomes: readonly Outcome[]): void {
    for (const outcome of outcomes) this.#options.metrics.answered.labels(outcome).inc()
  }

  /** Null: the lease no longer exists, or belongs to a queue that may not be used. */
  async extend(leaseId: string, seconds: number | null, mayUse: (queue: string) => boolean): Promise<Date | null> {
    if (!uuid.test(leaseId)) return null
    const { schema } = this.#options
    const { rows: leased } = await this.#intake.read<{ name: string }>(
      `SELECT q.name FROM ${schema}.mq_leases l JOIN ${schema}.mq_groups g ON g.id = l.grp JOIN ${schema}.mq_queues q ON q.id = g.queue WHERE l.id = $1`,
      [leaseId],
    )
    if (!leased.some(({ name }) => mayUse(name))) return null
    const { rows } = await this.#intake.statements.release<{ until: Date | null }>(
      `SELECT ${schema}.mq_extend($1, $2) AS until`,
      [leaseId, seconds],
    )
    return rows[0]?.until ?? null
  }

  close(): void {
    this.arrivals.close()
  }

  get #ackSql(): string {
    return `SELECT ${this.#options.schema}.mq_ack($1, $2, $3, $4, $5, $6) AS outcomes`
  }

  async #answer(units: readonly (readonly Acknowledgment[])[]): Promise<(readonly Outcome[])[]> {
    const items = units.flat()
    const { rows } = await this.#intake.statements.release<{ outcomes: Outcome[] }>(this.#ackSql, ackValues(items))
    const outcomes = rows[0]?.outcomes ?? []
    return inUnits(units, outcomes)
  }

  async #take(all: readonly Taking[]): Promise<Found[]> {
    const { rows } = await this.#intake.statements.take<PopRow>(
      `SELECT p.* FROM unnest($1::text[], $2::text[], $3::text[], $4::text[], $5::text[], $6::int[], $7::int[], $8::boolean[], $9::uuid[], $10::text[], $11::timestamptz[])
         WITH ORDINALITY u(queue, namespace, task, partition, grp, batch, partitions, auto, lease, mode, since, i),
         LATERAL ${this.#options.schema}.mq_pop(u.queue, u.namespace, u.task, u.partition, u.grp, u.batch, u.partitions, u.auto, u.lease, u.mode, u.since, $12, $13) p`,
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
        this.#options.pageBytesMax,
        Math.max(flushBytesMax, this.#options.pageBytesMax),
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
    this.#sizes.saw(
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

  #opened(payload: string, place: SealedPlace): string | null {
    try {
      return this.#seal?.open(payload, place) ?? null
    } catch (fault) {
      if (fault instanceof SealError) return null
      throw fault
    }
  }

  async #due(places: readonly { queue: string; group: string }[]): Promise<{ queue: string; group: string }[]> {
    const { rows } = await this.#intake.statements.take<{ queue: string; grp: string }>(
      `SELECT queue, grp FROM ${this.#options.schema}.mq_due($1, $2)`,
      [places.map(({ queue }) => queue), places.map(({ group }) => group)],
    )
    return rows.map(({ queue, grp }) => ({ queue, group: grp }))
  }
}

/** A pop without a queue is estimated by earlier pops for the same namespace and task. */
const sizesKey = ({ queue, namespace, task }: PopRequest): string => queue ?? `\0${namespace ?? ''}\0${task ?? ''}`

/** Splits the answers to a flat list into the original lists. */
function inUnits<T>(units: readonly (readonly unknown[])[], flat: readonly T[]): (readonly T[])[] {
  let end = 0
  return units.map((unit) => {
    end += unit.length
    return flat.slice(end - unit.length, end)
  })
}

/** Replaces malformed ids; no row has this id. */
const nobody = '00000000-0000-0000-0000-000000000000'
const uuidOr = (text: string): string => (uuid.test(text) ? text : nobody)

function ackValues(items: readonly Acknowledgment[]): unknown[] {
  return [
    items.map(({ partitionId }) => uuidOr(partitionId)),
    items.map(({ group }) => group),
    items.map(({ leaseId }) => (leaseId === null ? null : uuidOr(leaseId))),
    items.map(({ transactionId }) => transactionId),
    items.map(({ status }) => status),
    items.map(({ error }) => error),
  ]
}

export const groupOf = (name: string | null | undefined): string => name ?? queueModeGroup
