/** From a validated request to its answer: admits, streams or answers whole, resumes, and handles clients that leave. */
import type { ServerResponse } from 'node:http'
import { setTimeout as delay } from 'node:timers/promises'
import {
  type ProblemCode,
  problems,
  resilienceLayerHeader,
  resilienceLayers,
  streamIdHeader,
  threadIdHeader,
} from '@spillway/protocol/wire'
import {
  type EndKind,
  type Problem,
  type StatusReport,
  type StreamEntry,
  type StreamRecord,
  sendProblem,
  whenGone,
  withDeadline,
} from 'spillway/workload'
import type { AppReply as Reply } from '../../app.js'
import { releaseBody } from '../../traffic/buffers.js'
import type { SseConnection } from '../../traffic/sse.js'
import type { Admission, Admitted, Asked, Refused } from './admission.js'
import { Delivery, endWithFailure, keptFailure, type Next } from './delivery.js'
import { forms } from './forms.js'
import type { Handler } from './handler.js'
import type { GenerationDeps } from './index.js'
import { type Failure, type Format, failureOf, failures } from './request.js'
import type { Watch } from './watch.js'

/** An upstream refuses quickly: if the refusal comes before the head is sent, the answer has its status. */
const headGraceMs = 100
const openingMs = [20, 100, 500]
const abandonTriesMax = 5
const abandonRetryMs = 500

const expired: Problem = {
  code: 'not_found',
  detail: 'The stream of this Idempotency-Key has expired. Use a new key.',
}

export class Serving {
  readonly #deps: GenerationDeps
  readonly #admission: Admission
  readonly #handler: Handler
  readonly #watch: Watch
  #draining = false
  #idle: (() => void)[] = []
  #open = 0

  constructor(deps: GenerationDeps, admission: Admission, handler: Handler, watch: Watch) {
    this.#deps = deps
    this.#admission = admission
    this.#handler = handler
    this.#watch = watch
  }

  /** `POST` with a stream as its answer. A queued client gets the head and its position first. */
  async stream(asked: Asked, reply: Reply): Promise<Reply> {
    const admitted = await this.#admit(asked, reply)
    if (!admitted.ok) return sendProblem(reply, admitted.problem)
    const isQueued = isWaiting(admitted)
    const { format, threadId } = asked
    const early = isQueued ? this.#greet({ ...admitted, threadId }, 'queued', format, reply) : null
    const begun = await this.#deliver(asked, admitted, false).catch((fault: unknown) => {
      if (early === null) throw fault
      this.#deps.log.error({ err: fault, stream: admitted.id }, 'a stream could not be opened')
      endWithFailure(early, format, failures.logAway)
      return null
    })
    if (begun === null) return reply
    if (!begun.ok) return sendProblem(reply, begun.problem)
    const { delivery } = begun
    const letGo = this.#hold(delivery, reply.raw)
    let isStreaming = false
    try {
      const first = delivery.next()
      if (early === null && delivery.entry.direct) {
        const soon = await withDeadline(first, headGraceMs, () => 'late' as const)
        if (reply.raw.destroyed) return reply
        const failed = soon === 'late' ? null : failureAlone(soon)
        if (failed !== null) return await this.#sendFailure(reply, delivery, failed)
      }
      const { entry } = delivery
      const head = { ...entry, id: admitted.id, replayed: admitted.replayed }
      const connection = early ?? this.#greet(head, 'started', format, reply)
      delivery.attach(connection)
      if (isQueued) delivery.reportPosition(admitted.position, Math.ceil(admitted.etaMs / 1_000))
      isStreaming = true
      this.#run(delivery, connection, letGo, first)
      return reply
    } finally {
      if (!isStreaming) letGo()
    }
  }

  /** Runs outside the request, which has ended for the framework: only the delivery and the socket are kept. */
  #run(delivery: Delivery, connection: SseConnection, letGo: () => void, first?: Promise<Next>): void {
    delivery
      .stream(connection, first)
      .catch((fault: unknown) => {
        this.#deps.log.error({ err: fault, stream: delivery.id }, 'could not send a stream to its client')
        endWithFailure(connection, delivery.entry.format, failures.logAway)
      })
      .finally(letGo)
  }

  /** After the decision the prompt is in the store or not needed: neither it nor its space is kept during the answer. */
  async #admit(asked: Asked, reply: Reply): Promise<Admitted | Refused> {
    const admitted = await this.#decide(asked)
    asked.chat = ''
    asked.keyedOn = ''
    releaseBody(reply.raw)
    return admitted
  }

  /** The key of an attempt that never began holds no answer, so this request may use it. */
  async #decide(asked: Asked): Promise<Admitted | Refused> {
    const admitted = await this.#admission.admit(asked)
    if (!admitted.ok || !admitted.replayed || !(await this.#isUnbegun(admitted.id))) return admitted
    await this.#admission.forgetKey(admitted.id, asked)
    // Of several concurrent requests the first restarts it, and the others find that one.
    return this.#admission.admit(asked)
  }

  /** It can neither be replayed nor continue: it ended before its first chunk, or its log is lost. */
  async #isUnbegun(id: string): Promise<boolean> {
    const { intake, logs } = this.#deps
    // The order matters: an operation that has left the queue has its end in the log.
    const [report] = await intake.tickets.statusOf([id])
    const entry = await logs.registry.find(id)
    if (entry === null || entry.ended === 'unbegun') return entry !== null
    if (isUnfinished(report)) return false
    const head = await logs.headOf(entry)
    return head === 'lost' || (typeof head === 'object' && head.last === 0)
  }

  #greet(head: Head, status: 'queued' | 'started', format: Format, reply: Reply): SseConnection {
    const connection = this.#connect(reply, headersOf(head))
    if (format === 'native' || status === 'queued') {
      connection.write(forms[format].status({ status, stream_id: head.id, thread_id: head.threadId }))
    }
    return connection
  }

  /** `POST` with `stream: false`: the whole answer, or an error with its status. */
  async whole(asked: Asked, reply: Reply): Promise<Reply> {
    const admitted = await this.#admit(asked, reply)
    if (!admitted.ok) return sendProblem(reply, admitted.problem)
    const begun = await this.#deliver(asked, admitted, true)
    if (!begun.ok) return sendProblem(reply, begun.problem)
    const { delivery } = begun
    reply.headers(headersOf({ ...delivery.entry, id: admitted.id, replayed: admitted.replayed }))
    const letGo = this.#hold(delivery, reply.raw)
    try {
      let answer: string | null = null
      for (;;) {
        const record = await delivery.next()
        if (reply.raw.destroyed || record === null) return reply
        if ('status' in record) return await this.#sendFailure(reply, delivery, record)
        const { chunks, end } = record
        if (end !== null && end !== 'done') return await this.#sendFailure(reply, delivery, record)
        if (answer === null && chunks.length > (end === null ? 0 : 1)) answer = chunks[0] ?? null
        if (end === null) continue
        delivery.hasEnded = true
        this.#deps.metrics.chunksStreamed.inc(1)
        return reply
          .header('content-type', 'application/json; charset=utf-8')
          .serializer((text: unknown) => String(text))
          .send(answer ?? '{}')
      }
    } finally {
      letGo()
    }
  }

  /** Reads an existing stream from after `after` on. */
  async resume(entry: StreamEntry, after: number, reply: Reply): Promise<Reply> {
    const { intake, logs, metrics } = this.#deps
    await logs.registry.watched(entry.key.id, intake.instance)
    metrics.resumes.inc()
    const delivery = new Delivery(this.#deps, {
      ...{ entry, after, isShared: true },
      isLocal: this.#handler.has(entry.key.id),
    })
    const letGo = this.#hold(delivery, reply.raw)
    const connection = this.#connect(reply, headersOf({ ...entry, id: entry.key.id }))
    delivery.attach(connection)
    this.#run(delivery, connection, letGo)
    return reply
  }

  /** Stops it, wherever it runs. False: it has already ended. */
  async cancel(entry: StreamEntry, why = 'cancelled by request', kind: EndKind = 'cancelled'): Promise<boolean> {
    const outcome = await this.#deps.intake.cancel(entry.key.id, why)
    // An operation that never ran has no process to write its end.
    if (outcome === 'cancelled') {
      await this.#deps.logs.endAt(entry, 0, kind, forms[entry.format].failed(failures.cancelled))
    }
    return outcome !== 'gone'
  }

  /** Lets streams finish within the drain time; then readers are asked to resume elsewhere. */
  async drain(): Promise<void> {
    this.#draining = true
    if (this.#open === 0) return
    const done = new Promise<void>((resolve) => this.#idle.push(resolve))
    const timer = setTimeout(() => {
      for (const delivery of this.#watch.deliveries) delivery.fail(failures.draining)
    }, this.#deps.drainMs)
    await done
    clearTimeout(timer)
  }

  async #deliver(
    asked: Asked,
    admitted: Admitted,
    isWhole: boolean,
  ): Promise<{ ok: true; delivery: Delivery } | Refused> {
    const { id, here } = admitted
    try {
      const entry = await this.#entryOf(asked, admitted)
      if (entry === null) return { ok: false, problem: expired }
      const delivery = new Delivery(this.#deps, {
        ...{ entry, after: 0, isLocal: here, isQueued: isWaiting(admitted), isWhole },
        isShared: admitted.replayed,
        waitMs: here ? null : admitted.waitMs,
        onStarted: admitted.leaveRoom,
        forgetKey: () => this.#admission.forgetKey(id, asked),
      })
      return { ok: true, delivery }
    } catch (fault) {
      admitted.leaveRoom()
      await this.#admission.takeBack(id, asked, 'its stream could not be opened').catch((second: unknown) => {
        this.#deps.log.warn({ err: second, stream: id }, 'a generation without a stream could not be cancelled')
      })
      throw fault
    }
  }

  async #entryOf(asked: Asked, { id, replayed, direct }: Admitted): Promise<StreamEntry | null> {
    const { intake, logs } = this.#deps
    const { format, threadId, identity } = asked
    const stream = { id, identity, format, threadId, direct, watcher: intake.instance }
    if (!replayed) return logs.open(stream, true)
    // The first request with this key may be opening it now.
    const entry = await findOpening(this.#deps, id)
    if (entry !== null) {
      await logs.registry.watched(id, intake.instance)
      return entry
    }
    // Its process died before opening it; an operation that ran and has no stream has expired.
    const [report] = await intake.tickets.statusOf([id])
    return isUnfinished(report) ? logs.open(stream, false) : null
  }

  /** Counts a reader here until it is released: the stream ended, or the client left. */
  #hold(delivery: Delivery, raw: ServerResponse): () => void {
    this.#open++
    this.#watch.add(delivery)
    if (this.#draining) delivery.fail(failures.draining)
    const unwatch = whenGone(raw, () => {
      delivery.close()
      // Half-closed, it would wait for an answer that never comes.
      raw.destroy()
    })
    return () => {
      unwatch()
      delivery.start()
      delivery.close()
      const isLast = this.#watch.remove(delivery)
      if (isLast && !delivery.hasEnded) void this.#abandon(delivery)
      this.#open--
      if (this.#open === 0) for (const resolve of this.#idle.splice(0)) resolve()
    }
  }

  /** Tried again after a fault: a hundred clients that leave at once may have to wait for connections to the database. */
  async #abandon(delivery: Delivery): Promise<void> {
    for (let tries = 1; ; tries++) {
      try {
        return await this.#leaveUnread(delivery)
      } catch (fault) {
        if (tries === abandonTriesMax) {
          this.#deps.log.warn({ err: fault, stream: delivery.id }, 'could not record that nobody reads a stream here')
          return
        }
        await delay(abandonRetryMs * tries, undefined, { ref: false })
      }
    }
  }

  async #leaveUnread({ id, entry, isShared, isSentAway }: Delivery): Promise<void> {
    const { logs, intake } = this.#deps
    const isUnread = await logs.registry.unwatched(id, intake.instance)
    // A reader elsewhere reports itself again; if there is none, the generating process notices soon.
    if (entry.format === 'native' || isShared || isSentAway) return
    // A new reader that we did not know of: elsewhere, as the registry says, or here meanwhile.
    if (!isUnread || this.#watch.has(id)) return
    if (this.#handler.has(id)) this.#handler.abandon(id)
    else await this.cancel(entry, 'its client left', 'unbegun')
  }

  #connect(reply: Reply, headers: Record<string, string>) {
    reply.hijack()
    const { sse, metrics } = this.#deps
    const own = reply.getHeaders() as Record<string, string>
    metrics.activeConnections.inc()
    reply.raw.once('close', () => metrics.activeConnections.dec())
    return sse.open(reply.raw, { ...own, ...headers })
  }

  /** An end without chunks is sent as a status. */
  async #sendFailure(reply: Reply, delivery: Delivery, why: Failure | StreamRecord): Promise<Reply> {
    delivery.hasEnded = true
    return sendProblem(reply, problemOf('status' in why ? why : await this.#failureOf(delivery.id, why)))
  }

  /** The log has the error text of the stream; the result of an operation that ran has the status too. */
  async #failureOf(id: string, { end, chunks }: StreamRecord): Promise<Failure> {
    const kept = end === 'cancelled' ? null : await keptFailure(this.#deps, id)
    return kept ?? failureOf(chunks.at(-1) ?? '')
  }
}

/** This request queued it, so its position is reported. */
function isWaiting({ direct, replayed }: Admitted): boolean {
  return !direct && !replayed
}

/** What the first caller of a stream and all later ones get. */
interface Head {
  id: string
  threadId: string
  direct: boolean
  replayed?: boolean
}

function headersOf({ id, threadId, direct, replayed }: Head): Record<string, string> {
  return {
    [streamIdHeader]: id,
    [threadIdHeader]: threadId,
    [resilienceLayerHeader]: direct ? resilienceLayers.direct : resilienceLayers.failover,
    ...(replayed === true && { 'idempotent-replayed': 'true' }),
  }
}

/** Null: there is something to stream. */
function failureAlone(next: Next): Failure | StreamRecord | null {
  if (next === null) return null
  if ('status' in next) return next
  const { end, chunks }: StreamRecord = next
  return end !== null && end !== 'done' && chunks.length === 1 ? next : null
}

/** Waits a little for a stream that is being opened: a waiting client gets its id before that. Null: there is none. */
export async function findOpening({ logs, intake }: GenerationDeps, id: string): Promise<StreamEntry | null> {
  let entry = await logs.registry.find(id)
  for (const waitMs of openingMs) {
    if (entry !== null) break
    const [report] = await intake.tickets.statusOf([id])
    if (!isUnfinished(report)) return null
    await delay(waitMs)
    entry = await logs.registry.find(id)
  }
  return entry
}

function isUnfinished(report: StatusReport | undefined): boolean {
  return report?.status === 'pending' || report?.status === 'processing'
}

function problemOf({ status, error, retry_after_ms }: Failure): Problem {
  const isOurs = error.code !== null && error.code in problems
  const code = isOurs ? (error.code as ProblemCode) : status >= 500 ? 'upstream_error' : 'upstream_rejected'
  return {
    code,
    status,
    detail: error.message,
    openai: error,
    ...(retry_after_ms !== null && { retryAfterMs: retry_after_ms }),
  }
}
