/** Pages of lists that are paged by offset. */
import { limits } from '@spillway/protocol/wire'
import { fitPage, type Pagination, paginationOf } from 'spillway/workload'
import type { AppReply } from '../../../app.js'

/** The requested page. */
export interface Asked {
  limit: number
  offset: number
}

/** Limit and offset of a page; the limit is capped at `most`. */
export function pageOf(
  { limit, offset = 0 }: { limit?: number; offset?: number },
  usual: number,
  most: number = limits.listEntriesMax,
): Asked {
  return { limit: Math.min(limit ?? usual, most), offset }
}

/** The part of a list that fits, and where it continues. `found` has one more than `limit` if there are more. */
export function offsetPage<Item>(
  found: readonly Item[],
  { limit, offset }: Asked,
  bytesMax: number,
  isCut = false,
): { items: Item[]; pagination: Pagination } {
  const page = fitPage(found, { limit, bytesMax }, (item) => item, isCut)
  return { items: page.items, pagination: paginationOf(limit, offset, page) }
}

/** For lists whose format has no field for the next page (RFC 8288). */
export function linkNext(reply: AppReply, url: string, { limit, nextOffset }: Pagination): void {
  if (nextOffset !== null) reply.header('link', `<${url}?limit=${limit}&offset=${nextOffset}>; rel="next"`)
}
