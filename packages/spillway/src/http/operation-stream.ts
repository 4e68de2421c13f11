import type { ServerResponse } from 'node:http'
import type { Intake } from '../intake/intake.js'
import type { Ticket } from '../store/port.js'
import { LogFault, type StreamRecord } from '../streams/port.js'
import type { Follower } from '../streams/relay.js'
import { withDeadline } from '../time/with-deadline.js'
import { goneSignal } from './connections.js'
import { operationView } from './operation-view.js'
import type { Problem } from './problem.js'
import type { TicketAnswer, TicketContext } from './ticket-table.js'

const lookMs = 1_000
const heartbeatMs = 12_000
const outputGraceMs = 2_000
/** Each follower costs a query a second while its operation waits. */
const followersMax = 500
let followers = 0

type Output = Pick<Follower, 'next' | 'close'>

/** Finds the output of an operation. Null: it has none. */
export type OutputOf = (id: string, after: number) => Promise<Output | null>

/** Where events go. */
export interface EventSink {
  /** Resolves when there is room for more, or the client has left. */
  write(text: string): Promise<void>
  /** Fires when the client has left. */
  gone: AbortSignal
  /** Closes the connection of a client that does not read. */
  abandon(): void
}

/**
 * Sends `status` events when position, status or attempt change, until the operation is finished. The state is read from the
 * store each time, so a client that reconnects misses nothing that still matters. The operation's output comes in between,
 * numbered; the last status comes after all of it.
 *
 * Ids: a chunk has its number; a status has `<last chunk before it>.<state>`, always the same for that state. So a client
 * resumes after its last chunk, and one that has the last status gets 204: nothing is left.
 */
export async function followOperation(
  { intake, outputOf, unreadMs }: TicketContext,
  first: Ticket,
  lastEventId: string | undefined,
): Promise<TicketAnswer> {
  const has = lastEventOf(lastEventId)
  if (first.finishedAt !== null && has.state === stateOf(first)) return { kind: 'empty' }
  if (followers >= followersMax) {
    const problem: Problem = { code: 'overloaded', detail: 'Too many streams are open.', retryAfterMs: 5_000 }
    return { kind: 'problem', problem }
  }
  const output = (await outputOf?.(first.id, has.after)) ?? null
  return { kind: 'events', send: (sink) => follow(intake, first, has.after, output, timed(sink, unreadMs)) }
}

/** A client that reads nothing for `unreadMs` would hold one of the followers for ever. It can resume. */
function timed({ write, gone, abandon }: EventSink, unreadMs: number): EventSink {
  return { write: (text) => withDeadline(write(text), unreadMs, abandon), gone, abandon }
}

async function follow(
  intake: Intake,
  first: Ticket,
  after: number,
  output: Output | null,
  { write: pass, gone }: EventSink,
): Promise<void> {
  followers++
  let last = ''
  let writtenAt = performance.now()
  const write = (text: string): Promise<void> => {
    writtenAt = performance.now()
    return pass(text)
  }
  gone.addEventListener('abort', () => output?.close(), { once: true })
  const reached = { after }
  const outputSent = output === null ? Promise.resolve(true) : sendOutput(output, reached, write)
  try {
    for (let ticket: Ticket | null = first; ticket !== null && !gone.aborted; ) {
      const isFinished: boolean = ticket.finishedAt !== null
      // A client with the last status id gets nothing more, so the rest of the output must come first.
      const isWhole = !isFinished || output === null || (!intake.isDraining && (await restOf(output, outputSent)))
      const state = stateOf(ticket)
      if (state !== last) {
        last = state
        const id = isWhole ? `id: ${reached.after}.${state}\n` : ''
        await write(`${id}event: status\ndata: ${JSON.stringify(operationView(ticket))}\n\n`)
      } else if (performance.now() - writtenAt > heartbeatMs) {
        await write(':\n')
      }
      if (isFinished) break
      const finished: Ticket | null = await intake.waiters.wait(ticket.id, lookMs, gone)
      if (gone.aborted || intake.isDraining) break
      ticket = finished ?? (await intake.store.ticket(ticket.id).catch(() => ticket))
    }
  } finally {
    output?.close()
    await outputSent
    followers--
  }
}

export const eventHeaders = {
  'content-type': 'text/event-stream; charset=utf-8',
  'cache-control': 'no-cache, no-transform',
  'x-accel-buffering': 'no',
}

/** Sends events as the body of a 200 of Node's HTTP server. */
export async function sendEvents(
  response: ServerResponse,
  headers: Record<string, string>,
  send: (sink: EventSink) => Promise<void>,
): Promise<void> {
  const gone = goneSignal(response, 'wait')
  response.writeHead(200, { ...headers, ...eventHeaders })
  const write = async (text: string): Promise<void> => {
    // Waits for a slow reader instead of buffering.
    if (!response.write(text)) await drainedOrGone(response, gone)
  }
  try {
    await send({ write, gone, abandon: () => void response.destroy() })
  } finally {
    response.end()
  }
}

/** Includes the finish time: a failed operation may be retried, and fail again. */
function stateOf(ticket: Ticket): string {
  const { status, queuePosition, attempt } = operationView(ticket)
  const state = [status, queuePosition ?? '', attempt, ticket.finishedAt?.getTime() ?? '']
  return [...state, ...(ticket.progress ? [ticket.progress.at.getTime()] : [])].join('.')
}

function lastEventOf(id = ''): { after: number; state: string | null } {
  const [, after, state] = /^(\d{1,15})(?:\.(.*))?$/.exec(id) ?? []
  return { after: Number(after ?? 0), state: state ?? null }
}

/** The end is in the log before the operation is finished, so the rest is on its way. An operation that never ran has none. */
async function restOf(output: Output, outputSent: Promise<boolean>): Promise<boolean> {
  const timer = setTimeout(() => output.close(), outputGraceMs)
  const isWhole = await outputSent
  clearTimeout(timer)
  return isWhole
}

/** Sends the output until its end. If it is unavailable, reports that once (false), and the status events continue. */
async function sendOutput(
  output: Output,
  reached: { after: number },
  write: (text: string) => Promise<void>,
): Promise<boolean> {
  try {
    for (let record = await output.next(); record !== null; record = await output.next()) {
      reached.after = record.first + record.chunks.length - 1
      await write(outputBlocks(record))
      if (record.end !== null) break
    }
    return true
  } catch (fault) {
    if (!(fault instanceof LogFault)) throw fault
    await write(
      `event: error\ndata: ${JSON.stringify({ message: 'The output cannot be read now.', code: fault.code })}\n\n`,
    )
    return false
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
    if (gone.aborted) return resolve()
    raw.once('drain', done)
    gone.addEventListener('abort', done, { once: true })
  })
}
