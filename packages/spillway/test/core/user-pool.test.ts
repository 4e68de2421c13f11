/** `postgres({ pool })`: a pool that the user's own code uses too, with settings, types and transactions of its own. */
import pg from 'pg'
// @ts-expect-error: an older copy of the driver, without types
import oldest from 'pg82'
import Type from 'typebox'
import { afterEach, beforeEach, describe, expect, it } from 'vitest'
import { type PostgresOptions, postgres } from '../../src/index.js'
import type { Intake } from '../../src/intake/intake.js'
import { type Bench, bench, eventually, loggingTo, signal } from '../pipeline-fixture.js'

const Body = Type.Object({ n: Type.Number() })
const max = 12

let b: Bench
let pool: pg.Pool
beforeEach(async () => {
  b = await bench()
  pool = poolOf()
})
const intakes: Intake[] = []
afterEach(async () => {
  await Promise.all(intakes.splice(0).map((intake) => intake.close()))
  if (!pool.ending) await pool.end()
  // Dropping the database ends what is left, and the user's pool listens to nothing any more.
  await eventually(
    async () => (await backends('user')) === 0 || undefined,
    'the connections of the pool to end',
    30_000,
  )
  await b.close()
})

/** As a user makes it: waits for a connection for ever. */
function poolOf(options: pg.PoolConfig = {}, of: Pick<typeof pg, 'Pool'> = pg): pg.Pool {
  return new of.Pool({ connectionString: b.url, max, application_name: 'user', ...options })
}

async function intakeOn(own: pg.Pool, options: Partial<PostgresOptions> = {}): Promise<Intake> {
  const store = postgres({ pool: own, log: loggingTo(b.logged), ...options } as PostgresOptions)
  const intake = await b.intake({ wrap: () => store })
  intakes.push(intake)
  return intake
}

const backends = async (name: string): Promise<number> => {
  const [row] = await b.sql<{ n: number }>(
    'SELECT count(*)::int AS n FROM pg_stat_activity WHERE datname = current_database() AND application_name LIKE $1',
    [name],
  )
  return row?.n ?? 0
}

/** All connections of the pool, in the hands of the user's code. */
const takeAll = async (own: pg.Pool): Promise<pg.PoolClient[]> =>
  Promise.all(Array.from({ length: own.options.max }, () => own.connect()))

describe('an intake on a pool of the user', () => {
  it('runs, queues and settles on its connections, opens two beside it, and leaves the pool open', async () => {
    const intake = await intakeOn(pool)
    const op = intake.define('op', {
      body: Body,
      lane: ({ n }) => ['numbers', String(n % 5)],
      run: async ({ n }, ctx) => (await ctx.tx.query<{ n: number }>('SELECT $1::bigint * 2 AS n', [n])).rows[0]?.n,
    })
    const answers = await Promise.all(
      Array.from({ length: 100 }, (_, n) => intake.submit(op, { n }, { waitMs: 20_000 })),
    )
    expect(answers.map((answer) => (answer.kind === 'done' ? answer.result : answer))).toEqual(
      answers.map((_, n) => n * 2),
    )
    expect(await b.audit()).toEqual([])
    expect(await backends('user')).toBeLessThanOrEqual(max)
    expect(await backends('spillway heartbeat')).toBe(1)
    expect(await backends('spillway listen')).toBe(1)
    await intake.close()
    expect(await eventually(async () => (await backends('spillway heartbeat')) === 0 || undefined, 'it to close')).toBe(
      true,
    )
    expect((await pool.query('SELECT 1 AS one')).rows).toEqual([{ one: 1 }])
    expect(pool.listenerCount('error')).toBe(0)
    expect(pool.idleCount).toBe(pool.totalCount)
  })

  it('takes no more connections than poolMax at once', async () => {
    const intake = await intakeOn(pool, { poolMax: 8 })
    const op = intake.define('op', { body: Body, run: (_, ctx) => ctx.tx.query('SELECT pg_sleep(0.01)') })
    let most = 0
    const watch = setInterval(() => {
      most = Math.max(most, pool.totalCount - pool.idleCount)
    }, 1)
    await Promise.all(Array.from({ length: 60 }, (_, n) => intake.submit(op, { n }, { waitMs: 20_000 })))
    clearInterval(watch)
    expect(most).toBeGreaterThan(1)
    expect(most).toBeLessThanOrEqual(8)
  })

  it('depends on no setting of the sessions, nor on the types of the user, and changes none of them', async () => {
    const settings = {
      DateStyle: 'German, DMY',
      TimeZone: 'Asia/Tokyo',
      IntervalStyle: 'sql_standard',
      standard_conforming_strings: 'off',
      bytea_output: 'escape',
      extra_float_digits: '-5',
      default_transaction_isolation: 'serializable',
      synchronous_commit: 'off',
      search_path: 'pg_catalog',
      application_name: 'mine',
    }
    await pool.end()
    // Rows of strings only, whatever their type.
    pool = poolOf({ types: { getTypeParser: () => (text: string) => text } as never })
    pool.on('connect', (client) => {
      const all = Object.entries(settings).map(([name, value]) => `SET ${name} = '${value}'`)
      void client.query(all.join('; '))
    })
    const intake = await intakeOn(pool)
    const seen: unknown[] = []
    const op = intake.define('op', {
      body: Body,
      lane: ({ n }) => String(n),
      run: async ({ n }, ctx) => {
        const { rows } = await ctx.tx.query(`SELECT current_setting('synchronous_commit') AS commit, 5::bigint AS five`)
        seen.push(rows[0])
        if (n === 1 && ctx.attempt === 1) throw new Error('once')
        return n
      },
    })
    for (const n of [0, 1]) {
      expect(await intake.submit(op, { n }, { waitMs: 20_000, idempotencyKey: `k${n}` })).toMatchObject({
        kind: 'done',
      })
    }
    expect(await intake.submit(op, { n: 0 }, { idempotencyKey: 'k0' })).toMatchObject({ kind: 'done', replayed: true })
    expect(seen[0]).toEqual({ commit: 'on', five: 5 })
    const clients = await takeAll(pool)
    for (const client of clients) {
      for (const [name, value] of Object.entries(settings)) {
        const { rows } = await client.query(`SELECT current_setting('${name}') AS value`)
        expect(rows).toEqual([{ value }])
      }
      client.release()
    }
  })

  it('enqueues in a transaction of a client of the pool, if and when that commits', async () => {
    const intake = await intakeOn(pool)
    const ran: number[] = []
    const op = intake.define('op', { body: Body, run: ({ n }) => void ran.push(n) })
    const client = await pool.connect()
    try {
      await client.query('BEGIN')
      await intake.enqueue(op, { n: 1 }, { tx: client })
      await client.query('ROLLBACK')
      await client.query('BEGIN')
      const queued = await intake.enqueue(op, { n: 2 }, { tx: client })
      await client.query('COMMIT')
      if (queued.kind !== 'queued') throw new Error(`not queued: ${JSON.stringify(queued)}`)
      expect(await b.finished(queued.operationId)).toMatchObject({ status: 'completed' })
      expect(ran).toEqual([2])
      await expect(intake.enqueue(op, { n: 3 }, { tx: client })).rejects.toThrow(
        'this client is in none. Call BEGIN first',
      )
      await expect(intake.enqueue(op, { n: 3 }, { tx: pool as never })).rejects.toThrow('given: a Pool')
    } finally {
      client.release()
    }
  })

  it('refuses in time while the user’s code holds all connections, keeps its lease, and continues afterwards', async () => {
    const intake = await intakeOn(pool)
    const op = intake.define('op', { body: Body, run: ({ n }) => n })
    const instance = intake.instance
    const clients = await takeAll(pool)
    const [client] = clients
    if (client === undefined) throw new Error('no client')
    await client.query('BEGIN')
    // As code does that calls the intake inside its own transactions, on each of the connections.
    const answers = await Promise.all(clients.map((_, n) => intake.submit(op, { n })))
    for (const answer of answers) expect(answer).toMatchObject({ refusal: { code: 'store_unavailable' } })
    expect(await intake.enqueue(op, { n: 99 }, { tx: client })).toMatchObject({ kind: 'queued' })
    await expect(intake.read('SELECT 1')).rejects.toMatchObject({
      code: 'unavailable',
      cause: { message: expect.stringContaining(`${max} of ${max} are in use`) },
    })
    await client.query('COMMIT')
    for (const one of clients) one.release()
    await eventually(async () => (await intake.submit(op, { n: 1 })).kind === 'done' || undefined, 'it to go on')
    expect(intake.instance).toBe(instance)
    await eventually(
      () => (pool.waitingCount === 0 && pool.idleCount === pool.totalCount) || undefined,
      'all to be free',
    )
  })

  it('says that the pool was ended, and closes all the same', async () => {
    const intake = await intakeOn(pool)
    const op = intake.define('op', { body: Body, run: ({ n }) => n })
    await intake.submit(op, { n: 1 })
    await pool.end()
    expect(await intake.submit(op, { n: 1 })).toMatchObject({ refusal: { code: 'store_unavailable' } })
    await expect(intake.transaction(async () => undefined)).rejects.toThrow('call intake.close() before pool.end()')
    await intake.close()
  })

  it('survives that its connections are lost, also where the user listens for no error', async () => {
    const intake = await intakeOn(pool)
    const op = intake.define('op', { body: Body, run: ({ n }) => n })
    await intake.submit(op, { n: 1 })
    await b.sql("SELECT pg_terminate_backend(pid) FROM pg_stat_activity WHERE application_name = 'user'")
    await eventually(async () => (await intake.submit(op, { n: 1 })).kind === 'done' || undefined, 'it to reconnect')
  })

  it('does not use a connection that was released inside a transaction', async () => {
    const intake = await intakeOn(pool)
    const op = intake.define('op', { body: Body, run: ({ n }) => n })
    await b.sql('CREATE TABLE mine (n int)')
    const clients = await takeAll(pool)
    for (const client of clients) {
      await client.query('BEGIN')
      await client.query('INSERT INTO mine VALUES (1)')
      client.release()
    }
    await eventually(async () => (await intake.submit(op, { n: 1 })).kind === 'done' || undefined, 'a free connection')
    await eventually(
      () => b.logged.some(({ message }) => message.includes('inside a transaction')) || undefined,
      'the warning',
    )
    expect(await b.sql('SELECT * FROM mine')).toEqual([])
  })

  it('takes pools of the oldest pg that it knows', async () => {
    const old = poolOf({}, oldest as never)
    try {
      const intake = await intakeOn(old)
      const started = signal()
      const op = intake.define('op', {
        body: Body,
        run: async ({ n }, ctx) => {
          started.fire()
          if (n === 1) await ctx.tx.query('SELECT no_such_column')
          return (await ctx.tx.query<{ n: number }>('SELECT 7::bigint AS n')).rows[0]?.n
        },
        maxRetries: 0,
      })
      expect(await intake.submit(op, { n: 0 }, { waitMs: 20_000 })).toMatchObject({ kind: 'done', result: 7 })
      expect(await intake.submit(op, { n: 1 }, { waitMs: 20_000 })).toMatchObject({ kind: 'failed' })
      await expect(intake.read('SELECT no_such_column')).rejects.toMatchObject({ sqlState: '42703' })
      await expect(intake.transaction((tx) => tx.query('SELECT pg_sleep(2)'), { timeoutMs: 50 })).rejects.toMatchObject(
        {
          code: 'timeout',
        },
      )
      expect((await intake.read('SELECT 1::bigint AS n')).rows).toEqual([{ n: 1 }])
      await intake.close()
      expect((await old.query('SELECT 1 AS one')).rows).toEqual([{ one: 1 }])
    } finally {
      await old.end()
    }
  })
})

const poolLike = (Client: unknown) => ({ connect: () => undefined, options: { max }, Client })

describe('a pool that cannot be used', () => {
  it.each<[string, () => unknown, string]>([
    ['a small one', () => ({ pool: new pg.Pool({ max: 5 }) }), 'the max of pool must be at least 8, and more for what'],
    [
      'less than poolMax',
      () => ({ pool, poolMax: 13 }),
      'postgres: poolMax must be a whole number from 8 to 12; given: 13',
    ],
    ['and a url', () => ({ pool, url: b.url }), 'postgres: url and pool exclude each other; remove one of them'],
    [
      'none',
      () => ({ pool: { connect: () => undefined } }),
      'pool must be a Pool of node-postgres (pg 8.2 or later), as in new Pool(',
    ],
    ['an address', () => ({ pool: b.url }), 'pool must be a Pool of node-postgres'],
    ['binary', () => ({ pool: new pg.Pool({ max, binary: true } as never) }), 'its option binary must not be set'],
    [
      'of an older driver',
      () => ({
        pool: poolLike(
          class {
            connection = { parse: (_: unknown, more: boolean) => more }
          },
        ),
      }),
      'this one is older',
    ],
    [
      'of pg.native',
      () => ({
        pool: poolLike(
          class {
            native = {}
          },
        ),
      }),
      'not of pg.native',
    ],
    ['in pipeline mode', () => ({ pool: new pg.Pool({ max, pipeline: true }) }), 'its option pipeline must not be set'],
  ])('is refused at once: %s', (_, options, message) => {
    expect(() => postgres(options() as PostgresOptions)).toThrow(expect.objectContaining({ name: 'OptionError' }))
    expect(() => postgres(options() as PostgresOptions)).toThrow(message)
  })

  it('is named by its address when its database cannot be reached', async () => {
    const away = poolOf({ connectionString: 'postgres://me:secret@127.0.0.1:1/shop' })
    const fault = await b
      .intake({ wrap: () => postgres({ pool: away, log: loggingTo(b.logged) }), connectTimeoutMs: 300 })
      .catch((error: unknown) => error)
    expect(String(fault)).toContain('the database 127.0.0.1:1/shop cannot be used')
    expect(String(fault)).not.toContain('secret')
    await away.end()
  })

  it('is refused when it was ended', async () => {
    await pool.end()
    expect(() => postgres({ pool })).toThrow('this one was ended')
  })
})
