/**
 * A stream that outlives its connections: after each that breaks, another one behind the last event that was received.
 *
 *   open ──events──► over ──no──► pause ──► open behind the last id
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
  /** Connections in a row that soon break without bringing anything new; then it is given up. */
  fruitlessMax: number
  lastEventId: string | null
  /** Already with its own attempts and pauses. */
  open(lastEventId: string | null): Promise<Answer>
  /** Nothing more is to come. Asked when a connection has ended, `wasBroken` or properly. */
  isOver(wasBroken: boolean): boolean
}

/** Thrown by who reads the events, to go on with another connection. */
export class Reconnect extends Error {}

const pauseMsMax = 10_000
/** The server's heartbeats come so often: a connection that was up for longer was a good one. */
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
          // Of ours, and not of the connection: an event that is too large will be again.
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
        // Only what is new: a place in the queue can be told for ever.
        if (taken.length > 0) fruitless = 0
        lastId = next.event.id ?? lastId
        yield* taken
      }
    } finally {
      await events.return()
    }
    if (how.isOver(broken !== null)) return
    // Who waits for long is cut off by proxies from time to time: that is no reason to give up.
    const hasLasted = how.clock.now() - openedAt >= lastingMs && !(broken instanceof Silence)
    fruitless = hasLasted ? 1 : fruitless + 1
    if (fruitless >= how.fruitlessMax) {
      const detail = `The stream broke off ${fruitless} times without bringing anything new`
      throw new SpillwayError('unreachable', detail, { attempts: fruitless, cause: broken })
    }
    const { clock } = how
    const most = { retryAfterMs: 0, maxMs: pauseMsMax, leftMs: Number.POSITIVE_INFINITY }
    const delayMs = pauseMs({ ...most, tries: fruitless, random: clock.random() }) ?? 0
    how.logger.debug('the stream broke off; going on behind the last event', { lastId, delayMs })
    await clock.sleep(delayMs, how.signal)
  }
}

/** A broken connection as a value: `yield` stands in the same block, where what the reader throws must not be caught. */
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
