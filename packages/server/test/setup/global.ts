import { randomBytes } from 'node:crypto'
import { mkdtempSync, rmSync } from 'node:fs'
import { chmod } from 'node:fs/promises'
import { tmpdir } from 'node:os'
import { join } from 'node:path'
import { startEmbedded } from '@spillway/embedded-postgres'
import type { TestProject } from 'vitest/node'
import { postgresStore } from '../../../spillway/src/store/postgres/store.js'
import { administer } from '../../../spillway/test/setup/administer.js'
import { type PgBouncer, startPgBouncer } from '../../../spillway/test/setup/pgbouncer.js'
import { workloadSql } from '../../src/workload-list.js'

declare module 'vitest' {
  export interface ProvidedContext {
    /** A database with the right to make others; see database.ts. */
    databaseUrl: string
    /** A database that is migrated already, to make copies of: migrating takes ten times as long as copying. */
    templateDatabase: string
    /** Where servers under test find their database instead, by way of a pooler; 0 without one. */
    poolerPort: number
  }
}

const silent = { info: () => undefined, warn: () => undefined, error: () => undefined }

/**
 * One server for the whole run: SPILLWAY_TEST_DATABASE_URL, or an embedded one in a folder that goes with it. With
 * SPILLWAY_TEST_POOLER=session or transaction the servers under test reach it through a PgBouncer.
 */
export default async function setup(project: TestProject): Promise<() => Promise<void>> {
  const stopDatabase = await setupDatabase(project)
  const pooler = await startPooler(project.getProvidedContext().databaseUrl)
  project.provide('poolerPort', pooler?.port ?? 0)
  return async () => {
    await pooler?.stop()
    await stopDatabase()
  }
}

async function startPooler(url: string): Promise<PgBouncer | undefined> {
  const mode = process.env.SPILLWAY_TEST_POOLER
  if (!mode) return undefined
  if (mode !== 'session' && mode !== 'transaction') throw new Error(`SPILLWAY_TEST_POOLER is session or transaction`)
  // In session mode each connection of a process needs a session of its own.
  return startPgBouncer({ url, mode, poolSize: mode === 'session' ? 150 : 20 })
}

async function setupDatabase(project: TestProject): Promise<() => Promise<void>> {
  const given = process.env.SPILLWAY_TEST_DATABASE_URL
  if (given) {
    project.provide('databaseUrl', given)
    const template = await makeTemplate(given)
    project.provide('templateDatabase', template)
    return () => administer(given, `DROP DATABASE IF EXISTS ${template} WITH (FORCE)`)
  }
  const dir = mkdtempSync(join(tmpdir(), 'spillway-test-'))
  await chmod(dir, 0o755)
  const server = await startEmbedded({
    dataDir: join(dir, 'data'),
    log: silent,
    settings: { min_wal_size: '80MB', max_wal_size: '1GB', shared_buffers: '128MB' },
  })

  // A run that is cut short gets no teardown and may not wait: the server's data is worth nothing, so it has to
  // quit at once.
  const cutShort = () => {
    try {
      process.kill(server.pid, 'SIGQUIT')
    } catch (error) {
      if (!(error instanceof Error && 'code' in error && error.code === 'ESRCH')) throw error
    }
    rmSync(dir, { recursive: true, force: true, maxRetries: 10, retryDelay: 100 })
  }
  const onSignal = (signal: NodeJS.Signals) => {
    process.exitCode = signal === 'SIGINT' ? 130 : 143
    process.exit()
  }
  process.once('exit', cutShort)
  // Vitest handles SIGINT itself (it cancels the run, then tears down); these have no other listener.
  process.once('SIGTERM', onSignal)
  process.once('SIGHUP', onSignal)

  project.provide('databaseUrl', server.url)
  project.provide('templateDatabase', await makeTemplate(server.url))
  return async () => {
    await server.stop()
    process.off('exit', cutShort)
    process.off('SIGTERM', onSignal)
    process.off('SIGHUP', onSignal)
    rmSync(dir, { recursive: true, force: true })
  }
}

async function makeTemplate(adminUrl: string): Promise<string> {
  const name = `template_${process.pid}_${randomBytes(6).toString('hex')}`
  await administer(adminUrl, `CREATE DATABASE ${name} TEMPLATE template0 ENCODING 'UTF8' LOCALE 'C'`)
  const url = new URL(adminUrl)
  url.pathname = `/${name}`
  const store = postgresStore({ url: url.href, sql: workloadSql })
  await store.migrate()
  await store.close()
  return name
}
