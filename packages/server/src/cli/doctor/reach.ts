import { findReach, isPinned, openPool, type Reach } from 'spillway/workload'
import { maskUrlPasswords } from '../../config/index.js'
import { codeOf, type Finding, hint, right, wrong } from './finding.js'

export type Database = ReturnType<typeof openPool>

const timeoutMs = 5_000

export function connectTo(url: string): Database {
  return openPool({
    url,
    max: 1,
    applicationName: 'spillway doctor',
    connectTimeoutMs: timeoutMs,
    queryTimeoutMs: timeoutMs,
  })
}

/** Checks for a pooler in front of the database, how wake-ups arrive, and what the role or database sets. */
export async function checkReach(
  client: Database,
  { url, listenUrl }: { readonly url: string; readonly listenUrl: string | null },
): Promise<Finding[]> {
  const reach = await findReach(url)
  const wakeUps = listenUrl === null ? judgeWakeUps(reach) : await checkListenUrl(client, listenUrl)
  return [judgeReach(reach), wakeUps, ...judgeSettings(await readSettings(client))]
}

export function judgeReach(reach: Reach): Finding {
  const detail = {
    direct: 'the server itself',
    session: 'a pooler in session mode: each connection of ours holds a session there for as long as it lasts',
    transaction: 'a pooler in transaction mode: settings travel with each transaction, nothing is prepared',
  }[reach]
  return right('connection', detail)
}

export function judgeWakeUps(reach: Reach): Finding {
  if (reach !== 'transaction') return right('wake-ups', 'LISTEN')
  const fix = 'set SPILLWAY_LISTEN_URL to a direct address of the same database'
  return hint('wake-ups', 'polling each second: the pooler cannot carry LISTEN', fix)
}

async function checkListenUrl(client: Database, listenUrl: string): Promise<Finding> {
  const name = 'wake-ups'
  const shown = maskUrlPasswords(listenUrl)
  const fix = 'SPILLWAY_LISTEN_URL must be a direct address of the database of DATABASE_URL'
  const direct = connectTo(listenUrl)
  try {
    if ((await findReach(listenUrl)) === 'transaction') {
      return wrong(name, `${shown} is a pooler in transaction mode, which cannot carry LISTEN`, fix)
    }
    const [there, here] = await Promise.all([identify(direct), identify(client)])
    if (there === here) {
      return right(name, `LISTEN on ${shown}`)
    }
    return wrong(name, `${shown} is another database`, fix)
  } catch (error) {
    return wrong(name, `${shown} cannot be reached (${codeOf(error)})`, fix)
  } finally {
    await direct.end()
  }
}

/** The same text for the same database of the same server. */
async function identify(pool: Database): Promise<string | undefined> {
  const { rows } = await pool.query<{ name: string }>(
    `SELECT extract(epoch FROM pg_postmaster_start_time())::text || ' ' || current_database() AS name`,
  )
  return rows[0]?.name
}

export interface OwnSetting {
  readonly name: string
  readonly value: string
}

/** Settings of this session that come from `ALTER ROLE … SET` and `ALTER DATABASE … SET`. */
async function readSettings(client: Database): Promise<OwnSetting[]> {
  const { rows } = await client.query<OwnSetting>(
    `SELECT name, current_setting(name) AS value FROM pg_settings
     WHERE source IN ('user', 'database', 'database user', 'global') ORDER BY name`,
  )
  return rows
}

/** Not pinned, because they may be intended. Each text says what the setting does here. */
const effects: Readonly<Record<string, string>> = {
  statement_timeout: 'statements that take longer are cancelled, cleaning up too',
  lock_timeout: 'statements that wait longer for a lock fail',
  transaction_timeout: 'transactions that take longer are ended, those of handlers too',
  idle_session_timeout: 'idle connections are closed and opened again',
  default_transaction_read_only: 'nothing can be accepted while it is on',
}

export function judgeSettings(own: readonly OwnSetting[]): Finding[] {
  const name = 'session settings'
  const show = (list: readonly OwnSetting[]): string => list.map((s) => `${s.name} = ${s.value}`).join(', ')
  const pinned = own.filter((setting) => isPinned(setting.name))
  const felt = own.filter((setting) => Object.hasOwn(effects, setting.name) && setting.value !== '0')
  const findings: Finding[] = []
  if (pinned.length > 0) {
    const detail = `${show(pinned)} of the role or database: without effect, our connections set their own`
    findings.push(right(name, detail))
  }
  for (const setting of felt) {
    const isReadOnly = setting.name === 'default_transaction_read_only'
    if (isReadOnly && setting.value !== 'on') continue
    findings.push({
      name,
      state: isReadOnly ? 'wrong' : 'hint',
      detail: `${show([setting])} of the role or database: ${effects[setting.name]}`,
      fix: `ALTER ROLE … RESET ${setting.name} (or ALTER DATABASE …), unless it is meant`,
    })
  }
  return findings
}
