/** What is kept of alerts, and listed. */
import { afterAll, beforeAll, describe, expect, it } from 'vitest'
import { eventually } from '../../../spillway/test/pipeline-fixture.js'
import { AlertLog } from '../../src/workloads/alerts/alert-log.js'
import { alertRoutes } from '../../src/workloads/alerts/routes.js'
import { type AlertsBench, alertsBench, latencyAlert, listening, type Reporter } from '../alerts-fixture.js'

let a: AlertsBench
let reporter: Reporter
let app: Awaited<ReturnType<typeof listening>>

beforeAll(async () => {
  a = await alertsBench()
  reporter = await a.reporter({ webhook: null })
  app = await listening(alertRoutes(reporter.alerts, 4_194_304))
  const { alerts } = reporter
  for (const subject of ['a', 'b', 'c']) alerts.report(latencyAlert('firing', subject))
  alerts.report(latencyAlert('resolved', 'b'))
  alerts.report(latencyAlert('firing', 'a', { name: 'router_intake_queue_depth_high', severity: 'warning' }))
  await eventually(async () => (await app.get('/api/v1/alerts')).body.items.length === 5 || undefined, 'five records')
})
afterAll(async () => {
  await app.close()
  await a.close()
})

const summaryOf = (items: Record<string, unknown>[]) =>
  items.map(({ labels, status }) => `${(labels as { subject: string }).subject} ${status}`)

describe('the list of alerts', () => {
  it('has every change, newest first', async () => {
    const { body } = await app.get('/api/v1/alerts')
    expect(summaryOf(body.items)).toEqual(['a firing', 'b resolved', 'c firing', 'b firing', 'a firing'])
    expect(body.next_cursor).toBeNull()
    expect(body.items[0]).toEqual({
      id: expect.stringMatching(/^[0-9a-f]{8}-[0-9a-f]{4}-7/),
      alert_name: 'router_intake_queue_depth_high',
      severity: 'warning',
      status: 'firing',
      message: 'latency is firing',
      labels: { subject: 'a' },
      annotations: { pending_messages: 7, latency_p95_ms: 2_345.5, inflight_messages: 3 },
      timestamp: expect.stringMatching(/Z$/),
      delivery: 'none',
    })
  })

  it('comes in pages, without gap or repeat', async () => {
    const seen: unknown[] = []
    let cursor = ''
    for (let page = 0; page < 3; page++) {
      const { body } = await app.get(`/api/v1/alerts?limit=2${cursor}`)
      expect(body.items.length).toBeLessThanOrEqual(2)
      seen.push(...body.items.map(({ id }) => id))
      cursor = `&cursor=${body.next_cursor}`
      expect(body.next_cursor === null).toBe(page === 2)
    }
    expect(new Set(seen).size).toBe(5)
  })

  it('can be of a status and of a name', async () => {
    const { body } = await app.get('/api/v1/alerts?status=firing&name=router_intake_latency_high')
    expect(summaryOf(body.items)).toEqual(['c firing', 'b firing', 'a firing'])
  })

  it('has each alert once, as it is now, with active=true', async () => {
    const { body } = await app.get('/api/v1/alerts?active=true')
    expect(summaryOf(body.items)).toEqual(['a firing', 'b resolved', 'c firing', 'a firing'])
    const firing = await app.get('/api/v1/alerts?active=true&status=firing')
    expect(summaryOf(firing.body.items)).toEqual(['a firing', 'c firing', 'a firing'])
  })

  it.each(['status=burning', 'name=none_of_ours', 'limit=0', 'limit=201', 'cursor=%21', 'active=perhaps'])(
    'refuses %s',
    async (query) => {
      const { status, body } = await app.get(`/api/v1/alerts?${query}`)
      expect(status).toBe(400)
      expect(body.code).toBe('invalid_request')
    },
  )

  it('is for operators', async () => {
    expect((await app.get('/api/v1/alerts', 'consume')).status).toBe(403)
  })
})

describe('a sweep', () => {
  const log = () =>
    new AlertLog({
      ...{ intake: reporter.intake, schema: '"spillway"', delivery: null, reporter: crypto.randomUUID() },
      ...{ holdMs: 1_000, waitingMax: 10 },
    })
  const insert = (count: number, delivery: string, age = '0') =>
    a.bench.sql(
      `INSERT INTO spillway.alerts (id, key, name, labels, status, severity, message, annotations, at, delivery)
       SELECT gen_random_uuid(), gen_random_uuid(), 'spillway_operation_stuck', '{}', 'resolved', 'warning', 'swept', '{}',
         clock_timestamp() - $1::interval, $2 FROM generate_series(1, $3)`,
      [age, delivery, count],
    )
  const left = async () =>
    (await a.bench.sql<{ n: number }>(`SELECT count(*)::int AS n FROM spillway.alerts WHERE message = 'swept'`))[0]?.n

  it('removes alerts after 30 days, and closes those without a delivery', async () => {
    await insert(2, 'delivered', '30 days 1 minute')
    await insert(3, 'delivered', '29 days 23 hours')
    await insert(1, 'waiting', '1 day')
    expect(await log().sweep()).toEqual({ removed: { alerts: 2 }, isFull: false })
    expect(await left()).toBe(4)
    const { body } = await app.get('/api/v1/alerts?name=spillway_operation_stuck&limit=1')
    expect(body.items[0]).toMatchObject({ delivery: 'failed' })
  })

  it('keeps the newest 10,000', async () => {
    await insert(10_001, 'none')
    await log().sweep()
    const [row] = await a.bench.sql<{ n: number }>('SELECT count(*)::int AS n FROM spillway.alerts')
    expect(row?.n).toBe(10_000)
  })
})
