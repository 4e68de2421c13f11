import type { FastifyReply, FastifyRequest } from 'fastify'
import type { Intake } from '../pipeline/intake.js'
import type { Ticket } from '../store/port.js'
import { operationView } from './operation-view.js'
import { sendProblem } from './problem.js'

const lookMs = 1_000
const heartbeatMs = 12_000
/** Each follower costs a query a second while its operation waits. */
const followersMax = 500
let followers = 0

/**
 * `status` events whenever position, status or attempt change, until the operation is finished. The state is read from
 * the store each time, so a client that reconnects misses nothing that still matters.
 */
export async function followOperation(
  intake: Intake,
  first: Ticket,
  request: FastifyRequest,
  reply: FastifyReply,
): Promise<FastifyReply> {
  if (followers >= followersMax) {
    return sendProblem(reply, { code: 'overloaded', detail: 'Too many streams are open.', retryAfterMs: 5_000 })
  }
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
  const last = Number(request.headers['last-event-id'] ?? 0)
  let event = Number.isSafeInteger(last) && last > 0 ? last : 0
  let told = ''
  let writtenAt = performance.now()
  const write = async (text: string): Promise<void> => {
    writtenAt = performance.now()
    // A reader that does not read is waited for, not buffered for.
    if (!raw.write(text)) await drainedOrGone(raw, gone.signal)
  }
  try {
    for (let ticket: Ticket | null = first; ticket !== null && !gone.signal.aborted; ) {
      const view = operationView(ticket)
      const state = JSON.stringify([view.status, view.queuePosition, view.attempt, view.error_message])
      if (state !== told) {
        told = state
        await write(`id: ${++event}\nevent: status\ndata: ${JSON.stringify(view)}\n\n`)
      } else if (performance.now() - writtenAt > heartbeatMs) {
        await write(':\n')
      }
      if (ticket.finishedAt !== null) break
      const finished: Ticket | null = await intake.waiters.wait(ticket.id, lookMs, gone.signal)
      if (gone.signal.aborted || intake.isDraining) break
      ticket = finished ?? (await intake.store.ticket(ticket.id).catch(() => ticket))
    }
  } finally {
    followers--
    raw.end()
  }
  return reply
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
