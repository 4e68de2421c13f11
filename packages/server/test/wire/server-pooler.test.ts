/** The server behind PgBouncer, with PgBouncer's own defaults: every workload works, and nothing fails now and then. */
import pg from 'pg'
import Type from 'typebox'
import { afterAll, beforeAll, describe, expect, inject, it } from 'vitest'
import { createIntake, postgres } from '../../../spillway/src/index.js'
import { administer } from '../../../spillway/test/setup/administer.js'
import { freshDatabase, type TestDatabase } from '../../../spillway/test/setup/database.js'
import { type PgBouncer, startPgBouncer } from '../../../spillway/test/setup/pgbouncer.js'
import { createdPolicy, decide, routeTask } from '../routing-input-calls.js'
import {
  call,
  endAll,
  finishes,
  get,
  post,
  runProgram,
  type ServerProcess,
  startServer,
  startTarget,
  submit,
  type Target,
  until,
} from '../server-process.js'

const oddSettings = {
  datestyle: 'SQL, DMY',
  timezone: 'Asia/Tokyo',
  intervalstyle: 'iso_8601',
  synchronous_commit: 'off',
}
const listening = `SELECT FROM pg_stat_activity WHERE datname = current_database() AND application_name = 'spillway listen'`

describe.each(['direct', 'session', 'transaction'] as const)('%s', (way) => {
  let database: TestDatabase
  let pooler: PgBouncer | undefined
  let url: string
  let target: Target
  let servers: ServerProcess[]

  beforeAll(async () => {
    database = await freshDatabase({ empty: true })
    const name = new URL(database.url).pathname.slice(1)
    for (const [setting, value] of Object.entries(oddSettings)) {
      await administer(inject('databaseUrl'), `ALTER DATABASE ${name} SET ${setting} = '${value}'`)
    }
    // In session mode each connection of the two processes holds a session.
    if (way !== 'direct') {
      pooler = await startPgBouncer({ url: database.url, mode: way, ...(way === 'session' && { poolSize: 100 }) })
    }
    url = pooler?.through(database.url) ?? database.url
    target = await startTarget()
    const env = {
      DATABASE_URL: url,
      SPILLWAY_FORWARD_ALLOW: target.origin,
      PETITION_RATE_LIMIT_PER_HOUR: '5',
      SPILLWAY_RETRY_BASE_MS: '50',
    }
    servers = [await startServer(env), await startServer(env)]
  }, 120_000)
  afterAll(async () => {
    await endAll()
    await target.close()
    await pooler?.stop()
    await database.drop()
  })

  const one = (): ServerProcess => servers[0] as ServerProcess
  const other = (): ServerProcess => servers[1] as ServerProcess
  const direct = async <T extends pg.QueryResultRow>(text: string): Promise<T[]> => {
    const client = new pg.Client({ connectionString: database.url })
    await client.connect()
    try {
      return (await client.query<T>(text)).rows
    } finally {
      await client.end()
    }
  }

  it('logs the mode it found, and wakes others by LISTEN where possible', async () => {
    const said = one()
      .logs()
      .map((line) => String(line.msg))
    expect(said.some((message) => message.includes(`pooler in ${way} mode`))).toBe(way !== 'direct')
    expect(said.some((message) => message.includes('cannot carry LISTEN'))).toBe(way === 'transaction')
    if (way !== 'session') expect(await direct(listening)).toHaveLength(way === 'direct' ? 2 : 0)
  })

  it('accepts, runs and settles; tickets tell times in RFC 3339', async () => {
    const ran = await submit(one(), `${target.origin}/now`)
    expect({ status: ran.status, is: ran.body.status }).toEqual({ status: 201, is: 'executed' })
    const queued = await submit(one(), `${target.origin}/later`, { queue: 'later' }, { prefer: 'respond-async' })
    expect(queued.status).toBe(202)
    const done = await finishes(other(), queued.body.operationId)
    expect(done).toMatchObject({ status: 'completed', created_at: expect.stringMatching(/^\d{4}-\d\d-\d\dT.*Z$/) })
    expect(Math.abs(Date.parse(done.created_at) - Date.now())).toBeLessThan(120_000)
    const key = { 'idempotency-key': 'once' }
    const first = await submit(one(), `${target.origin}/key`, { queue: 'key' }, key)
    const again = await submit(other(), `${target.origin}/key`, { queue: 'key' }, key)
    expect(again.headers.get('idempotent-replayed')).toBe('true')
    expect(again.body.operationId).toBe(first.body.operationId)
  })

  it('pushes, pops, acks and does both in one transaction; a waiting pop is woken from the other process', async () => {
    const pushed = await post(one(), '/api/v1/push', { items: [1, 2, 3].map((n) => ({ queue: 'm', payload: { n } })) })
    expect(pushed.status).toBe(201)
    const popped = await get(other(), '/api/v1/pop/queue/m?batch=2')
    const messages = popped.body.messages as { transactionId: string; partitionId: string; leaseId: string }[]
    expect(messages).toHaveLength(2)
    const acks = messages.map(({ transactionId, partitionId, leaseId }) => ({
      ...{ type: 'ack', transactionId, partitionId, leaseId, status: 'completed' },
    }))
    const both = await post(one(), '/api/v1/transaction', {
      operations: [...acks, { type: 'push', items: [{ queue: 'm2', payload: { moved: true } }] }],
    })
    expect(both.body).toMatchObject({ success: true })
    expect((await get(one(), '/api/v1/pop/queue/m2?autoAck=true')).body.messages).toHaveLength(1)
    const waiting = call(other(), 'GET', '/api/v1/pop/queue/w?wait=true&timeout=10000')
    await until('it waits', async () =>
      (await get(other(), '/metrics')).text.includes('spillway_messages_waiting_consumers 1'),
    )
    expect((await post(one(), '/api/v1/push', { items: [{ queue: 'w', payload: 1 }] })).status).toBe(201)
    const woken = await waiting
    expect(woken.body.messages).toHaveLength(1)
    expect(woken.ms).toBeLessThan(10_000)
  })

  it('petitions: the limit is exact over both processes, and the ledger verifies', async () => {
    const submitter_id = '01890a5d-ac96-774b-bcce-b302099a8057'
    const petition = { type: 'GENERAL', text: 'please', submitter_id }
    const answers = await Promise.all(
      Array.from({ length: 20 }, (_, i) =>
        post(i % 2 ? one() : other(), '/api/v1/petition-submissions', petition, { 'x-user-id': submitter_id }),
      ),
    )
    expect(answers.filter(({ status }) => status === 201)).toHaveLength(5)
    expect(answers.filter(({ status }) => status === 429)).toHaveLength(15)
    expect((await get(one(), '/api/v1/ledger/verify')).body).toMatchObject({ ok: true })
  })

  it('streams pass from the generating process to the one with the client', async () => {
    const body = { model: 'demo', stream: true, messages: [{ role: 'user', content: 'say something short' }] }
    const answer = await post(one(), '/v1/chat/completions', body)
    expect(answer.status).toBe(200)
    expect(answer.text.trimEnd().endsWith('data: [DONE]')).toBe(true)
  })

  it('policies that one process takes are known to the other soon', async () => {
    const policy_id = await createdPolicy(one())
    await until('it decides', async () => (await decide(other(), routeTask({ policy_id }))).status === 200, 5_000)
  })

  it('400 requests of all kinds at once, 200 at a time: none is a 500, and nothing is lost', async () => {
    const kinds = [
      (i: number) => submit(one(), `${target.origin}/load`, { queue: `l${i % 20}` }),
      (i: number) =>
        post(other(), '/api/v1/push', { items: [{ queue: 'load', partition: `${i % 7}`, payload: { i } }] }),
      () => get(one(), '/api/v1/pop/queue/load?batch=5&autoAck=true'),
      () => get(other(), '/api/v1/operations?limit=5'),
    ]
    const statuses: number[] = []
    for (const round of [0, 1]) {
      const answers = await Promise.all(
        Array.from({ length: 200 }, (_, i) =>
          (kinds[i % kinds.length] as (i: number) => Promise<{ status: number }>)(i + round),
        ),
      )
      statuses.push(...answers.map(({ status }) => status))
    }
    expect(statuses.filter((status) => status >= 500 && status !== 503)).toEqual([])
    expect(statuses.filter((status) => status < 300).length).toBeGreaterThan(300)
    for (const server of servers) expect(server.logs().filter((line) => line.level === 'error')).toEqual([])
    await until('all that was accepted is done', async () => {
      const { stats } = (await get(one(), '/api/v1/operations/stats')).body
      return !stats.some(({ status }) => status === 'pending' || status === 'processing')
    })
    const [audited] = await direct<{ count: string }>('SELECT count(*) FROM spillway.audit()')
    expect(audited?.count).toBe('0')
  }, 60_000)

  it('a handler has its own transaction, and commits its effect with the settlement', async () => {
    await administer(database.url, 'CREATE TABLE effects (id uuid PRIMARY KEY, at text, isolation text)')
    const intake = await createIntake({ store: postgres({ url, schema: 'library' }) })
    try {
      const order = intake.define('order', {
        body: Type.Object({}),
        run: async (_, { tx, id }) => {
          const sql = `INSERT INTO effects VALUES ($1, '2026-01-02'::timestamptz::text, current_setting('transaction_isolation'))`
          await tx.query(sql, [id])
          return { ok: true }
        },
      })
      const tickets = await Promise.all(
        Array.from({ length: 20 }, () => intake.submit(order, {}, { respondAsync: true })),
      )
      await until(
        'all are done',
        async () => (await direct<{ n: string }>('SELECT count(*) AS n FROM effects'))[0]?.n === '20',
      )
      expect(tickets).toHaveLength(20)
      expect(await direct('SELECT DISTINCT at, isolation FROM effects')).toEqual([
        { at: '2026-01-02 00:00:00+00', isolation: 'read committed' },
      ])
    } finally {
      await intake.close()
    }
  })

  it('doctor reports the connection mode, the wake-ups, and the settings that would have mattered', async () => {
    const doctor = await runProgram({ DATABASE_URL: url, SPILLWAY_PORT: '0' }, { args: ['doctor', '--json'] })
    const { ok, findings } = JSON.parse(doctor.stdout) as { ok: boolean; findings: { name: string; detail: string }[] }
    expect({ ok, stderr: doctor.stderr }).toEqual({ ok: true, stderr: '' })
    const of = (name: string): string => findings.find((finding) => finding.name === name)?.detail ?? ''
    expect(of('connection')).toContain(way === 'direct' ? 'the server itself' : `${way} mode`)
    expect(of('wake-ups')).toContain(way === 'transaction' ? 'polling' : 'LISTEN')
    expect(of('session settings')).toContain('synchronous_commit = off')
    expect(of('session settings')).toContain('SQL, DMY')
  })

  it('ends cleanly', async () => {
    for (const server of servers) expect(await server.stop()).toEqual({ code: 0, signal: null })
  })
})

it('SPILLWAY_LISTEN_URL leads past the pooler, and doctor checks that it is the same database', async () => {
  const database = await freshDatabase()
  const pooler = await startPgBouncer({ url: database.url, mode: 'transaction' })
  try {
    const env = { DATABASE_URL: pooler.through(database.url), SPILLWAY_LISTEN_URL: database.url, SPILLWAY_PORT: '0' }
    const server = await startServer(env)
    const client = new pg.Client({ connectionString: database.url })
    await client.connect()
    expect((await client.query(listening)).rows).toHaveLength(1)
    await client.end()
    await server.stop()
    const wakeUps = async (listenUrl: string) => {
      const { stdout } = await runProgram({ ...env, SPILLWAY_LISTEN_URL: listenUrl }, { args: ['doctor', '--json'] })
      const { findings } = JSON.parse(stdout) as { findings: { name: string; state: string }[] }
      return findings.find(({ name }) => name === 'wake-ups')?.state
    }
    expect(await wakeUps(database.url)).toBe('right')
    expect(await wakeUps(inject('databaseUrl'))).toBe('wrong')
    expect(await wakeUps(env.DATABASE_URL)).toBe('wrong')
  } finally {
    await endAll()
    await pooler.stop()
    await database.drop()
  }
})
