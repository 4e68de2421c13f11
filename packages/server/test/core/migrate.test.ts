import { readFileSync } from 'node:fs'
import pg from 'pg'
import { afterEach, beforeEach, describe, expect, it } from 'vitest'
import { openPool } from '../../../spillway/src/store/postgres/connect.js'
import { StoreFault, toStoreFault } from '../../../spillway/src/store/postgres/faults.js'
import { coreSql } from '../../../spillway/src/store/postgres/generated/sql.js'
import { lockKey, migrate, type SqlModule } from '../../../spillway/src/store/postgres/migrate.js'
import { freshDatabase, type TestDatabase } from '../../../spillway/test/setup/database.js'
import { workloadSql } from '../../src/workload-list.js'

const log = { info: () => undefined, warn: () => undefined, error: () => undefined }
const schema = 'odd "name'
const quoted = pg.escapeIdentifier(schema)

const first = { id: '0001-things', sql: 'CREATE TABLE things (n int); INSERT INTO things VALUES (1)' }
const second = { id: '0002-more', sql: 'UPDATE things SET n = n + 1' }
const third = { id: '0003-again', sql: 'UPDATE things SET n = n + 1' }

/** An owner with these tables and functions. */
const sqlOf = (tables: SqlModule['tables'], ...functions: string[]): SqlModule[] => [
  { name: 'core', tables, functions: functions.map((sql, i) => ({ name: `f${i}`, sql })) },
]
const answerFunction = (body: string): string =>
  `CREATE OR REPLACE FUNCTION answer() RETURNS int LANGUAGE sql SET search_path FROM CURRENT AS $$ ${body} $$;`

let database: TestDatabase
let client: pg.Client

beforeEach(async () => {
  database = await freshDatabase({ empty: true })
  client = new pg.Client({ connectionString: database.url })
  await client.connect()
})

afterEach(async () => {
  await client.end()
  await database.drop()
})

async function thing(): Promise<number | undefined> {
  const { rows } = await client.query<{ n: number }>(`SELECT n FROM ${quoted}.things`)
  return rows[0]?.n
}

describe('migrate', () => {
  it('applies pending steps in order, inside the schema, and records them', async () => {
    expect(await migrate({ url: database.url, schema, sql: sqlOf([first]), log })).toEqual({ from: 0, to: 1 })
    expect(await migrate({ url: database.url, schema, sql: sqlOf([first, second]), log })).toEqual({ from: 1, to: 2 })
    expect(await migrate({ url: database.url, schema, sql: sqlOf([first, second]), log })).toEqual({ from: 2, to: 2 })
    expect(await thing()).toBe(2)
    const { rows } = await client.query(`SELECT owner, id FROM ${quoted}.migrations ORDER BY id`)
    expect(rows).toEqual([
      { owner: 'core', id: '0001-things' },
      { owner: 'core', id: '0002-more' },
      { owner: 'core', id: 'functions' },
    ])
  })

  it('is done once by five that start at once, each of which waits until all is done', async () => {
    const slow = { ...first, sql: `${first.sql}; SELECT pg_sleep(0.3)` }
    const sql = sqlOf([slow, second, third])
    const results = await Promise.all(Array.from({ length: 5 }, () => migrate({ url: database.url, schema, sql, log })))
    expect(results.filter(({ from }) => from === 0)).toHaveLength(1)
    expect(results.map(({ to }) => to)).toEqual([3, 3, 3, 3, 3])
    expect(await thing()).toBe(3)
  })

  it('waits for the lock no longer than its timeout, says so, and leaves the lock alone', async () => {
    await client.query('SELECT pg_advisory_lock($1::bigint)', [lockKey(schema)])
    const messages: string[] = []
    const listening = { ...log, info: (_fields: object, message: string) => messages.push(message) }
    await expect(
      migrate({ url: database.url, schema, sql: sqlOf([first]), log: listening, lockWaitMs: 250 }),
    ).rejects.toMatchObject({ name: 'MigrationError', code: 'lock_timeout' })
    expect(messages).toHaveLength(1)
    await client.query('SELECT pg_advisory_unlock_all()')
    expect(await migrate({ url: database.url, schema, sql: sqlOf([first]), log })).toEqual({ from: 0, to: 1 })
  })

  it('refuses an edited past step', async () => {
    await migrate({ url: database.url, schema, sql: sqlOf([first]), log })
    const edited = { ...first, sql: `${first.sql} ` }
    await expect(migrate({ url: database.url, schema, sql: sqlOf([edited, second]), log })).rejects.toMatchObject({
      code: 'edited',
    })
    expect(await thing()).toBe(1)
  })

  it('refuses a schema that is newer than the code', async () => {
    await migrate({ url: database.url, schema, sql: sqlOf([first, second]), log })
    await expect(migrate({ url: database.url, schema, sql: sqlOf([first]), log })).rejects.toMatchObject({
      code: 'newer',
    })
  })

  it('rolls a failed step back completely, keeps those before it, and can be run again', async () => {
    const broken = { id: '0002-broken', sql: 'UPDATE things SET n = 99; SELECT 1 / 0' }
    const failed = migrate({ url: database.url, schema, sql: sqlOf([first, broken]), log })
    await expect(failed).rejects.toMatchObject({ code: 'failed', cause: { sqlState: '22012' } })
    expect(await thing()).toBe(1)
    expect(await migrate({ url: database.url, schema, sql: sqlOf([first, second]), log })).toEqual({ from: 1, to: 2 })
  })

  it('needs no superuser: an operator may even make the schema beforehand', async () => {
    const role = `role_${process.pid}_${Date.now()}`
    await client.query(`CREATE ROLE ${role} LOGIN PASSWORD 'x'`)
    try {
      await client.query(`CREATE SCHEMA ${quoted} AUTHORIZATION ${role}`)
      const url = new URL(database.url)
      url.username = role
      url.password = 'x'
      expect(await migrate({ url: url.href, schema, sql: sqlOf([first]), log })).toEqual({ from: 0, to: 1 })
    } finally {
      await client.query(`DROP OWNED BY ${role} CASCADE`)
      await client.query(`DROP ROLE ${role}`)
    }
  })

  it('installs functions again when they change, as one set, and leaves them alone otherwise', async () => {
    const answered = async () => (await client.query<{ n: number }>(`SELECT ${quoted}.answer() AS n`)).rows[0]?.n
    const options = { url: database.url, schema, log }
    await migrate({ ...options, sql: sqlOf([first], answerFunction('SELECT 1')) })
    expect(await answered()).toBe(1)
    // A replacement, as tests make of clock(), survives while nothing changes.
    await client.query(`SET search_path TO ${quoted}; ${answerFunction('SELECT 7')}`)
    await migrate({ ...options, sql: sqlOf([first], answerFunction('SELECT 1')) })
    expect(await answered()).toBe(7)
    expect(await migrate({ ...options, sql: sqlOf([first], answerFunction('SELECT 2')) })).toEqual({ from: 1, to: 1 })
    expect(await answered()).toBe(2)
    const failed = migrate({ ...options, sql: sqlOf([first], answerFunction('SELECT 3'), 'SELECT 1 / 0') })
    await expect(failed).rejects.toMatchObject({ code: 'failed' })
    expect(await answered()).toBe(2)
  })

  it('refuses a function that leaves another signature of its name behind', async () => {
    const options = { url: database.url, schema, log }
    await migrate({ ...options, sql: sqlOf([first], answerFunction('SELECT 1')) })
    const changed = answerFunction('SELECT $1').replace('answer()', 'answer(p_n int)')
    await expect(migrate({ ...options, sql: sqlOf([first], changed) })).rejects.toMatchObject({
      code: 'failed',
      message: expect.stringContaining('answer now has two signatures'),
    })
  })

  it('reports a server that is not there as a fault of the store', async () => {
    const fault = await migrate({ url: 'postgres://x:y@127.0.0.1:1/z', schema, sql: sqlOf([first]), log }).catch(
      (error: unknown) => error,
    )
    expect(fault).toBeInstanceOf(StoreFault)
    expect(fault).toMatchObject({ code: 'unavailable' })
  })
})

describe("Spillway's own SQL", () => {
  const validate = `
    SELECT CASE l.lanname WHEN 'sql' THEN fmgr_sql_validator(p.oid)::text ELSE plpgsql_validator(p.oid)::text END
    FROM pg_proc p JOIN pg_language l ON l.oid = p.prolang WHERE p.pronamespace = $1::regnamespace`
  const namesOf = async (text: string): Promise<string[]> =>
    (await client.query<{ name: string }>(text, [quoted])).rows.map(({ name }) => name)
  const tableNames = `SELECT relname AS name FROM pg_class WHERE relnamespace = $1::regnamespace AND relkind IN ('r', 'p')`
  const functionNames = 'SELECT proname AS name FROM pg_proc WHERE pronamespace = $1::regnamespace'

  it('gives a library user the core alone, and every function of it compiles', async () => {
    await migrate({ url: database.url, schema, sql: [coreSql], log })
    await client.query(`SET search_path TO ${quoted}`)
    await client.query(validate, [quoted])
    for (const text of [tableNames, functionNames]) {
      const names = await namesOf(text)
      expect(names.length).toBeGreaterThan(20)
      expect(names.filter((name) => /^(mq|rt|petition|alert|objective)s?(_|$)/.test(name))).toEqual([])
    }
  })

  it('adds a workload later, keeps a replaced clock, and every function compiles', async () => {
    await migrate({ url: database.url, schema, sql: [coreSql], log })
    await client.query(`SET search_path TO ${quoted}`)
    await client.query(
      `CREATE OR REPLACE FUNCTION clock() RETURNS timestamptz LANGUAGE sql VOLATILE AS $$ SELECT timestamptz 'epoch' $$`,
    )
    const changed = { ...coreSql, functions: [...coreSql.functions, { name: 'more', sql: 'SELECT 1;' }] }
    await migrate({ url: database.url, schema, sql: [changed, ...workloadSql], log })
    await client.query(validate, [quoted])
    expect((await client.query(`SELECT clock() = 'epoch' AS kept`)).rows).toEqual([{ kept: true }])
    for (const name of ['petitions', 'mq_messages', 'rt_decisions', 'alerts', 'objective_counts']) {
      expect(await namesOf(tableNames)).toContain(name)
    }
  })

  it('refuses a schema that 0.1.0 made, and says how to move', async () => {
    await client.query(readFileSync(new URL('../fixtures/schema-0.1.0.sql', import.meta.url), 'utf8'))
    const refused = migrate({ url: database.url, schema: 'spillway', sql: [coreSql], log })
    await expect(refused).rejects.toMatchObject({
      code: 'legacy',
      message: expect.stringMatching(/0\.1\.0.*empty database.*SPILLWAY_DB_SCHEMA/),
    })
    expect(await migrate({ url: database.url, schema: 'other', sql: [coreSql], log })).toMatchObject({ from: 0 })
  })
})

describe('openPool', () => {
  it('gives BIGINT as number and applies session settings', async () => {
    const pool = openPool({
      url: database.url,
      max: 2,
      applicationName: 'spillway test',
      pin: { settings: { search_path: '"a b", c', statement_timeout: '1234' }, reach: async () => 'direct' },
    })
    try {
      const { rows } = await pool.query(
        `SELECT 9007199254740991::bigint AS big, '{1,NULL,3}'::bigint[] AS list, count(*) AS n,
                current_setting('statement_timeout') AS timeout, current_setting('jit') AS jit,
                current_setting('search_path') AS path, current_setting('application_name') AS name
           FROM generate_series(1, 3)`,
      )
      expect(rows).toEqual([
        {
          big: Number.MAX_SAFE_INTEGER,
          list: [1, null, 3],
          n: 3,
          timeout: '1234ms',
          jit: 'off',
          path: '"a b", c',
          name: 'spillway test',
        },
      ])
    } finally {
      await pool.end()
    }
  })

  it('survives the loss of an idle connection and says so', async () => {
    let warn: (fault: object) => void = () => undefined
    const warned = new Promise<object>((resolve) => {
      warn = resolve
    })
    const pool = openPool({ url: database.url, max: 1, applicationName: 'test', log: { ...log, warn } })
    try {
      const { rows } = await pool.query<{ pid: number }>('SELECT pg_backend_pid() AS pid')
      await client.query('SELECT pg_terminate_backend($1)', [rows[0]?.pid])
      expect(await warned).toMatchObject({ err: { name: 'StoreFault', code: 'unavailable', sqlState: '57P01' } })
      expect((await pool.query('SELECT 1 AS one')).rows).toEqual([{ one: 1 }])
    } finally {
      await pool.end()
    }
  })

  it.each([
    ['SELECT pg_sleep(10)', 'timeout'],
    ['SELECT 1 / 0', 'data'],
    ['CREATE TABLE dup (n int PRIMARY KEY); INSERT INTO dup VALUES (1), (1)', 'data'],
    ['SELECT * FROM nowhere', 'other'],
    ['SELECT pg_terminate_backend(pg_backend_pid())', 'unavailable'],
  ])('translates the failure of %s to %s', async (statement, code) => {
    const pin = { settings: { statement_timeout: '100' }, reach: async () => 'direct' as const }
    const pool = openPool({ url: database.url, max: 1, applicationName: 'test', pin })
    try {
      const error = await pool.query(statement).catch((thrown: unknown) => thrown)
      const fault = toStoreFault(error)
      expect(fault).toMatchObject({ code, cause: error })
      expect(fault.message).not.toContain((error as Error).message)
    } finally {
      await pool.end()
    }
  })

  it('gives up on an answer that does not come', async () => {
    const pool = openPool({ url: database.url, max: 1, applicationName: 'test', queryTimeoutMs: 100 })
    try {
      const error = await pool.query('SELECT pg_sleep(5)').catch((thrown: unknown) => thrown)
      expect(toStoreFault(error)).toMatchObject({ code: 'timeout' })
    } finally {
      await pool.end()
    }
  })
})
