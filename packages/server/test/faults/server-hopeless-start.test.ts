/** A start that cannot succeed ends, with the reason; doctor says the same. One that may succeed later waits. */
import { readFileSync } from 'node:fs'
import { afterAll, afterEach, beforeAll, describe, expect, inject, it } from 'vitest'
import { administer } from '../../../spillway/test/setup/administer.js'
import { freshDatabase, type TestDatabase } from '../../../spillway/test/setup/database.js'
import { endAll, runProgram, startServer } from '../server-process.js'

const endsWithinMs = 15_000

let database: TestDatabase

beforeAll(async () => {
  database = await freshDatabase()
})
afterEach(() => endAll())
afterAll(() => database.drop())

async function expectRefused(url: string, reason: RegExp): Promise<void> {
  for (const args of [['serve'], ['worker']]) {
    const served = await runProgram({ DATABASE_URL: url, SPILLWAY_PORT: '0' }, { args, timeoutMs: endsWithinMs })
    expect({ code: served.code, signal: served.signal }).toEqual({ code: 1, signal: null })
    expect(served.stderr).toMatch(reason)
  }
  const doctor = await runProgram({ DATABASE_URL: url, SPILLWAY_PORT: '0' }, { args: ['doctor'] })
  expect(doctor.code).toBe(1)
  expect(doctor.stdout).toMatch(reason)
}

describe('a start that cannot succeed', () => {
  it('schema newer than the program', async () => {
    await administer(
      database.url,
      `INSERT INTO spillway.migrations (owner, id, checksum, release) VALUES ('core', '9999-later', '', '9.9.9')`,
    )
    await expectRefused(database.url, /schema has tables 9999-later of core[\s\S]*run the newer release/)
    await administer(database.url, `DELETE FROM spillway.migrations WHERE id = '9999-later'`)
  })

  it('a migration that is not the one that was applied', async () => {
    await administer(
      database.url,
      `UPDATE spillway.migrations SET checksum = 'x' WHERE owner = 'core' AND id LIKE '0002-%'`,
    )
    await expectRefused(
      database.url,
      /tables 0002-ledger of core: .* is not the one that was applied[\s\S]*run the release/,
    )
  })

  it('a schema that 0.1.0 made', async () => {
    const old = await freshDatabase({ empty: true })
    try {
      await administer(old.url, readFileSync(new URL('../fixtures/schema-0.1.0.sql', import.meta.url), 'utf8'))
      const reason = /made by Spillway 0\.1\.0[\s\S]*empty database[\s\S]*SPILLWAY_DB_SCHEMA/
      await expectRefused(old.url, reason)
      const migrated = await runProgram({ DATABASE_URL: old.url }, { args: ['migrate'] })
      expect(migrated.code).toBe(1)
      expect(migrated.stderr).toMatch(reason)
    } finally {
      await old.drop()
    }
  })

  it.each(['SQL_ASCII', 'LATIN1'])('a database in %s', async (encoding) => {
    const adminUrl = inject('databaseUrl')
    const name = `test_${encoding.toLowerCase()}_${process.pid}`
    await administer(adminUrl, `CREATE DATABASE ${name} TEMPLATE template0 ENCODING '${encoding}' LOCALE 'C'`)
    try {
      const url = new URL(adminUrl)
      url.pathname = `/${name}`
      await expectRefused(url.href, new RegExp(`${encoding}[^]*ENCODING 'UTF8'`))
    } finally {
      await administer(adminUrl, `DROP DATABASE ${name} WITH (FORCE)`)
    }
  })
})

it('a database that is away is waited for', async () => {
  const server = await startServer({ DATABASE_URL: 'postgres://a:b@127.0.0.1:1/c' }, { ready: false })
  const ended = await Promise.race([server.ended, new Promise((done) => setTimeout(done, 3_000, 'waits'))])
  expect(ended).toBe('waits')
  expect(await server.stop()).toEqual({ code: 0, signal: null })
})
