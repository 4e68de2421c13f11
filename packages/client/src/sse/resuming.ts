/**
 * A stream that outlives its connections: after each break, a new one continues after the last event received.
 *
 *   open ──events──► over ──no──► pause ──► open after the last id
 *                     └─yes─► end
 */
import { number } from '../checks.js'
import type { Clock } from '../clock.js'
import { SpillwayError } from '../error.js'
import type { Answer } from '../http/call.js'
import type { Logger } from '../options.js'
import { pauseMs } from '../policy/pause.js'
import type { SseEvent } from './parser.js'
import { eventsOf, Silence, silenceMs } from './reading.js'

export interface Resuming {
  clock: Clock
  logger: Logger
  signal?: AbortSignal | undefined
  silentMs?: number | undefined
  /** Connections in a row that break early without anything new, before the stream fails. */
  fruitlessMax: number
  lastEventId: string | null
  /** With its own attempts and pauses. */
  open(lastEventId: string | null): Promise<Answer>
  /** Whether the stream is complete. Called when a connection has ended, `wasBroken` or properly. */
  isOver(wasBroken: boolean): boolean
}

/** Thrown by the event handler to continue with another connection. */
export class Reconnect extends Error {}

const pauseMsMax = 10_000
/** The server's heartbeat interval: a connection that lasted longer was a good one. */
const lastingMs = 15_000

/** `take` handles an event; false ends the connection. */
export async function* resuming<T>(
  how: Resuming,
  take: (event: SseEvent) => T[] | Reconnect | null,
): AsyncGenerator<T, void, undefined> {
  const silentMs = number('silentMs', how.silentMs ?? silenceMs, 1)
  let lastId = how.lastEventId
  for (let fruitless = 0; ; ) {
    const answer = await how.open(lastId)
    // 204: nothing is left.
    if (answer.stream === null) return
    const openedAt = how.clock.now()
    let broken: unknown = null
    const events = eventsOf(answer.stream, silentMs)
    try {
      for (;;) {
        const next = await nextOf(events)
        if ('fault' in next) {
          how.signal?.throwIfAborted()
          // Our own error, not the connection's: an event that is too large will be too large again.
          if (next.fault instanceof SpillwayError) throw next.fault
          broken = next.fault
          break
        }
        if (next.event === null) break
        const taken = take(next.event)
        if (taken === null) return
        if (taken instanceof Reconnect) {
          broken = taken
          break
        }
        // Only new events count: a queue position can repeat forever.
        if (taken.length > 0) fruitless = 0
        lastId = next.event.id ?? lastId
        yield* taken
      }
    } finally {
      await events.return()
    }
    if (how.isOver(broken !== null)) return
    // Proxies cut off long waits from time to time, which is no reason to give up.
    const hasLasted = how.clock.now() - openedAt >= lastingMs && !(broken instanceof Silence)
    fruitless = hasLasted ? 1 : fruitless + 1
    if (fruitless >= how.fruitlessMax) {
      const detail = `The stream broke off ${fruitless} times without bringing anything new`
      throw new SpillwayError('unreachable', detail, { attempts: fruitless, cause: broken })
    }
    const { clock } = how
    const most = { retryAfterMs: 0, maxMs: pauseMsMax, leftMs: Number.POSITIVE_INFINITY }
    const delayMs = pauseMs({ ...most, tries: fruitless, random: clock.random() }) ?? 0
    how.logger.debug('stream interrupted, resuming after the last event', { lastId, delayMs })
    await clock.sleep(delayMs, how.signal)
  }
}

/**
 * Returns a broken connection as a value: the caller's `yield` is in the same block, and errors thrown by the reader must
 * not be caught.
 */
async function nextOf(
  events: AsyncGenerator<SseEvent, void, undefined>,
): Promise<{ event: SseEvent | null } | { fault: unknown }> {
  try {
    const { done, value } = await events.next()
    return { event: done === true ? null : value }
  } catch (fault) {
    return { fault }
  }
}
