/**
 * A statement behind a pooler in transaction mode: `BEGIN`, the settings, the statement and `COMMIT` with one Sync at the
 * end, so that all of it is one round trip and one transaction, on one session. The driver sends one query at a time and
 * waits for it; to the driver this is one query with four parts, and it sees the answer of the third.
 *
 * An error in any part makes the server skip the rest up to the Sync and leaves a failed transaction, which `queryPinned`
 * ends before the connection is released.
 */
import pg from 'pg'
// @ts-expect-error: the driver's types lack it; fixed in the pinned version
import { prepareValue } from 'pg/lib/utils.js'
import { withDeadline } from '../../time/with-deadline.js'
import type { ConnectionSource } from './borrowed-pool.js'
import { toStoreFault } from './faults.js'
import { beginSql } from './session.js'

/** Members of the driver's Query that its types lack; fixed in the pinned version. */
interface DriverConnection {
  stream: { cork(): void; uncork(): void }
  parse(message: { text: string }): void
  bind(message: object): void
  execute(message: object): void
  sync(): void
}
interface DriverQuery {
  handleDataRow(message: unknown): void
  handleCommandComplete(message: unknown, connection: DriverConnection): void
  prepare(connection: DriverConnection): void
}
type Done = (error: Error | null | undefined, result?: unknown) => void
const Query = pg.Query as unknown as new (config: QueryConfig, values: undefined, done: Done) => DriverQuery

export interface QueryConfig {
  text: string
  values?: unknown[]
  rowMode?: 'array'
  /** Prepared under this name, where the connection is a session. */
  name?: string
  query_timeout?: number
  /** Default: the connection's. */
  types?: pg.CustomTypesConfig
}

export interface Result<Row> {
  rows: Row[]
  rowCount: number | null
}

const rollbackMs = 2_000

/** The statement's index: BEGIN, the settings, the statement, COMMIT. */
const ours = 2

class PinnedQuery extends Query {
  readonly #pins: string
  /** Read by the driver. */
  readonly query_timeout: number | undefined
  #part = 0

  constructor(config: QueryConfig, pins: string, done: Done) {
    // Older drivers, in a pool of the user, take values as texts only.
    super({ ...config, ...(config.values && { values: config.values.map(prepareValue) }) }, undefined, done)
    this.#pins = pins
    this.query_timeout = config.query_timeout
  }

  submit(connection: DriverConnection): null {
    connection.stream.cork()
    try {
      execute(connection, beginSql)
      execute(connection, this.#pins)
      this.prepare(connection)
    } finally {
      connection.stream.uncork()
    }
    return null
  }

  /** Called by `prepare`, with the statement bound and described. */
  _getRows(connection: DriverConnection): void {
    connection.execute({ portal: '' })
    execute(connection, 'COMMIT')
    connection.sync()
  }

  override handleDataRow(message: unknown): void {
    if (this.#part === ours) super.handleDataRow(message)
  }

  override handleCommandComplete(message: unknown, connection: DriverConnection): void {
    if (this.#part++ === ours) super.handleCommandComplete(message, connection)
  }
}

function execute(connection: DriverConnection, text: string): void {
  connection.parse({ text })
  connection.bind({})
  connection.execute({})
}

/** `pins`: local, from `pinSql`. */
export async function queryPinned<Row>(
  pool: ConnectionSource,
  config: QueryConfig,
  pins: string,
): Promise<Result<Row>> {
  const client = await pool.connect()
  let result: Result<Row>
  try {
    result = await new Promise((resolve, reject) => {
      const done: Done = (error, answer) => (error ? reject(error) : resolve(answer as Result<Row>))
      const query: pg.Submittable = new PinnedQuery(config, pins, done) as never
      client.query(query)
    })
  } catch (error) {
    const { code } = toStoreFault(error)
    if (code === 'unavailable' || code === 'timeout') client.release(true)
    // Without the rollback the pooler would have to discard the session.
    else {
      const late = (): never => {
        throw error
      }
      await withDeadline(client.query('ROLLBACK'), config.query_timeout ?? rollbackMs, late).then(
        () => client.release(),
        () => client.release(true),
      )
    }
    throw error
  }
  client.release()
  return result
}
