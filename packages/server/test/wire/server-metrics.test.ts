/** Every core metric moves with the action that must move it, seen by scraping the real server. */
import { tmpdir } from 'node:os'
import { afterAll, beforeAll, expect, it } from 'vitest'
import { freshDatabase, type TestDatabase } from '../../../spillway/test/setup/database.js'
import { startNats } from '../../../spillway/test/setup/nats.js'
import { findPromtool, promtoolTests } from '../../../spillway/test/setup/promtool.js'
import {
  endAll,
  finishes,
  get,
  latch,
  post,
  type ServerProcess,
  sample,
  startServer,
  startTarget,
  submit,
  type Target,
  until,
} from '../server-process.js'

const withPromtool = promtoolTests(await findPromtool())

let database: TestDatabase
let server: ServerProcess
let target: Target
const gate = latch()

beforeAll(async () => {
  database = await freshDatabase()
  target = await startTarget(async ({ path }, response) => {
    if (path === '/held') await gate.opened
    response.writeHead(path === '/dead' ? 400 : path === '/flaky' ? 500 : 200).end()
  })
  server = await startServer({
    DATABASE_URL: database.url,
    SPILLWAY_FORWARD_ALLOW: target.origin,
    SPILLWAY_DIRECT_WAIT_MS: '100',
    SPILLWAY_RETRY_BASE_MS: '10',
  })
})

afterAll(async () => {
  gate.open()
  await endAll()
  await target.close()
  await database.drop()
})

const scrape = async () => (await get(server, '/metrics')).text
const type = 'http.request'

/** The series grows by `by` (default: by anything) when `act` is done. */
async function moves(name: string, labels: Record<string, string>, act: () => Promise<unknown>, by?: number) {
  const before = sample(await scrape(), name, labels) ?? 0
  await act()
  const after = sample(await scrape(), name, labels) ?? 0
  if (by === undefined) expect(after - before, name).toBeGreaterThan(0)
  else expect(after - before, name).toBe(by)
}

it('spillway_admissions_total counts each verdict with its reason', async () => {
  const admissions = 'spillway_admissions_total'
  await moves(admissions, { verdict: 'execute' }, () => submit(server, `${target.origin}/a`, { queue: 'a' }), 1)
  await moves(
    admissions,
    { verdict: 'queue', reason: 'requested' },
    () => submit(server, `${target.origin}/a`, { queue: 'r' }, { prefer: 'respond-async' }),
    1,
  )
  await post(server, '/api/v1/lanes/pause', { queue: 'o' })
  await submit(server, `${target.origin}/a`, { queue: 'o' })
  await moves(
    admissions,
    { verdict: 'queue', reason: 'maintaining_order' },
    () => submit(server, `${target.origin}/a`, { queue: 'o' }),
    1,
  )
  await post(server, '/api/v1/lanes/resume', { queue: 'o' })
  const key = { 'idempotency-key': 'metric' }
  await submit(server, `${target.origin}/a`, { queue: 'i' }, key)
  await moves(admissions, { verdict: 'refuse' }, () => submit(server, `${target.origin}/b`, { queue: 'i' }, key), 1)
})

it('spillway_admission_duration_seconds, spillway_flush_*', async () => {
  const act = () => submit(server, `${target.origin}/a`, { queue: 'd' })
  await moves('spillway_admission_duration_seconds_count', { gate: 'pressure' }, act, 1)
  await moves('spillway_flush_batch_size_count', {}, act)
  await moves('spillway_flush_batch_size_sum', {}, act)
  await moves('spillway_flush_duration_seconds_count', {}, act)
  await moves('spillway_flush_duration_seconds_sum', {}, act)
})

it('spillway_operation_wait_seconds, _run_seconds and _attempts_total', async () => {
  const now = () => submit(server, `${target.origin}/a`, { queue: 'ran' })
  await moves('spillway_operation_run_seconds_count', {}, now, 1)
  await moves('spillway_operation_wait_seconds_count', {}, now, 1)
  await moves('spillway_operation_attempts_total', { type, outcome: 'completed' }, now, 1)
  await moves(
    'spillway_operation_attempts_total',
    { type, outcome: 'failed' },
    () => submit(server, `${target.origin}/dead`, { queue: 'dead' }),
    1,
  )
  await moves(
    'spillway_operation_attempts_total',
    { type, outcome: 'retried' },
    async () => {
      const { body } = await submit(server, `${target.origin}/flaky`, { queue: 'flaky', max_retries: 2 })
      await finishes(server, body.operationId)
    },
    2,
  )
  const waited = sample(await scrape(), 'spillway_operation_wait_seconds_sum') ?? 0
  const { body } = await submit(server, `${target.origin}/a`, { queue: 'waits', delay_seconds: 0.5 })
  await finishes(server, body.operationId)
  expect((sample(await scrape(), 'spillway_operation_wait_seconds_sum') ?? 0) - waited).toBeGreaterThan(0.4)
})

it('spillway_dead_letters is how many there are', async () => {
  const before = (await get(server, '/api/v1/dead-letters?limit=200')).body.items.length
  await submit(server, `${target.origin}/dead`, { queue: 'letters' })
  await until('the gauge follows', async () => sample(await scrape(), 'spillway_dead_letters') === before + 1, 5_000)
  await fetch(`${server.origin}/api/v1/dead-letters?all=true`, { method: 'DELETE' })
  await until('the gauge follows', async () => sample(await scrape(), 'spillway_dead_letters') === 0, 5_000)
})

it('spillway_operations shows pending and processing, and spillway_lane_oldest_seconds grows', async () => {
  const { body } = await submit(server, `${target.origin}/held`, { queue: 'held' })
  expect(body.reason).toBe('still_running')
  const behind = await submit(server, `${target.origin}/a`, { queue: 'held' })
  await until(
    'the gauges follow',
    async () => {
      const text = await scrape()
      return (
        sample(text, 'spillway_operations', { type, status: 'processing' }) === 1 &&
        sample(text, 'spillway_operations', { type, status: 'pending' }) === 1 &&
        (sample(text, 'spillway_lane_oldest_seconds') ?? 0) > 0.5
      )
    },
    8_000,
  )
  gate.open()
  await finishes(server, behind.body.operationId)
  await until(
    'the gauges fall',
    async () => {
      const text = await scrape()
      return (
        (sample(text, 'spillway_operations', { type, status: 'processing' }) ?? 0) === 0 &&
        (sample(text, 'spillway_operations', { type, status: 'pending' }) ?? 0) === 0 &&
        sample(text, 'spillway_lane_oldest_seconds') === 0
      )
    },
    8_000,
  )
})

it('spillway_store_pool has all states, and runtime metrics exist', async () => {
  const text = await scrape()
  for (const state of ['busy', 'idle', 'waiting', 'max']) {
    expect(sample(text, 'spillway_store_pool', { state }), state).toBeGreaterThanOrEqual(0)
  }
  expect(sample(text, 'spillway_store_pool', { state: 'max' })).toBe(10)
  expect(sample(text, 'process_cpu_seconds_total')).toBeGreaterThan(0)
  expect(sample(text, 'process_resident_memory_bytes')).toBeGreaterThan(0)
  expect(sample(text, 'nodejs_eventloop_lag_seconds')).toBeGreaterThanOrEqual(0)
})

it('label sets stay bounded whatever callers send', async () => {
  const series = async () => (await scrape()).split('\n').filter((line) => line !== '' && !line.startsWith('#')).length
  await get(server, '/nowhere-0')
  const before = await series()
  await Promise.all(Array.from({ length: 300 }, (_, n) => get(server, `/nowhere-${n}`)))
  await Promise.all(
    Array.from({ length: 50 }, (_, n) =>
      submit(server, `${target.origin}/a`, { queue: `label-${n}` }, { 'x-user-id': `user-${n}` }),
    ),
  )
  expect((await series()) - before).toBeLessThan(60)
  expect(await scrape()).not.toMatch(/user-\d|label-\d|nowhere-\d/)
})

it('is Prometheus text, the same at both paths', async () => {
  const answer = await get(server, '/metrics')
  expect(answer.headers.get('content-type')).toMatch(/^text\/plain; version=0\.0\.4/)
  expect((await get(server, '/_metrics')).status).toBe(200)
  const names = new Set<string>()
  for (const line of answer.text.split('\n')) {
    if (line === '') continue
    expect(line).toMatch(
      /^(# (HELP|TYPE) [a-zA-Z_:][\w:]* .+|[a-zA-Z_:][\w:]*(\{[^{}]*\})? (NaN|[+-]?Inf|[+-]?[\d.]+(e[+-]?\d+)?))$/i,
    )
    const typed = /^# TYPE (\S+)/.exec(line)?.[1]
    if (typed === undefined) continue
    expect(names.has(typed), typed).toBe(false)
    names.add(typed)
  }
})

it(
  'promtool has nothing to say of the scrape of any role',
  withPromtool(async (promtool) => {
    const nats = await startNats()
    try {
      const alone = ['gateway', 'worker', 'router'].map((role) => ({ SPILLWAY_ROLES: role, NATS_URL: nats.url }))
      const others = await Promise.all(alone.map((env) => startServer({ DATABASE_URL: database.url, ...env })))
      for (const one of [server, ...others]) {
        const checked = await promtool(['check', 'metrics'], tmpdir(), (await get(one, '/metrics')).text)
        expect(checked).toEqual({ ok: true, output: '' })
      }
      await Promise.all(others.map((one) => one.kill()))
    } finally {
      await nats.stop()
    }
  }),
)
