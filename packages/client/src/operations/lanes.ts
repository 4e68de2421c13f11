import type { LaneView } from '@spillway/protocol/wire'
import { type CallOptions, limitsOf } from '../http/call.js'
import type { Page, PageOptions, Parts } from '../resources.js'

export interface Lane {
  queue: string
  /** Absent: all lanes of the queue. */
  partition?: string
}

export interface LaneState {
  queue: string
  partition: string | null
  paused: boolean
  /** What paused it: a pause of the whole queue, or its own. */
  paused_by: 'queue' | 'partition' | null
}

export interface Lanes {
  /**
   * The lanes that hold operations, and why they wait. Continue with `next_cursor` until it is null: a page may be short before
   * the last one.
   */
  list(filter?: { queue?: string } & PageOptions, options?: CallOptions): Promise<Page<LaneView>>
  pause(lane: Lane, options?: CallOptions): Promise<LaneState>
  resume(lane: Lane, options?: CallOptions): Promise<LaneState>
}

export function lanes({ send }: Parts): Lanes {
  const change =
    (action: 'pause' | 'resume') =>
    async (lane: Lane, options: CallOptions = {}): Promise<LaneState> => {
      const asking = { method: 'POST', path: `/api/v1/lanes/${action}`, body: lane, expects: ['paused'] } as const
      return (await send({ ...asking, service: 'operations', isRepeatable: true, ...limitsOf(options) }))
        .body as LaneState
    }
  return {
    async list(filter = {}, options = {}) {
      const reading = { method: 'GET', path: '/api/v1/lanes', query: { ...filter }, expects: ['items'] } as const
      return (await send({ ...reading, service: 'operations', isRepeatable: true, ...limitsOf(options) }))
        .body as Page<LaneView>
    },
    pause: change('pause'),
    resume: change('resume'),
  }
}
