/**
 * SQL for pages of lists. The database leaves out long values, so that they never reach this process:
 *
 * - A payload, result or text of more than 4 KiB is left out, its size is given instead (`listedSql`, `leftOutSql`). Two hundred
 *   such rows are small.
 * - Rows that lists show whole and that can be large end with a running sum of their bytes (`pageSql`). It says whether rows
 *   were withheld. The caller cannot know: it cuts again, by the bytes of the items as they are sent (http/pages.ts).
 */
import { limits } from '@spillway/protocol/wire'

const bytesMax = limits.listPayloadBytes
/** How much of a long error text a list shows. */
const errorCharacters = 1_000

/** The column, or null if its size (`bytes`, SQL) is more than a list shows. */
export const listedSql = (column: string, bytes: string): string =>
  `CASE WHEN ${bytes} > ${bytesMax} THEN NULL ELSE ${column} END`

/** The size of a value that `listedSql` leaves out; null if it leaves out nothing. */
export const leftOutSql = (bytes: string): string => `CASE WHEN ${bytes} > ${bytesMax} THEN ${bytes} END`

/** An error text, or the beginning of a long one. */
export const listedErrorSql = (column: string): string =>
  `CASE WHEN octet_length(${column}) > ${bytesMax} THEN left(${column}, ${errorCharacters}) || '…' ELSE ${column} END`

/**
 * The first of `rows`, a SELECT with a column `bytes`, until they exceed `max` bytes (SQL); at least one. `order` is that of
 * the rows, with `r.` before its columns. `cut` of the last one is true if more rows were withheld.
 */
export function pageSql(rows: string, order: string, max: string): string {
  return `SELECT r.*, r.upto > ${max} AND r.follows AS cut FROM (
      SELECT r.*, sum(r.bytes) OVER w AS upto, lead(true, 1, false) OVER w AS follows FROM (${rows}) r
      WINDOW w AS (ORDER BY ${order} ROWS BETWEEN UNBOUNDED PRECEDING AND CURRENT ROW)
    ) r WHERE r.upto - r.bytes <= ${max} ORDER BY ${order}`
}

/** Rows of `pageSql`. */
export interface CutRows<Row> {
  rows: Row[]
  /** More rows were withheld. */
  isCut: boolean
}

export function cutRows<Row extends { cut: boolean }, View>(
  rows: readonly Row[],
  viewOf: (row: Row) => View,
): CutRows<View> {
  return { rows: rows.map(viewOf), isCut: rows.at(-1)?.cut === true }
}
