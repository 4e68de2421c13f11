/** Shared by the administration routes. */
import { Problem } from '@spillway/protocol/schema'
import { limits } from '@spillway/protocol/wire'
import {
  fitPage,
  mayUseQueue,
  type Page,
  type Pagination,
  ProblemError,
  paginationOf,
  sendProblem,
} from 'spillway/workload'
import type { TSchema } from 'typebox'
import type { AppReply as Reply, AppRequest as Request } from '../../http/app.js'
import type { Role } from '../../http/identity.js'
import type { Administration } from './administration.js'
import type { Visible } from './visible-queues.js'

export interface AdministrationHooks {
  /** Wakes waiting pops: the queue may have messages. */
  wake(queue: string): void
  maintenance: {
    on(): Promise<void>
    off(): Promise<void>
    state(): Promise<{ maintenanceMode: boolean; bufferedMessages: number }>
  }
}

type RouteConfig = { errorForm: true; role: Role | readonly Role[]; wholeServer?: true }

export interface AdministrationSetting {
  administration: Administration
  hooks: AdministrationHooks
  /** Changes queues, groups and messages. */
  operate: RouteConfig
  /** Readable by operators and viewers. */
  view: RouteConfig
  /** Readable by consumers too. */
  read: RouteConfig
  /** Writable by consumers. */
  consume: RouteConfig
  visible(request: Request): Visible
  mayUse(request: Request, queue: string): boolean
  /** A page of a list ends at this size. */
  pageBytesMax: number
}

export function administrationSetting(
  administration: Administration,
  hooks: AdministrationHooks,
  pageBytesMax: number,
): AdministrationSetting {
  const visible = (request: Request): Visible => request.principal.queues ?? null
  return {
    administration,
    hooks,
    operate: { errorForm: true, role: 'operate' },
    view: { errorForm: true, role: 'view' },
    read: { errorForm: true, role: ['consume', 'view'] },
    consume: { errorForm: true, role: 'consume' },
    visible,
    mayUse: (request, queue) => mayUseQueue(visible(request) ?? undefined, queue),
    pageBytesMax,
  }
}

export const tags = ['messages']

/** The answer's schema, for the API description. The answer is not cut to it. */
export const answers = (schema: TSchema, status: 200 | 201 = 200): Record<string, TSchema> => ({
  [status]: schema,
  '4xx': Problem,
  '5xx': Problem,
})

/** Something of another identity looks as if it did not exist. */
export function notFound(reply: Reply, what: string): Reply {
  return sendProblem(reply, { code: 'not_found', detail: `There is no such ${what}.` })
}

/** Limit and offset of a page; the limit is capped at `most`. */
export function pageOf(
  { limit, offset = 0 }: { limit?: number; offset?: number },
  usual: number,
  most: number = limits.listEntriesMax,
): { limit: number; offset: number } {
  return { limit: Math.min(limit ?? usual, most), offset }
}

/** The requested page. */
export interface Asked {
  limit: number
  offset: number
}

/** The part of an offset-paged list that fits, and where it continues. `found` has one more than `limit` if there are more. */
export function offsetPage<Item>(
  found: readonly Item[],
  { limit, offset }: Asked,
  bytesMax: number,
  isCut = false,
): { items: Item[]; pagination: Pagination } {
  const page: Page<Item, Item> = fitPage(found, { limit, bytesMax }, (item) => item, isCut)
  return { items: page.items, pagination: paginationOf(limit, offset, page) }
}

/** For lists whose format has no field for the next page (RFC 8288). */
export function linkNext(reply: Reply, url: string, { limit, nextOffset }: Pagination): void {
  if (nextOffset !== null) reply.header('link', `<${url}?limit=${limit}&offset=${nextOffset}>; rel="next"`)
}

const uuid = /^[0-9a-f]{8}-[0-9a-f]{4}-[0-9a-f]{4}-[0-9a-f]{4}-[0-9a-f]{12}$/i
export const isUuid = (text: string): boolean => uuid.test(text)

/** The range that PostgreSQL and a four-digit year can both express; a time zone offset may leave it. */
const earliest = new Date('0001-01-01T00:00:00Z')
const latest = new Date('9999-12-31T23:59:59.999Z')

/** For a text with the form of a timestamp. A leap second has that form, but a Date cannot express it. */
export function instant(name: string, text: string): Date {
  const date = new Date(text)
  if (!(date >= earliest && date <= latest)) throw invalid(name, 'is not a point in time from the years 1 to 9999')
  return date
}

export const instantOrNull = (name: string, text: string | null | undefined): Date | null =>
  text === undefined || text === null ? null : instant(name, text)

export function invalid(name: string, message: string): ProblemError {
  return new ProblemError({
    code: 'invalid_request',
    detail: 'The request is not valid.',
    errors: [{ path: name === '' ? '' : `/${name}`, message }],
  })
}
