import { within } from '../clock.js'
import type { OpenStream } from '../http/call.js'
import { type SseEvent, SseParser } from './parser.js'

/**
 * The server sends something at least every 15 s, if only a comment. A connection that is silent for three times that is
 * dead.
 */
export const silenceMs = 45_000

/** The connection was silent for too long: it may be dead. */
export class Silence extends Error {}

/** The events of one connection. Returns when it ends; throws when it breaks or is silent for too long. */
export async function* eventsOf(stream: OpenStream, silentMs: number): AsyncGenerator<SseEvent, void, undefined> {
  const reader = stream.body.getReader()
  const decoder = new TextDecoder()
  const parser = new SseParser()
  try {
    for (;;) {
      const { done, value } = await within(
        silentMs,
        reader.read(),
        () => new Silence(`nothing came for ${silentMs} ms`),
      )
      if (done) return
      yield* parser.push(decoder.decode(value, { stream: true }))
    }
  } finally {
    stream.close()
  }
}
