import type { OperationView } from '@spillway/protocol/wire'
import type { Parts } from '../resources.js'
import { jsonOf } from '../sse/parser.js'
import { resuming } from '../sse/resuming.js'
import { operationPath } from './ticket.js'

export interface FollowOptions {
  signal?: AbortSignal
  /** A connection that is silent for this long counts as dead. Default 45,000. */
  silentMs?: number
}

/** `chunk`, `complete` and `error` carry the operation's output, if any; the format of `data` depends on the type. */
export type OperationEvent =
  | { type: 'status'; operation: OperationView }
  | { type: 'chunk' | 'complete' | 'error'; id: string | null; data: unknown }

export async function* follow(
  { send, settings, clock }: Parts,
  id: string,
  { signal, silentMs }: FollowOptions,
): AsyncGenerator<OperationEvent, void, undefined> {
  let last = ''
  let isFinished = false
  let output: 'none' | 'begun' | 'ended' = 'none'
  /** Since the connection was opened. */
  let hasChunks = false
  yield* resuming<OperationEvent>(
    {
      clock,
      signal,
      silentMs,
      logger: settings.logger,
      fruitlessMax: settings.attemptsMax,
      lastEventId: null,
      open: (lastEventId) =>
        send({
          method: 'GET',
          path: `${operationPath(id)}/stream`,
          ...(lastEventId !== null && { headers: { 'last-event-id': lastEventId } }),
          service: 'operations',
          expects: [''],
          isRepeatable: true,
          isStream: true,
          signal,
        }),
      isOver: (wasBroken) => {
        // Behind some proxies a cut answer looks complete, so there may be more output.
        const mayBeMore = output === 'begun' && (wasBroken || hasChunks)
        hasChunks = false
        return isFinished && !mayBeMore
      },
    },
    ({ event, id: eventId, data }) => {
      if (event === 'status') {
        // Each connection sends it again, changed or not.
        if (data === last) return []
        last = data
        const operation = jsonOf<OperationView>(data)
        isFinished = operation.processed_at !== null
        return [{ type: 'status', operation }]
      }
      if (event !== 'chunk' && event !== 'complete' && event !== 'error') return []
      // In OpenAI's form the end is not JSON.
      const isEnd = event !== 'chunk'
      output = isEnd ? 'ended' : 'begun'
      hasChunks = true
      return [{ type: event, id: eventId, data: data === '[DONE]' ? null : jsonOf<unknown>(data) }]
    },
  )
}
