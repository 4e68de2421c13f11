/** `intake.deadLetters`: reading, redriving and deleting them. The ticket routes of http/ use the same functions. */
import { isUuid } from '../core/ids.js'
import { check, checkOptions, isText, OptionError, type Rule, wholeNumber } from '../core/options.js'
import { cursorOf } from '../http/pages.js'
import type { DeadLetter, TicketFilter } from '../store/port.js'
import type { Definition } from './define.js'
import type { Intake } from './intake.js'
import {
  filterFrom,
  filterRules,
  type OperationFilter,
  type OperationReport,
  type Paged,
  type PageOptions,
  paged,
  pageFrom,
  pageRules,
  reportOf,
} from './tickets.js'

/** An operation that failed for good, with the body that it was submitted with. */
export interface DeadLetterReport<Body = unknown, Result = unknown> extends OperationReport<Result> {
  /** Null if a list leaves it out. */
  body: Body | null
  /** In lists: the bytes of a body of more than 4 KiB, which is left out. */
  bodyBytes?: number
}

/** These, or all that match: an empty filter means every dead letter. */
export type Which = { ids: readonly string[]; filter?: never } | { ids?: never; filter: OperationFilter }

export interface Redriven {
  moved: number
  /** Their capacity gate was full, or they were no dead letters any more. */
  skipped: number
  /** With a filter, where `limit` ended it: continue with this cursor. Null: all were processed. */
  nextCursor: string | null
}

/** At most this many are processed by one call. */
export const processedMax = 100_000
const batchSize = 500
const idsPerBatch = 1_000

const limit = wholeNumber(1, processedMax)
const isFilter: Rule = (value) =>
  typeof value === 'object' && value !== null && !Array.isArray(value) ? null : 'an object { queue, type, … }'
const isIds: Rule = (value) =>
  Array.isArray(value) && value.every((id) => typeof id === 'string') ? null : 'a list of ids'

/** The dead letters of all processes on this store. */
export class DeadLetterCalls {
  readonly #intake: Intake

  constructor(intake: Intake) {
    this.#intake = intake
  }

  /** Newest first. Results and bodies of more than 4 KiB are left out (`resultBytes`, `bodyBytes`); `get` has them. */
  async list<Body = unknown, Result = unknown>(
    options: OperationFilter & PageOptions = {},
    definition?: Definition<Body, Result>,
  ): Promise<Paged<DeadLetterReport<Body, Result>>> {
    checkOptions('deadLetters.list', options, { ...filterRules, ...pageRules })
    const { limit: most, before } = pageFrom(options)
    const filter = filterFrom('deadLetters.list', options, definition)
    return paged(await this.#intake.store.deadLetters(filter, most + 1, before), most, letterOf<Body, Result>)
  }

  /** Null if there is none with this id. */
  async get<Body = unknown, Result = unknown>(
    id: string,
    definition?: Definition<Body, Result>,
  ): Promise<DeadLetterReport<Body, Result> | null> {
    check('deadLetters.get', 'the id', id, isText)
    const letter = isUuid(id) ? await this.#intake.store.deadLetter(id) : null
    return letter === null || (definition !== undefined && letter.type !== definition.type) ? null : letterOf(letter)
  }

  /**
   * Back into their lanes, at the tail, in the order in which they were accepted, each once: a letter that fails again is not
   * moved again. `limit` is for a filter; default 100,000.
   */
  async redrive(which: Which & { limit?: number; cursor?: string | null }): Promise<Redriven> {
    const { limit: most = processedMax, cursor } = which
    const filter = whichOf('deadLetters.redrive', which, { limit, cursor: pageRules.cursor })
    if (which.ids !== undefined) return { ...(await redriveIds(this.#intake, which.ids)), nextCursor: null }
    return redriveAll(this.#intake, filter, most, pageFrom({ cursor: cursor ?? null }).before)
  }

  /** Deletes them for good. `limit` is for a filter; default 100,000. */
  async purge(which: Which & { limit?: number }): Promise<{ purged: number }> {
    const filter = whichOf('deadLetters.purge', which, { limit })
    if (which.ids === undefined) return { purged: await purgeAll(this.#intake, filter, which.limit ?? processedMax) }
    let purged = 0
    for (const some of batchesOf(which.ids)) purged += await this.#intake.store.purge(some)
    return { purged }
  }
}

function whichOf(call: string, which: Which, rules: Readonly<Record<string, Rule>>): TicketFilter {
  checkOptions(call, which, { ids: isIds, filter: isFilter, ...rules })
  const { ids, filter } = which
  if ((ids === undefined) === (filter === undefined)) {
    throw new OptionError(`${call}: give either ids or a filter; an empty filter means all`)
  }
  const loose = Object.entries(which).find(([name, value]) => name in rules && value !== undefined)
  if (ids !== undefined && loose !== undefined)
    throw new OptionError(`${call}: ${loose[0]} is for a filter, not for ids`)
  if (filter === undefined) return {}
  checkOptions(`${call}: filter`, filter, filterRules)
  return filterFrom(call, filter)
}

function letterOf<Body, Result>({ payload, payloadBytes, ...ticket }: DeadLetter): DeadLetterReport<Body, Result> {
  return {
    ...reportOf<Result>(ticket),
    body: payload === null ? null : (JSON.parse(payload) as Body),
    ...(payloadBytes !== undefined && { bodyBytes: payloadBytes }),
  }
}

/** In the order of acceptance, as the ids are; a batch is in the order of its lanes. */
function* batchesOf(ids: readonly string[]): Generator<string[]> {
  const known = [...new Set(ids.filter(isUuid).map((id) => id.toLowerCase()))].sort()
  for (let from = 0; from < known.length; from += idsPerBatch) yield known.slice(from, from + idsPerBatch)
}

/** `narrow`: only those of this filter. */
export async function redriveIds(
  intake: Intake,
  ids: readonly string[],
  narrow?: TicketFilter,
): Promise<{ moved: number; skipped: number }> {
  let moved = 0
  for (const some of batchesOf(ids)) {
    // A dead letter never changes its queue, so the ids found here stay within the caller's queues.
    const own =
      narrow === undefined ? some : await intake.store.deadLetterIds({ ...narrow, ids: some }, some.length, null)
    moved += (await redriveBatch(intake, own)).moved
  }
  return { moved, skipped: ids.length - moved }
}

/**
 * Processes them once, oldest first: one that dies again at once keeps its id and would otherwise be found first, and
 * redriven, again and again.
 */
export async function redriveAll(
  intake: Intake,
  filter: TicketFilter,
  most: number,
  from: string | null,
): Promise<Redriven> {
  let moved = 0
  let skipped = 0
  let after = from
  while (moved + skipped < most) {
    const size = Math.min(batchSize, most - moved - skipped)
    const ids = await intake.store.deadLetterIds(filter, size, after)
    const batch = await redriveBatch(intake, ids)
    moved += batch.moved
    skipped += ids.length - batch.moved
    if (ids.length < size) return { moved, skipped, nextCursor: null }
    after = ids.at(-1) ?? null
  }
  return { moved, skipped, nextCursor: after === null ? null : cursorOf(after) }
}

async function redriveBatch(intake: Intake, ids: readonly string[]): Promise<{ moved: number }> {
  if (ids.length === 0) return { moved: 0 }
  const { moved } = await intake.store.redrive(ids)
  if (moved > 0) intake.wakeAll()
  return { moved }
}

export async function purgeAll({ store }: Intake, filter: TicketFilter, most: number): Promise<number> {
  let purged = 0
  while (purged < most) {
    const ids = await store.deadLetterIds(filter, Math.min(batchSize, most - purged), null)
    if (ids.length === 0) break
    purged += await store.purge(ids)
  }
  return purged
}
