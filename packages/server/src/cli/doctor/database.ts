import { MigrationError, pendingSteps, readRecord, type SqlModule } from 'spillway/workload'
import { maskUrlPasswords } from '../../config/index.js'
import { codeOf, type Finding, hint, right, wrong } from './finding.js'
import { checkReach, connectTo, type Database } from './reach.js'

export async function checkDatabase(options: {
  readonly url: string
  readonly listenUrl: string | null
  readonly schema: string
  readonly sql: readonly SqlModule[]
}): Promise<Finding[]> {
  const client = connectTo(options.url)
  const name = 'database'
  const shown = maskUrlPasswords(options.url)
  try {
    await client.query('SELECT 1')
  } catch (error) {
    await client.end()
    const fix = 'check DATABASE_URL, that the server runs, and that it lets this user in'
    return [wrong(name, `${shown} cannot be reached (${codeOf(error)})`, fix)]
  }
  try {
    return [
      right(name, `${shown} answers`),
      ...(await checkReach(client, options)),
      ...judgeServer(await readServer(client)),
      await checkSchema(client, options),
    ]
  } catch (error) {
    return [wrong(name, `${shown} failed (${codeOf(error)})`, "see the server's log")]
  } finally {
    await client.end()
  }
}

export interface ServerFacts {
  readonly versionNumber: number
  readonly version: string
  readonly encoding: string
  /** The database's clock minus ours. */
  readonly skewMs: number
  readonly fsync: string
  readonly synchronousCommit: string
  readonly fullPageWrites: string
  readonly autovacuum: string
  readonly naptimeSeconds: number
}

async function readServer(client: Database): Promise<ServerFacts> {
  const before = Date.now()
  const { rows } = await client.query<Omit<ServerFacts, 'skewMs'> & { nowMs: number }>(
    `SELECT current_setting('server_version_num')::int AS "versionNumber",
            current_setting('server_version') AS version,
            current_setting('server_encoding') AS encoding,
            extract(epoch FROM clock_timestamp())::float8 * 1000 AS "nowMs",
            current_setting('fsync') AS fsync,
            current_setting('synchronous_commit') AS "synchronousCommit",
            current_setting('full_page_writes') AS "fullPageWrites",
            current_setting('autovacuum') AS autovacuum,
            extract(epoch FROM current_setting('autovacuum_naptime')::interval)::int AS "naptimeSeconds"`,
  )
  const [row] = rows
  if (row === undefined) throw new TypeError('the server answered without a row')
  // The answer was made at about the middle of the round trip.
  return { ...row, skewMs: row.nowMs - (before + Date.now()) / 2 }
}

const skewMaxMs = 1_000
const naptimeMaxSeconds = 15

export function judgeServer(facts: ServerFacts): Finding[] {
  const skew = `${Math.round(facts.skewMs)} ms from the database's`
  return [
    facts.versionNumber >= 150_000
      ? right('version', `PostgreSQL ${facts.version}`)
      : wrong('version', `PostgreSQL ${facts.version}`, 'use PostgreSQL 15 or newer'),
    facts.encoding === 'UTF8'
      ? right('encoding', 'UTF8')
      : wrong('encoding', facts.encoding, "make the database with ENCODING 'UTF8'"),
    judgeDurability(facts),
    Math.abs(facts.skewMs) <= skewMaxMs
      ? right('clock', skew)
      : hint('clock', `${skew}, which decides; log lines will not line up`, 'run NTP on both machines'),
    judgeVacuum(facts),
  ]
}

/** A 2xx promises that a power cut loses nothing. With one of these off, Spillway cannot keep that promise. */
function judgeDurability({ fsync, synchronousCommit, fullPageWrites }: ServerFacts): Finding {
  const commit = synchronousCommit === 'off' ? 'off, which our connections set to on' : synchronousCommit
  const detail = `fsync ${fsync}, full_page_writes ${fullPageWrites}, synchronous_commit ${commit}`
  if (fsync === 'on' && fullPageWrites === 'on') return right('durability', detail)
  const fix = 'ALTER SYSTEM SET them to on, then SELECT pg_reload_conf()'
  return wrong('durability', `${detail}: a crash can lose accepted work`, fix)
}

function judgeVacuum({ autovacuum, naptimeSeconds }: ServerFacts): Finding {
  const name = 'autovacuum'
  if (autovacuum !== 'on') return wrong(name, 'off: the tables grow for ever', 'ALTER SYSTEM SET autovacuum = on')
  if (naptimeSeconds <= naptimeMaxSeconds) return right(name, `every ${naptimeSeconds} s`)
  return hint(
    name,
    `every ${naptimeSeconds} s: under steady load the queue's tables grow between two runs`,
    "ALTER SYSTEM SET autovacuum_naptime = '5s', then SELECT pg_reload_conf()",
  )
}

async function checkSchema(
  client: Database,
  { schema, sql }: { readonly schema: string; readonly sql: readonly SqlModule[] },
): Promise<Finding> {
  const name = 'schema'
  const fix = 'run spillway migrate, or start the server, which does it too'
  try {
    const recorded = await readRecord(client, schema)
    if (recorded === null) return hint(name, `${schema} is not made yet`, fix)
    const pending = pendingSteps(recorded, sql)
    const total = sql.reduce((n, module) => n + module.tables.length, 0)
    const applied = total - pending.filter(({ kind }) => kind === 'table').length
    const detail = `${schema} is at version ${applied} of ${total}`
    if (pending.length === 0) return right(name, detail)
    return hint(name, applied < total ? detail : `${detail}; its functions are of another build`, fix)
  } catch (error) {
    if (!(error instanceof MigrationError)) throw error
    const way = error.code === 'legacy' ? 'see above' : 'run the release that made this schema, or a newer one'
    return wrong(name, error.message, way)
  }
}
