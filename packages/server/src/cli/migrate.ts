import { loadConfig } from '../config/index.js'
import { createLogger } from '../logs.js'
import { exitCodes } from './exit.js'
import type { Terminal } from './terminal.js'

/** Brings the schema up to date. Without DATABASE_URL the embedded server is started for the migration. */
export async function runMigrations(terminal: Terminal): Promise<number> {
  const { config } = loadConfig()
  const log = createLogger({ level: config.process.logLevel, destination: { write: terminal.err } })
  const { coreSql, migrate } = await import('spillway/workload')
  const { workloadSql } = await import('../workload-list.js')
  const { startEmbedded } = await import('@spillway/embedded-postgres')
  const embedded = config.store.url === null ? await startEmbedded({ dataDir: config.store.dataDir, log }) : null
  const url = config.store.url ?? embedded?.url
  if (url === undefined) throw new TypeError('the embedded server has no address')
  try {
    const sql = [coreSql, ...workloadSql]
    const { from, to } = await migrate({ url, schema: config.store.schema, sql, log })
    terminal.out(
      from === to
        ? `schema ${config.store.schema} is at version ${to}\n`
        : `schema ${config.store.schema}: version ${from} → ${to}\n`,
    )
  } finally {
    await embedded?.stop()
  }
  return exitCodes.done
}
