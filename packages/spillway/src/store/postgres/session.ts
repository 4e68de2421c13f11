/**
 * The session settings that our statements, and the driver that reads their answers, depend on. A role or a database may
 * have others (`ALTER ROLE … SET datestyle`), so every connection pins them. None is a startup option, which PgBouncer
 * refuses:
 *
 *   direct, or a pooler in session mode   once, before the first statement of a connection
 *   a pooler in transaction mode          in each transaction, locally: the next one may run on another connection
 */
export type Settings = Readonly<Record<string, string>>

const pinned: Settings = {
  // The driver reads dates, numbers and bytes in these forms only.
  DateStyle: 'ISO, YMD',
  IntervalStyle: 'postgres',
  TimeZone: 'UTC',
  extra_float_digits: '1',
  bytea_output: 'hex',
  // Our texts and array literals need these.
  standard_conforming_strings: 'on',
  array_nulls: 'on',
  row_security: 'on',
  default_transaction_isolation: 'read committed',
  // Every statement is short: a compiled plan only costs time.
  jit: 'off',
  plan_cache_mode: 'auto',
}

/** Operators may choose among the other values (standbys); off would lose operations that were answered with 2xx. */
const durable = `CASE current_setting('synchronous_commit') WHEN 'off' THEN 'on' ELSE current_setting('synchronous_commit') END`

/** Whether we override a role's or a database's own value. */
export function isPinned(name: string): boolean {
  return name === 'synchronous_commit' || Object.keys(pinned).some((own) => own.toLowerCase() === name.toLowerCase())
}

const literal = (text: string): string => `'${text.replaceAll("'", "''")}'`

/** One statement that sets all. `local`: until the end of the transaction. */
export function pinSql(own: Settings, options: { local: boolean }): string {
  const { synchronous_commit: commit, ...rest } = { ...pinned, ...own }
  const values = Object.entries(rest).map(([name, value]) => [name, literal(value)] as const)
  const all = [...values, ['synchronous_commit', commit === undefined ? durable : literal(commit)] as const]
  return `SELECT ${all.map(([name, value]) => `set_config('${name}', ${value}, ${options.local})`).join(', ')}`
}

/** A handler may have changed its session, and the next statement on its connection may be one of ours. */
export const resetSql = `RESET ALL; RESET ROLE; ${pinSql({}, { local: false })}`

export const beginSql = 'BEGIN ISOLATION LEVEL READ COMMITTED'
