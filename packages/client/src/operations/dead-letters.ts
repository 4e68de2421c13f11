import type { DeadLetterView } from '@spillway/protocol/wire'
import { segment } from '../checks.js'
import { type CallOptions, limitsOf } from '../http/call.js'
import type { Page, PageOptions, Parts } from '../resources.js'
import type { OperationFilter } from './operations.js'

/** Lists leave out values longer than 4 KiB (`truncated`); `get` returns them whole. */
export type DeadLetter = DeadLetterView

export type Redrive = { ids: readonly string[] } | ({ filter: OperationFilter } & PageOptions)

export interface DeadLetters {
  /** A page ends at `limit` or at the server's size limit: continue with `next_cursor` until it is null. */
  list(filter?: OperationFilter & PageOptions, options?: CallOptions): Promise<Page<DeadLetter>>
  get(id: string, options?: CallOptions): Promise<DeadLetter>
  /** Back into their lanes, in order. An empty filter means all. */
  redrive(
    which: Redrive,
    options?: CallOptions,
  ): Promise<{ moved: number; skipped: number; next_cursor?: string | null }>
  /** Deletes them for good. */
  purge(
    which: (OperationFilter & { limit?: number }) | { all: true },
    options?: CallOptions,
  ): Promise<{ purged: number }>
}

const path = '/api/v1/dead-letters'
const service = 'operations'

export function deadLetters({ send }: Parts): DeadLetters {
  return {
    async list(filter = {}, options = {}) {
      const reading = {
        method: 'GET',
        path,
        query: { ...filter },
        service,
        expects: ['items'],
        isRepeatable: true,
      } as const
      return (await send({ ...reading, ...limitsOf(options) })).body as Page<DeadLetter>
    },
    async get(id, options = {}) {
      const reading = { method: 'GET', path: `${path}/${segment(id)}`, service, isRepeatable: true } as const
      return (await send({ ...reading, expects: ['payload'], ...limitsOf(options) })).body as DeadLetter
    },
    // Not repeated: the second answer would only count what the first attempt left.
    async redrive(which, options = {}) {
      const asking = { method: 'POST', path: `${path}/redrive`, body: which, service, isRepeatable: false } as const
      return (await send({ ...asking, expects: ['moved'], ...limitsOf(options) })).body as {
        moved: number
        skipped: number
      }
    },
    async purge(which, options = {}) {
      const asking = { method: 'DELETE', path, query: { ...which }, service, isRepeatable: false } as const
      return (await send({ ...asking, expects: ['purged'], ...limitsOf(options) })).body as { purged: number }
    },
  }
}
