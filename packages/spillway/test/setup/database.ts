import { randomBytes } from 'node:crypto'
import { inject } from 'vitest'
import { administer } from './administer.js'

export interface TestDatabase {
  url: string
  /** Ends its sessions and deletes it. */
  drop(): Promise<void>
}

/** A new database of its own on the run's server: migrated, and without a row; or with nothing in it. */
export async function freshDatabase({ empty = false } = {}): Promise<TestDatabase> {
  const adminUrl = inject('databaseUrl')
  const name = `test_${process.pid}_${randomBytes(6).toString('hex')}`
  await administer(
    adminUrl,
    `CREATE DATABASE ${name} TEMPLATE ${empty ? 'template0' : inject('templateDatabase')} ENCODING 'UTF8' LOCALE 'C'`,
  )
  const url = new URL(adminUrl)
  url.pathname = `/${name}`
  return { url: url.href, drop: () => administer(adminUrl, `DROP DATABASE IF EXISTS ${name} WITH (FORCE)`) }
}
