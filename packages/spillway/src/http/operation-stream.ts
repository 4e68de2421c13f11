import type { FastifyReply, FastifyRequest } from 'fastify'
import type { Intake } from '../pipeline/intake.js'
import type { Ticket } from '../store/port.js'
import { LogFault, type StreamRecord } from '../streams/port.js'
import type { Follower } from '../streams/relay.js'
import { operationView } from './operation-view.js'
import { sendProblem } from './problem.js'

const lookMs = 1_000
const heartbeatMs = 12_000
const outputGraceMs = 2_000
/** Each follower costs a query a second while its operation waits. */
const followersMax = 500
let followers = 0

/** Where the output of operations is that have one. Null: this one has none. */
export type OutputOf = (id: string, after: number) => Promise<Follower | null>

/**
 * `status` events whenever position, status or attempt change, until the operation is finished. The state is read from
 * the store each time, so a client that reconnects misses nothing that still matters. What the operation puts out comes in
 * between, numbered: a client goes on behind the last number that it has.
 */
export async function followOperation(
  intake: Intake,
  first: Ticket,
  request: FastifyRequest,
  reply: FastifyReply,
  outputOf: OutputOf | undefined,
): Promise<FastifyReply> {
  if (followers >= followersMax) {
    return sendProblem(reply, { code: 'overloaded', detail: 'Too many streams are open.', retryAfterMs: 5_000 })
  }
  const last = Number(request.headers['last-event-id'] ?? 0)
  const after = Number.isSafeInteger(last) && last > 0 ? last : 0
  const output = (await outputOf?.(first.id, after)) ?? null
  followers++
  const gone = new AbortController()
  reply.raw.once('close', () => gone.abort())
  reply.hijack()
  const { raw } = reply
  raw.writeHead(200, {
    ...(reply.getHeaders() as Record<string, string>),
    'content-type': 'text/event-stream; charset=utf-8',
    'cache-control': 'no-cache, no-transform',
    'x-accel-buffering': 'no',
  })
  let event = after
  let told = ''
  let writtenAt = performance.now()
  const write = async (text: string): Promise<void> => {
    writtenAt = performance.now()
    // A reader that does not read is waited for, not buffered for.
    if (!raw.write(text)) await drainedOrGone(raw, gone.signal)
  }
  gone.signal.addEventListener('abort', () => output?.close(), { once: true })
  const putOut = output === null ? Promise.resolve() : tellOutput(output, write)
  try {
    for (let ticket: Ticket | null = first; ticket !== null && !gone.signal.aborted; ) {
      const view = operationView(ticket)
      const state = JSON.stringify([view.status, view.queuePosition, view.attempt, view.error_message])
      if (state !== told) {
        told = state
        // The numbers are those of its output, where it has one.
        const id = output === null ? `id: ${++event}\n` : ''
        await write(`${id}event: status\ndata: ${JSON.stringify(view)}\n\n`)
      } else if (performance.now() - writtenAt > heartbeatMs) {
        await write(':\n')
      }
      if (ticket.finishedAt !== null) break
      const finished: Ticket | null = await intake.waiters.wait(ticket.id, lookMs, gone.signal)
      if (gone.signal.aborted || intake.isDraining) break
      ticket = finished ?? (await intake.store.ticket(ticket.id).catch(() => ticket))
    }
    // Its end is in the log before it is finished: what is left is on its way. One that never ran has none.
    if (output !== null && !gone.signal.aborted && !intake.isDraining) {
      const timer = setTimeout(() => output.close(), outputGraceMs)
      await putOut
      clearTimeout(timer)
    }
  } finally {
    output?.close()
    await putOut
    followers--
    raw.end()
  }
  return reply
}

/** Until its end; what cannot be had is told once, and the status events go on. */
async function tellOutput(output: Follower, write: (text: string) => Promise<void>): Promise<void> {
  try {
    for (let record = await output.next(); record !== null; record = await output.next()) {
      await write(outputBlocks(record))
      if (record.end !== null) return
    }
  } catch (fault) {
    if (!(fault instanceof LogFault)) throw fault
    await write(
      `event: error\ndata: ${JSON.stringify({ message: 'The output cannot be read now.', code: fault.code })}\n\n`,
    )
  }
}

function outputBlocks({ first, chunks, end }: StreamRecord): string {
  return chunks
    .map((text, i) => {
      const isEnd = end !== null && i === chunks.length - 1
      return `id: ${first + i}\nevent: ${isEnd ? (end === 'done' ? 'complete' : 'error') : 'chunk'}\ndata: ${text}\n\n`
    })
    .join('')
}

function drainedOrGone(raw: NodeJS.WritableStream, gone: AbortSignal): Promise<void> {
  return new Promise((resolve) => {
    const done = (): void => {
      raw.removeListener('drain', done)
      gone.removeEventListener('abort', done)
      resolve()
    }
    raw.once('drain', done)
    gone.addEventListener('abort', done, { once: true })
  })
}
