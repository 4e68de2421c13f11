/** `intake.tickets`: reading, waiting for, cancelling and retrying operations. The ticket routes of http/ use the same functions. */
import { limits, type OperationStatus, operationStatuses } from '@spillway/protocol/wire'
import { isUuid } from '../core/ids.js'
import { reportsOf, type StatusReport } from '../core/operation-status.js'
import { check, checkOptions, isText, OptionError, oneOf, type Rule, timerMsMax, wholeNumber } from '../core/options.js'
import { cursorOf, idOfCursor } from '../http/pages.js'
import type { Ticket, TicketFilter } from '../store/port.js'
import type { Definition } from './define.js'
import type { Intake } from './intake.js'

/** An operation, as `GET /api/v1/operations/:id` shows it. `Result` is what the handler returns, after JSON. */
export interface OperationReport<Result = unknown> extends Omit<Ticket, 'attempts' | 'trace' | 'result'> {
  /** Attempts so far, including one that runs: 0 before the first. */
  attempt: number
  /** Null until it is completed, and for a handler without a result. */
  result: Result | null
  traceparent: string
}

export interface OperationFilter {
  type?: string
  queue?: string
  partition?: string
  identity?: string
  /** Accepted at this time or later; a text is RFC 3339. */
  from?: Date | string
  /** Accepted before this time. */
  to?: Date | string
}

export interface PageOptions {
  /** 1 to 200. Default 50. */
  limit?: number
  /** `nextCursor` of the page before. */
  cursor?: string | null
}

export interface Paged<Item> {
  items: Item[]
  /** Null: this is the last page. */
  nextCursor: string | null
}

export interface ListOptions extends OperationFilter, PageOptions {
  status?: OperationStatus
}

export interface WaitOptions {
  /** Default 60,000. */
  timeoutMs?: number
  /** Ends the wait: it rejects with the signal's reason. */
  signal?: AbortSignal
}

/**
 * `cancelled`: it will not run. `asked`: it runs, and its handler is asked to stop. `running`: it runs and cannot be stopped.
 * `finished`: it ended before.
 */
export type CancelResult = 'cancelled' | 'asked' | 'running' | 'finished' | 'unknown'

/**
 * `retried`: it waits in its lane again. `answered`: its caller was answered with the failure, so there is no dead letter to
 * retry. `capacity_full`: its capacity gate has no room now; it is still a dead letter.
 */
export type RetryResult = 'retried' | 'not_failed' | 'answered' | 'capacity_full' | 'unknown'

const waitMsDefault = 60_000
/** How long a handler that was asked to stop is waited for. */
const askedMs = 2_000
const pageLimitDefault = 50

const isInstant: Rule = (value) =>
  (value instanceof Date || typeof value === 'string') && !Number.isNaN(new Date(value).getTime())
    ? null
    : 'a Date or an RFC 3339 text'

export const filterRules: Record<keyof OperationFilter, Rule> = {
  type: isText,
  queue: isText,
  partition: isText,
  identity: isText,
  from: isInstant,
  to: isInstant,
}

const isCursor: Rule = (value) =>
  value === null || (typeof value === 'string' && idOfCursor(value) !== null) ? null : 'nextCursor of the page before'

export const pageRules: Record<keyof PageOptions, Rule> = {
  limit: wholeNumber(1, limits.listItemsMax),
  cursor: isCursor,
}

const listRules: Record<keyof ListOptions, Rule> = {
  ...filterRules,
  ...pageRules,
  status: oneOf(...operationStatuses),
}

const waitRules: Record<keyof WaitOptions, Rule> = {
  timeoutMs: wholeNumber(0, timerMsMax),
  signal: (value) => (value instanceof AbortSignal ? null : 'an AbortSignal'),
}

const isDefinition: Rule = (value) =>
  typeof value === 'object' && value !== null && 'type' in value && typeof value.type === 'string'
    ? null
    : 'what define returns'

/** The tickets of all processes on this store. Checks nobody's rights: that is for the ticket routes, or for you. */
export class TicketCalls {
  readonly #intake: Intake

  constructor(intake: Intake) {
    this.#intake = intake
  }

  /** Null if it is unknown, or its retention is over. With a definition the result is typed, and others are unknown. */
  async get<Result = unknown>(
    id: string,
    definition?: Definition<unknown, Result>,
  ): Promise<OperationReport<Result> | null> {
    const ticket = await this.#find('tickets.get', id, definition)
    return ticket === null ? null : reportOf(ticket)
  }

  /**
   * Resolves when it is finished, or when the time is up with its state at that time: see `status`. Null if it is unknown.
   */
  async wait<Result = unknown>(
    id: string,
    options: WaitOptions = {},
    definition?: Definition<unknown, Result>,
  ): Promise<OperationReport<Result> | null> {
    checkOptions('tickets.wait', options, waitRules)
    const { timeoutMs = waitMsDefault, signal } = options
    signal?.throwIfAborted()
    const ticket = await this.#find('tickets.wait', id, definition)
    if (ticket === null) return null
    const seen = await finishedWithin(this.#intake, ticket, timeoutMs, signal)
    signal?.throwIfAborted()
    return reportOf(seen)
  }

  /**
   * Takes it out of its lane, or asks its handler to stop (`abortable`), and then waits up to 2 s for the handler. `why` is
   * shown as its error.
   */
  async cancel(
    id: string,
    options: { why?: string } = {},
  ): Promise<{ outcome: CancelResult; report: OperationReport | null }> {
    checkOptions('tickets.cancel', options, { why: isText })
    const ticket = await this.#find('tickets.cancel', id)
    if (ticket === null) return { outcome: 'unknown', report: null }
    const { outcome, ticket: now } = await cancelTicket(this.#intake, ticket, options.why ?? 'cancelled by request')
    return { outcome, report: reportOf(now) }
  }

  /** Puts a failed one back in its lane, at the tail, with all attempts. */
  async retry(id: string): Promise<{ outcome: RetryResult; report: OperationReport | null }> {
    const ticket = await this.#find('tickets.retry', id)
    if (ticket === null) return { outcome: 'unknown', report: null }
    const { outcome, ticket: now } = await retryTicket(this.#intake, ticket)
    return { outcome, report: now === null ? null : reportOf(now) }
  }

  /** Newest first. Results of more than 4 KiB are left out (`resultBytes`); `get` has them. */
  async list<Result = unknown>(
    options: ListOptions = {},
    definition?: Definition<unknown, Result>,
  ): Promise<Paged<OperationReport<Result>>> {
    checkOptions('tickets.list', options, listRules)
    const { limit, before } = pageFrom(options)
    const filter = {
      ...filterFrom('tickets.list', options, definition),
      ...(options.status && { status: options.status }),
    }
    const tickets = await this.#intake.store.tickets(filter, limit + 1, before)
    return paged(tickets, limit, reportOf<Result>)
  }

  /** In brief, with an estimate of the wait, in the order of the ids: one statement for up to 2,000. */
  statusOf(ids: readonly string[]): Promise<StatusReport[]> {
    return reportsOf(this.#intake.store, (type) => this.#intake.slotsOf(type), ids)
  }

  async #find(call: string, id: string, definition?: Definition): Promise<Ticket | null> {
    check(call, 'the id', id, isText)
    if (definition !== undefined) check(call, 'the definition', definition, isDefinition)
    const ticket = isUuid(id) ? await this.#intake.store.ticket(id) : null
    return ticket === null || (definition !== undefined && ticket.type !== definition.type) ? null : ticket
  }
}

export function reportOf<Result = unknown>({ attempts, trace, result, ...ticket }: Ticket): OperationReport<Result> {
  return {
    ...ticket,
    attempt: attempts + (ticket.status === 'processing' ? 1 : 0),
    result: (result ?? null) as Result | null,
    traceparent: trace,
  }
}

/** After `checkOptions` with `pageRules`. */
export function pageFrom({ limit = pageLimitDefault, cursor }: PageOptions): { limit: number; before: string | null } {
  return { limit, before: cursor == null ? null : idOfCursor(cursor) }
}

/** `rows` has one row more than the page if there are more. */
export function paged<Row extends { id: string }, Item>(
  rows: readonly Row[],
  limit: number,
  itemOf: (row: Row) => Item,
): Paged<Item> {
  const page = rows.slice(0, limit)
  const last = rows.length > limit ? page.at(-1) : undefined
  return { items: page.map(itemOf), nextCursor: last === undefined ? null : cursorOf(last.id) }
}

/** After `checkOptions` with `filterRules`. */
export function filterFrom(call: string, options: OperationFilter, definition?: Definition): TicketFilter {
  const { type, queue, partition, identity, from, to } = options
  if (definition !== undefined) {
    check(call, 'the definition', definition, isDefinition)
    if (type !== undefined) throw new OptionError(`${call}: give a type or a definition, not both`)
  }
  const own = definition?.type ?? type
  return {
    ...(own !== undefined && { type: own }),
    ...(queue !== undefined && { queue }),
    ...(partition !== undefined && { partition }),
    ...(identity !== undefined && { identity }),
    ...(from !== undefined && { from: new Date(from) }),
    ...(to !== undefined && { to: new Date(to) }),
  }
}

const isFinished = (ticket: Ticket): boolean => ticket.finishedAt !== null

/** The ticket once it is finished, or as it is when the time is up or the signal fires. */
export async function finishedWithin(
  { store, waiters }: Intake,
  ticket: Ticket,
  timeoutMs: number,
  signal?: AbortSignal,
): Promise<Ticket> {
  if (timeoutMs === 0 || isFinished(ticket)) return ticket
  const finished = await waiters.wait(ticket.id, timeoutMs, signal)
  return finished ?? (await store.ticket(ticket.id)) ?? ticket
}

export async function cancelTicket(
  intake: Intake,
  ticket: Ticket,
  why: string,
): Promise<{ outcome: Exclude<CancelResult, 'unknown'>; ticket: Ticket }> {
  const outcome = await intake.cancel(ticket.id, why)
  if (outcome === 'asked') {
    const now = await intake.waiters.wait(ticket.id, askedMs)
    return { outcome: now?.status === 'cancelled' ? 'cancelled' : 'asked', ticket: now ?? ticket }
  }
  const now = (await intake.store.ticket(ticket.id)) ?? ticket
  return { outcome: outcome === 'gone' ? 'finished' : outcome, ticket: now }
}

export async function retryTicket(
  intake: Intake,
  ticket: Ticket,
): Promise<{ outcome: RetryResult; ticket: Ticket | null }> {
  if (ticket.status !== 'failed') return { outcome: 'not_failed', ticket }
  const { moved } = await intake.store.redrive([ticket.id])
  if (moved > 0) intake.wakeAll()
  const now = await intake.store.ticket(ticket.id)
  if (moved > 0) return { outcome: 'retried', ticket: now ?? ticket }
  if (now === null) return { outcome: 'unknown', ticket: null }
  // Another request was faster, or its capacity gate is full.
  if (now.status !== 'failed') return { outcome: 'not_failed', ticket: now }
  const letter = await intake.store.deadLetter(ticket.id)
  return { outcome: letter === null ? 'answered' : 'capacity_full', ticket: now }
}
