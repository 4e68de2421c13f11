import { randomBytes } from 'node:crypto'
import pg from 'pg'
import { inject } from 'vitest'

export interface TestDatabase {
  url: string
  /** Ends its sessions and deletes it. */
  drop(): Promise<void>
}

/** A new, empty database of its own on the run's server. */
export async function freshDatabase(): Promise<TestDatabase> {
  const adminUrl = inject('databaseUrl')
  const name = `test_${process.pid}_${randomBytes(6).toString('hex')}`
  await administer(adminUrl, `CREATE DATABASE ${name} TEMPLATE template0 ENCODING 'UTF8' LOCALE 'C'`)
  const url = new URL(adminUrl)
  url.pathname = `/${name}`
  return { url: url.href, drop: () => administer(adminUrl, `DROP DATABASE IF EXISTS ${name} WITH (FORCE)`) }
}

async function administer(url: string, statement: string): Promise<void> {
  const client = new pg.Client({ connectionString: url })
  await client.connect()
  try {
    await client.query(statement)
  } finally {
    await client.end()
  }
}
