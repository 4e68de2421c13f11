/** What stands between us and the server, found out at the start; and the session settings that every connection pins. */
import { randomBytes } from 'node:crypto'
import pg from 'pg'
import { afterAll, beforeAll, describe, expect, it } from 'vitest'
import { findReach } from '../../src/store/postgres/reach.js'
import { postgresStore } from '../../src/store/postgres/store.js'
import { administer } from '../setup/administer.js'
import { freshDatabase, type TestDatabase } from '../setup/database.js'
import { type PgBouncer, type PgBouncerOptions, startPgBouncer } from '../setup/pgbouncer.js'

let database: TestDatabase

beforeAll(async () => {
  database = await freshDatabase()
})
afterAll(() => database.drop())

async function behind<T>(options: Omit<PgBouncerOptions, 'url'>, use: (pooler: PgBouncer) => Promise<T>): Promise<T> {
  const pooler = await startPgBouncer({ url: database.url, ...options })
  try {
    return await use(pooler)
  } finally {
    await pooler.stop()
  }
}

/** Clients that use the pool without a pause. */
async function busily<T>(url: string, count: number, use: () => Promise<T>): Promise<T> {
  let done = false
  const work = async (): Promise<void> => {
    const client = new pg.Client({ connectionString: url })
    await client.connect()
    while (!done) await client.query('SELECT pg_sleep(0.002)')
    await client.end()
  }
  const clients = Array.from({ length: count }, work)
  try {
    return await use()
  } finally {
    done = true
    await Promise.all(clients)
  }
}

describe('findReach', () => {
  it('recognizes a server that is reached directly', async () => {
    expect(await findReach(database.url)).toBe('direct')
  })

  it.each([
    ['session', false],
    ['session', true],
    ['transaction', false],
    ['transaction', true],
  ] as const)('recognizes a pooler in %s mode (round robin: %s)', async (mode, roundRobin) => {
    await behind({ mode, roundRobin }, async (pooler) => {
      const url = pooler.through(database.url)
      expect(await findReach(url)).toBe(mode)
      // With several sessions open, and used by others meanwhile.
      await busily(url, 4, async () => {
        for (let i = 0; i < 10; i++) expect(await findReach(url)).toBe(mode)
      })
      expect(await findReach(url)).toBe(mode)
    })
  })

  it('fails for a server that is away', async () => {
    await expect(findReach('postgres://a:b@127.0.0.1:1/c')).rejects.toMatchObject({ code: 'unavailable' })
  })
})

const wanted = {
  datestyle: 'ISO, YMD',
  timezone: 'UTC',
  intervalstyle: 'postgres',
  synchronous_commit: 'on',
  transaction_isolation: 'read committed',
  standard_conforming_strings: 'on',
  bytea_output: 'hex',
  row_security: 'on',
  extra_float_digits: '1',
  array_nulls: 'on',
  jit: 'off',
  plan_cache_mode: 'auto',
}
const odd = {
  datestyle: 'SQL, DMY',
  timezone: 'Asia/Tokyo',
  intervalstyle: 'sql_standard',
  synchronous_commit: 'off',
  default_transaction_isolation: 'serializable',
  bytea_output: 'escape',
  extra_float_digits: '-3',
  array_nulls: 'off',
  jit: 'on',
}
const showSql = `SELECT ${Object.keys(wanted)
  .map((name) => `current_setting('${name}') AS ${name}`)
  .join(', ')}`

describe('session settings', () => {
  let url: string
  let role: string

  beforeAll(async () => {
    role = `role_${process.pid}_${randomBytes(4).toString('hex')}`
    await administer(database.url, `CREATE ROLE ${role} LOGIN SUPERUSER PASSWORD 'x'`)
    for (const [name, value] of Object.entries(odd)) {
      await administer(database.url, `ALTER ROLE ${role} SET ${name} = '${value}'`)
    }
    const as = new URL(database.url)
    as.username = role
    as.password = 'x'
    url = as.href
  })
  afterAll(() => administer(database.url, `DROP ROLE ${role}`))

  const seen = async (at: string) => {
    const store = postgresStore({ url: at })
    try {
      const [plain] = (await store.read(showSql)).rows
      const [prepared] = (await store.statements.take(showSql, [])).rows
      const tx = await store.begin(5_000)
      const [inTx] = (await tx.query(showSql)).rows
      await tx.commit()
      return { plain, prepared, inTx }
    } finally {
      await store.close()
    }
  }

  it('are pinned on a direct connection', async () => {
    expect(await seen(url)).toEqual({ plain: wanted, prepared: wanted, inTx: wanted })
  })

  it('keep what an operator chose for standbys', async () => {
    await administer(database.url, `ALTER ROLE ${role} SET synchronous_commit = 'remote_apply'`)
    expect((await seen(url)).plain).toMatchObject({ synchronous_commit: 'remote_apply' })
    await administer(database.url, `ALTER ROLE ${role} SET synchronous_commit = 'off'`)
  })

  it.each(['session', 'transaction'] as const)('are pinned behind a pooler in %s mode', async (mode) => {
    const pooler = await startPgBouncer({ url, mode })
    try {
      expect(await seen(pooler.through(url))).toEqual({ plain: wanted, prepared: wanted, inTx: wanted })
      // Nothing of it is left for others that share the sessions.
      const other = new pg.Client({ connectionString: pooler.through(url) })
      await other.connect()
      const { rows } = await other.query('SHOW bytea_output')
      await other.end()
      expect(rows).toEqual([{ bytea_output: 'escape' }])
    } finally {
      await pooler.stop()
    }
  })
})

describe('a statement behind a pooler in transaction mode', () => {
  it('is one transaction, reports its own error, and leaves the connection usable', async () => {
    await behind({ mode: 'transaction', poolSize: 2 }, async (pooler) => {
      const store = postgresStore({ url: pooler.through(database.url) })
      await administer(database.url, 'CREATE TABLE numbers (n int PRIMARY KEY DEFERRABLE INITIALLY DEFERRED)')
      try {
        const pids = new Set<unknown>()
        for (let i = 0; i < 20; i++) {
          await expect(store.read('SELECT 1 / $1::int', [0])).rejects.toMatchObject({ code: 'data', sqlState: '22012' })
          pids.add((await store.read('SELECT pg_backend_pid() AS pid')).rows[0]?.pid)
        }
        // Had a failed transaction been left open, PgBouncer would have closed its session each time.
        expect(pids.size).toBeLessThanOrEqual(2)
        // An error that comes with the commit is an error of the statement.
        await store.read('INSERT INTO numbers VALUES (1)')
        await expect(store.read('INSERT INTO numbers VALUES (1)')).rejects.toMatchObject({ sqlState: '23505' })
        const { rows, rowCount } = await store.read('SELECT n, $1::text AS t FROM numbers', ["it's"])
        expect({ rows, rowCount }).toEqual({ rows: [{ n: 1, t: "it's" }], rowCount: 1 })
        expect(
          await Promise.all(Array.from({ length: 50 }, (_, i) => store.read('SELECT $1::int AS i', [i]))),
        ).toMatchObject(Array.from({ length: 50 }, (_, i) => ({ rows: [{ i }] })))
      } finally {
        await store.close()
      }
    })
  })
})
