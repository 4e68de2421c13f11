/**
 * SQL for pages of lists. The database leaves out what is long, so that it never reaches this process:
 *
 * - A payload, result or text of more than 4 KiB is left out, its size is given instead (`listedSql`, `leftOutSql`). Two hundred
 *   such rows are small.
 * - Rows that lists carry whole and that can be large end with a running sum of their bytes (`pageSql`). It says whether rows
 *   were withheld, as the caller cannot tell: it cuts again, by the bytes of the items as they are sent (http/pages.ts).
 */
import { limits } from '@spillway/protocol/wire'

const bytesMax = limits.listPayloadBytes
/** What a list shows of an error text that is too long. */
const errorCharacters = 1_000

/** The column, or null where its size (`bytes`, SQL) is more than a list carries. */
export const listedSql = (column: string, bytes: string): string =>
  `CASE WHEN ${bytes} > ${bytesMax} THEN NULL ELSE ${column} END`

/** The size of what `listedSql` leaves out; null where it leaves out nothing. */
export const leftOutSql = (bytes: string): string => `CASE WHEN ${bytes} > ${bytesMax} THEN ${bytes} END`

/** An error text, or the beginning of one that is too long. */
export const listedErrorSql = (column: string): string =>
  `CASE WHEN octet_length(${column}) > ${bytesMax} THEN left(${column}, ${errorCharacters}) || '…' ELSE ${column} END`

/**
 * The first of `rows`, a SELECT with a column `bytes`, until they have more than `max` bytes (SQL): one at least. `order` is
 * that of the rows, with `r.` before its columns. `cut` of the last one is true if others were withheld behind it.
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
  /** Others were withheld behind them. */
  isCut: boolean
}

export function cutRows<Row extends { cut: boolean }, View>(
  rows: readonly Row[],
  viewOf: (row: Row) => View,
): CutRows<View> {
  return { rows: rows.map(viewOf), isCut: rows.at(-1)?.cut === true }
}
