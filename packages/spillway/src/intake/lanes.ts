/** `intake.lanes`: which lanes hold operations and why they wait; pausing and resuming. The ticket routes use the same functions. */
import { type LaneName, laneOf } from '../core/ids.js'
import { checkOptions, isText, OptionError, type Rule } from '../core/options.js'
import { cursorOf } from '../http/pages.js'
import type { LaneRow } from '../store/port.js'
import type { Intake } from './intake.js'
import { type Paged, type PageOptions, pageFrom, pageRules } from './tickets.js'

export interface LaneReport {
  queue: string
  partition: string
  /** Unfinished operations. */
  depth: number
  /** Since its first operation was accepted. */
  oldestAgeSeconds: number
  paused: boolean
  /** A pause of the whole queue, of this lane, or of the type of its first operation. */
  pausedBy: 'queue' | 'partition' | 'type' | null
  /** Its first operation: the others wait for it. */
  head: {
    id: string
    type: string
    status: 'pending' | 'processing'
    /** As in the operation's report. */
    attempt: number
    maxAttempts: number
    /** When a delayed one, or one that failed, runs next; null: it runs, waits for a slot, or is paused. */
    nextAttemptAt: Date | null
  }
  /** In words, for people. Null: its first operation runs, or is about to. */
  waitingBecause: string | null
}

/** A lane, all lanes of a queue (`partition` absent), or operations of a type wherever they come first in their lane. */
export type Pausable =
  | { queue: string; partition?: string; type?: never }
  | { type: string; queue?: never; partition?: never }

/** As it is now. */
export interface PauseState {
  paused: boolean
  /** What holds it. */
  pausedBy: 'queue' | 'partition' | 'type' | null
}

/** A statement examines this many lanes at most: some tens of milliseconds. */
const examinedMax = 10_000
/** For a page: where few lanes fit, it may be short and still have a cursor. */
const statementsMax = 20

const pauseRules: Record<'queue' | 'partition' | 'type', Rule> = { queue: isText, partition: isText, type: isText }

/** The lanes of all processes on this store. */
export class LaneCalls {
  readonly #intake: Intake

  constructor(intake: Intake) {
    this.#intake = intake
  }

  /**
   * The lanes that hold operations, in an order that does not change (not by name). Continue with `nextCursor` until it is
   * null: among very many lanes of other queues, a page may be short and have one. Operations of a definition without `lane`
   * are in no lane; with `queue`, the name of their type, each is listed as a lane of one.
   */
  async list(options: { queue?: string } & PageOptions = {}): Promise<Paged<LaneReport>> {
    checkOptions('lanes.list', options, { ...pageRules, queue: isText })
    const { limit, before: after } = pageFrom(options)
    const { items, nextCursor } = await lanePage(
      this.#intake,
      { queue: options.queue ?? null, queues: null },
      { limit, after },
    )
    return { items: items.map(({ report }) => report), nextCursor }
  }

  /** Unfinished operations of each of these lanes: one statement. */
  depths(lanes: readonly LaneName[]): Promise<number[]> {
    return this.#intake.store.laneDepths(lanes.map((lane) => laneOf(lane).id))
  }

  /** On every instance, until `resume`: operations are accepted and wait. What runs goes on. */
  async pause(which: Pausable): Promise<PauseState> {
    const [queue, partition] = pausedName('lanes.pause', which)
    await this.#intake.store.pause(queue, partition)
    return pauseState(this.#intake, queue, partition)
  }

  /** Of a queue: also its lanes that were paused alone. Of a lane: a pause of its whole queue stays, see `pausedBy`. */
  async resume(which: Pausable): Promise<PauseState> {
    const [queue, partition] = pausedName('lanes.resume', which)
    return resumeLanes(this.#intake, queue, partition)
  }
}

/** The store's name: a type is the partition of no queue. */
function pausedName(call: string, which: Pausable): [queue: string, partition: string | null] {
  checkOptions(call, which, pauseRules)
  const { queue, partition, type } = which
  if ((queue === undefined) === (type === undefined) || (type !== undefined && partition !== undefined)) {
    throw new OptionError(`${call}: give { queue }, { queue, partition } or { type }`)
  }
  return type === undefined ? [queue, partition ?? null] : ['', type]
}

export async function resumeLanes(intake: Intake, queue: string, partition: string | null): Promise<PauseState> {
  await intake.store.resume(queue, partition)
  intake.wakeAll()
  return pauseState(intake, queue, partition)
}

export async function pauseState({ store }: Intake, queue: string, partition: string | null): Promise<PauseState> {
  const by = await store.pausedBy(queue, partition)
  return { paused: by !== null, pausedBy: by !== null && queue === '' ? 'type' : by }
}

/** `queues`: names of the queues that the caller may see (`orders*`: a prefix); null: all. */
export async function lanePage(
  intake: Intake,
  filter: { queue: string | null; queues: readonly string[] | null },
  { limit, after }: { limit: number; after: string | null },
): Promise<Paged<{ id: string; report: LaneReport }>> {
  const found: LaneRow[] = []
  let from = after
  for (let statement = 0; statement < statementsMax; statement++) {
    const wanted = limit + 1 - found.length
    const page = { after: from, limit: wanted, examined: examinedMax }
    const { rows, last } = await intake.store.lanes(filter, page)
    found.push(...rows)
    from = rows.length === wanted ? null : last
    if (from === null) break
  }
  const lanes = found.slice(0, limit)
  const last = found.length > limit ? (lanes.at(-1)?.id ?? null) : from
  return {
    items: lanes.map((lane) => ({ id: lane.id, report: laneReport(lane, intake.freeSlots(lane.type)) })),
    nextCursor: last === null ? null : cursorOf(last),
  }
}

/** `free`: slots in all processes that run its type, as of the last heartbeat; null: none reported that it runs it. */
export function laneReport(lane: LaneRow, free: number | null): LaneReport {
  const { queue, partition, depth, pausedBy, isStarted } = lane
  return {
    ...{ queue, partition, depth, oldestAgeSeconds: lane.ageMs / 1_000, paused: pausedBy !== null, pausedBy },
    head: {
      id: lane.head,
      type: lane.type,
      status: isStarted ? 'processing' : 'pending',
      attempt: lane.attempts + (isStarted ? 1 : 0),
      maxAttempts: lane.maxAttempts,
      nextAttemptAt: lane.parkedFor === 'pause' ? null : lane.dueAt,
    },
    waitingBecause: waitingBecause(lane, free),
  }
}

function waitingBecause(lane: LaneRow, free: number | null): string | null {
  const { type, pausedBy, parkedFor, dueMs } = lane
  if (lane.isStarted) return null
  if (pausedBy === 'queue') return 'the queue is paused'
  if (pausedBy === 'partition') return 'the lane is paused'
  if (pausedBy === 'type') return `operations of type ${type} are paused`
  const isClaimed = !lane.isReady && parkedFor === null
  if (isClaimed) return null
  if (free === null) return `no running process has reported that it runs operations of type ${type}`
  if (parkedFor === 'turn') return 'as many operations of its key run as may; it waits for its turn'
  if (dueMs !== null && dueMs > 0) return dueLater(lane, Math.ceil(dueMs / 1_000))
  if (lane.label !== null) return 'it waits for one of the processes that can run its first operation'
  return free === 0 ? `all slots for operations of type ${type} are in use` : 'the next free slot takes it'
}

function dueLater({ parkedFor, attempts, maxAttempts }: LaneRow, seconds: number): string {
  if (parkedFor === 'delay') return `its first operation is delayed; it is due in ${seconds} s`
  // Put back without an attempt: the process that claimed it could not run it.
  if (attempts === 0) return `no process could run its first operation; the next try is in ${seconds} s`
  return `its first operation failed (attempt ${attempts} of ${maxAttempts}); the next attempt is in ${seconds} s`
}
