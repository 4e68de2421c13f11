/** Alerts: what is sent, how often and in which order, whatever happens to receivers and processes. */
import { spawn } from 'node:child_process'
import { createHmac } from 'node:crypto'
import { once } from 'node:events'
import { createInterface } from 'node:readline'
import { fileURLToPath } from 'node:url'
import Type from 'typebox'
import { afterEach, describe, expect, it } from 'vitest'
import { eventually, overriding, signal } from '../../../spillway/test/pipeline-fixture.js'
import { type AlertsBench, alertsBench, latencyAlert, secret } from '../alerts-fixture.js'
import { type Handle, sample } from '../server-process.js'

let a: AlertsBench
afterEach(() => a.close())

const ok: Handle = (_, response) => void response.writeHead(204).end()
/** The first calls are answered by these, all others well. */
function first(...handles: Handle[]): Handle {
  return (call, response) => (handles.shift() ?? ok)(call, response)
}
const status =
  (code: number, headers: Record<string, string> = {}): Handle =>
  (_, response) =>
    void response.writeHead(code, headers).end()

const rowsOf = (column: string) =>
  a.bench
    .sql<{ value: unknown }>(`SELECT ${column} AS value FROM spillway.alerts ORDER BY seq`)
    .then((rows) => rows.map(({ value }) => value))

describe('a change', () => {
  it('is sent with its members, signed', async () => {
    a = await alertsBench()
    const { alerts } = await a.reporter()
    alerts.report(latencyAlert('firing'))
    const [notice] = await a.received(1)
    expect(notice).toEqual({
      alert_name: 'router_intake_latency_high',
      severity: 'critical',
      message: 'latency is firing',
      labels: { subject: 's' },
      annotations: { pending_messages: 7, latency_p95_ms: 2_345.5, inflight_messages: 3 },
      status: 'firing',
      timestamp: expect.stringMatching(/^\d{4}-\d\d-\d\dT\d\d:\d\d:\d\d\.\d{3}Z$/),
    })
    const [call] = a.receiver.calls
    expect(call).toMatchObject({ method: 'POST', path: '/hook' })
    expect(call?.headers['content-type']).toBe('application/json')
    const expected = createHmac('sha256', secret)
      .update(call?.body ?? '')
      .digest('hex')
    expect(call?.headers['x-spillway-signature']).toBe(`sha256=${expected}`)
  })

  it('is not signed without a secret', async () => {
    a = await alertsBench()
    const { alerts } = await a.reporter({ webhook: { url: a.receiver.origin, secret: null } })
    alerts.report(latencyAlert('firing'))
    await a.received(1)
    expect(a.receiver.calls[0]?.headers).not.toHaveProperty('x-spillway-signature')
  })

  it('is recorded, and sent nowhere, without a webhook', async () => {
    a = await alertsBench()
    const { alerts } = await a.reporter({ webhook: null })
    alerts.report(latencyAlert('firing'))
    await eventually(async () => (await rowsOf('delivery'))[0] === 'none' || undefined, 'its record')
    expect(await a.bench.sql('SELECT FROM spillway.ops')).toEqual([])
  })

  it('keeps its place when it has to be sent again: an end never overtakes its beginning', async () => {
    a = await alertsBench(first(status(500), status(503), status(429)))
    const { alerts } = await a.reporter()
    for (const change of ['firing', 'resolved', 'firing', 'resolved'] as const) alerts.report(latencyAlert(change))
    const notices = await a.received(7)
    expect(notices.map((notice) => notice.status)).toEqual([
      ...['firing', 'firing', 'firing', 'firing'],
      ...['resolved', 'firing', 'resolved'],
    ])
    await eventually(async () => (await rowsOf('delivery')).every((d) => d === 'delivered') || undefined, 'the records')
  })

  it('is sent again after a connection that broke, with the same key', async () => {
    a = await alertsBench(first((_, response) => void response.destroy()))
    const { alerts, metrics } = await a.reporter()
    alerts.report(latencyAlert('firing'))
    await a.received(2)
    const [before, after] = a.receiver.calls
    expect(after?.body).toBe(before?.body)
    expect(after?.headers['idempotency-key']).toBe(before?.headers['idempotency-key'])
    const delivered = () =>
      metrics().then((text) => sample(text, 'spillway_alert_deliveries_total', { outcome: 'delivered' }))
    await eventually(async () => (await delivered()) === 1 || undefined, 'the count of deliveries')
    expect(sample(await metrics(), 'spillway_alert_deliveries_total', { outcome: 'retried' })).toBe(1)
  })

  it('is sent again after a receiver that does not answer in time', async () => {
    a = await alertsBench(first(() => undefined))
    const { alerts } = await a.reporter({ timing: { sendMs: 200 } })
    alerts.report(latencyAlert('firing'))
    await a.received(2)
  })

  it('waits for as long as the receiver asks', async () => {
    a = await alertsBench(first(status(503, { 'retry-after': '1' })))
    const { alerts } = await a.reporter()
    alerts.report(latencyAlert('firing'))
    await a.received(2)
    const [before, after] = a.receiver.calls
    expect((after?.at ?? 0) - (before?.at ?? 0)).toBeGreaterThan(950)
  })

  it('is not sent to where a redirect leads, and becomes a dead letter', async () => {
    a = await alertsBench(first(status(307, { location: '/elsewhere' })))
    const { alerts } = await a.reporter()
    alerts.report(latencyAlert('firing'))
    await eventually(async () => (await rowsOf('delivery'))[0] === 'failed' || undefined, 'the end of it')
    const dead = () => a.bench.sql<{ type: string }>('SELECT type FROM spillway.dead_letters')
    expect(await eventually(async () => (await dead())[0], 'the dead letter')).toEqual({ type: 'alerts.deliver' })
    expect(a.receiver.calls.map(({ path }) => path)).toEqual(['/hook'])
  })

  it('fails for good after ten attempts, which is logged, and the next one is sent', async () => {
    a = await alertsBench(first(...Array.from({ length: 10 }, () => status(500))))
    const { alerts } = await a.reporter()
    alerts.report(latencyAlert('firing'))
    alerts.report(latencyAlert('resolved'))
    const notices = await a.received(11)
    expect(notices.map((notice) => notice.status)).toEqual([...Array<string>(10).fill('firing'), 'resolved'])
    expect(a.bench.logged).toContainEqual(
      expect.objectContaining({ level: 'error', fields: expect.objectContaining({ attempt: 10, status: 'firing' }) }),
    )
  })

  it('that failed for good is sent when its dead letter is redriven', async () => {
    a = await alertsBench(first(status(400)))
    const { alerts, intake } = await a.reporter()
    alerts.report(latencyAlert('firing'))
    const dead = () => a.bench.sql<{ id: string }>('SELECT id FROM spillway.dead_letters')
    const { id } = await eventually(async () => (await dead())[0], 'the dead letter')
    await intake.store.redrive([id])
    intake.wakeAll()
    await a.received(2)
    await eventually(async () => (await rowsOf('delivery'))[0] === 'delivered' || undefined, 'its record')
  })

  it('that ends what never began is none', async () => {
    a = await alertsBench()
    const { alerts } = await a.reporter()
    alerts.report(latencyAlert('resolved'))
    alerts.report(latencyAlert('firing'))
    expect(await a.received(1)).toMatchObject([{ status: 'firing' }])
    expect(await rowsOf('status')).toEqual(['firing'])
  })

  it('waits while the store is unreachable, and runs in its order', async () => {
    a = await alertsBench()
    let away = 3
    const { alerts } = await a.reporter(
      {},
      {
        wrap: (store) =>
          overriding(store, {
            begin: async (ms, of) => {
              if (of === 'operators' && away-- > 0) throw Object.assign(new Error('away'), { code: 'unavailable' })
              return store.begin(ms, of)
            },
          }),
      },
    )
    for (const change of ['firing', 'resolved'] as const) alerts.report(latencyAlert(change))
    expect(away).toBeGreaterThan(0)
    expect(await a.received(2)).toMatchObject([{ status: 'firing' }, { status: 'resolved' }])
    expect(away).toBeLessThan(0)
  })

  it('is written before its process closes', async () => {
    a = await alertsBench()
    const { alerts } = await a.reporter({ webhook: null })
    alerts.report(latencyAlert('firing'))
    alerts.report(latencyAlert('resolved'))
    await alerts.close()
    expect(await rowsOf('status')).toEqual(['firing', 'resolved'])
  })

  it('that the store cannot take is lost alone', async () => {
    a = await alertsBench()
    const { alerts } = await a.reporter()
    alerts.report(latencyAlert('firing', 'bad', { message: 'NUL: \0' }))
    alerts.report(latencyAlert('firing', 'good'))
    expect(await a.received(1)).toMatchObject([{ labels: { subject: 'good' } }])
    expect(a.bench.logged.filter(({ level }) => level === 'error')).toHaveLength(1)
  })
})

describe('several processes', () => {
  it('that report the same send it once', async () => {
    a = await alertsBench()
    const reporters = await Promise.all([a.reporter(), a.reporter(), a.reporter()])
    for (const { alerts } of reporters) alerts.report(latencyAlert('firing'))
    await a.received(1)
    // A process that reported only after the others had resolved it would make it fire again, and rightly.
    const known = () => a.bench.sql('SELECT FROM spillway.alert_reporters')
    await eventually(async () => (await known()).length === 3 || undefined, 'all of them to be known')
    for (const { alerts } of reporters) alerts.report(latencyAlert('resolved'))
    await a.received(2)
    for (const { alerts } of reporters) alerts.report(latencyAlert('firing', 'sentinel'))
    const notices = await a.received(3)
    expect(notices.map((n) => `${n.labels.subject} ${n.status}`)).toEqual(['s firing', 's resolved', 'sentinel firing'])
    const counted = await Promise.all(reporters.map(({ metrics }) => metrics()))
    const firing = { alert_name: 'router_intake_latency_high', status: 'firing' }
    expect(counted.reduce((sum, text) => sum + (sample(text, 'spillway_alerts_total', firing) ?? 0), 0)).toBe(2)
  })

  it('resolve it when the last of them does', async () => {
    a = await alertsBench()
    const [one, other] = [await a.reporter(), await a.reporter()]
    one.alerts.report(latencyAlert('firing'))
    await a.received(1)
    other.alerts.report(latencyAlert('firing'))
    const both = () => a.bench.sql('SELECT FROM spillway.alert_reporters')
    await eventually(async () => (await both()).length === 2 || undefined, 'both to be known')
    one.alerts.report(latencyAlert('resolved'))
    await eventually(async () => (await both()).length === 1 || undefined, 'the first to be done')
    expect(await rowsOf('status')).toEqual(['firing'])
    other.alerts.report(latencyAlert('resolved'))
    expect((await a.received(2))[1]).toMatchObject({ status: 'resolved' })
  })

  it('deliver what one reported that was killed, and end it when it is not heard of any more', async () => {
    a = await alertsBench()
    // The tables are there before the clock is changed.
    const heir = await a.reporter({ timing: { renewMs: 50 } })
    await heir.intake.lanes.pause({ type: 'alerts.deliver' })
    const program = fileURLToPath(new URL('../alerts-reporter-process.ts', import.meta.url))
    const child = spawn(process.execPath, ['--import', 'tsx', program, a.bench.url, a.receiver.origin], {
      stdio: ['ignore', 'pipe', 'inherit'],
    })
    try {
      await once(createInterface({ input: child.stdout }), 'line')
    } finally {
      child.kill('SIGKILL')
      await once(child, 'exit')
    }
    expect(a.notices()).toEqual([])
    await heir.intake.lanes.resume({ type: 'alerts.deliver' })
    expect(await a.received(1)).toMatchObject([{ status: 'firing', labels: { subject: 'killed' } }])
    await a.ahead('1 minute')
    expect((await a.received(2))[1]).toMatchObject({ status: 'resolved', labels: { subject: 'killed' } })
  })

  it('do not resolve what one still sees, however long ago it reported it', async () => {
    a = await alertsBench()
    const { alerts } = await a.reporter({ timing: { renewMs: 30 } })
    await a.reporter({ timing: { renewMs: 30 } })
    alerts.report(latencyAlert('firing'))
    await a.received(1)
    // A report holds for 45 seconds: twice it would have run out, had it not been renewed in between.
    for (const interval of ['40 seconds', '80 seconds', '120 seconds']) {
      await a.ahead(interval)
      const renewed = () =>
        a.bench.sql(`SELECT FROM spillway.alert_reporters WHERE until > spillway.clock() + interval '40 seconds'`)
      await eventually(async () => (await renewed()).length === 1 || undefined, `a renewal at ${interval}`)
    }
    expect(await rowsOf('status')).toEqual(['firing'])
  })

  it('report again an alert that expired while its observer could not report it', async () => {
    a = await alertsBench()
    const { alerts } = await a.reporter({ timing: { renewMs: 50 } })
    alerts.report(latencyAlert('firing'))
    await a.received(1)
    await a.bench.sql(
      `WITH gone AS (DELETE FROM spillway.alert_reporters) UPDATE spillway.alert_states SET status = 'resolved'`,
    )
    expect((await a.received(2))[1]).toMatchObject({ status: 'firing' })
  })
})

describe('too many that wait', () => {
  it('lose the oldest that is over already, with its end; the rest is sent', async () => {
    a = await alertsBench()
    const { alerts, metrics } = await a.reporter({ waitingMax: 3 }, { role: 'direct' })
    const report = async (change: 'firing' | 'resolved', subject: string) => {
      const before = (await rowsOf('seq')).length
      alerts.report(latencyAlert(change, subject))
      await eventually(async () => (await rowsOf('seq')).length > before || undefined, 'its record')
    }
    await report('firing', 'a')
    await report('firing', 'b')
    await report('resolved', 'b')
    await report('firing', 'c')
    const waiting = () => a.bench.sql<{ n: number }>('SELECT count(*)::int AS n FROM spillway.ops')
    await eventually(async () => (await waiting())[0]?.n === 2 || undefined, 'their operations to be cancelled')
    expect(await rowsOf('delivery')).toEqual(['waiting', 'dropped', 'dropped', 'waiting'])
    expect(sample(await metrics(), 'spillway_alert_deliveries_total', { outcome: 'dropped' })).toBe(2)
    expect(a.bench.logged.filter(({ level }) => level === 'error')).toHaveLength(2)
    await a.reporter()
    const subjects = (await a.received(2)).map(({ labels }) => labels.subject)
    expect(subjects.sort()).toEqual(['a', 'c'])
  })

  it('do not lose one that the receiver may have seen', async () => {
    a = await alertsBench()
    const { alerts } = await a.reporter({ waitingMax: 2 }, { role: 'direct' })
    alerts.report(latencyAlert('firing', 'a'))
    await eventually(async () => (await rowsOf('seq')).length === 1 || undefined, 'its record')
    await a.bench.sql('UPDATE spillway.alerts SET attempts = 1')
    for (const change of ['resolved', 'firing'] as const) alerts.report(latencyAlert(change, 'a'))
    await eventually(async () => (await rowsOf('seq')).length === 3 || undefined, 'the records')
    const dropped = async () => (await rowsOf('delivery')).join(' ')
    expect(
      await eventually(async () => ((await dropped()).includes('dropped') ? dropped() : undefined), 'a drop'),
    ).toBe('waiting dropped dropped')
  })

  it('are not sent when they were dropped and their process died before it could cancel them', async () => {
    a = await alertsBench()
    const { alerts } = await a.reporter({}, { role: 'direct' })
    alerts.report(latencyAlert('firing', 'a'))
    alerts.report(latencyAlert('resolved', 'a'))
    await eventually(async () => (await rowsOf('seq')).length === 2 || undefined, 'the records')
    await a.bench.sql(`UPDATE spillway.alerts SET delivery = 'dropped' WHERE status = 'firing'`)
    await a.reporter()
    expect(await a.received(1)).toMatchObject([{ status: 'resolved' }])
  })
})

describe('an operation that runs for three times its timeout', () => {
  it('raises an alert, which is resolved when it has ended', async () => {
    a = await alertsBench()
    const { intake } = await a.reporter({ timing: { watchMs: 50 } })
    const release = signal()
    const hang = intake.define('hang', {
      body: Type.Object({}),
      lane: () => ['q', 'p'],
      timeoutMs: 30_000,
      run: () => release.promise,
    })
    const started = await intake.submit(hang, {}, { respondAsync: true })
    if (started.kind !== 'queued') throw new Error(`not accepted: ${started.kind}`)
    await eventually(
      async () => (await a.bench.ticket(started.operationId)).status === 'processing' || undefined,
      'it to run',
    )
    await a.ahead('89 seconds')
    const looked = await intake.read('SELECT FROM spillway.stuck_operations(3)')
    expect(looked.rows).toEqual([])
    await a.ahead('95 seconds')
    const [notice] = await a.received(1)
    expect(notice).toMatchObject({
      alert_name: 'spillway_operation_stuck',
      status: 'firing',
      labels: { type: 'hang' },
      annotations: { operation_id: started.operationId, queue: 'q', partition: 'p', seconds: expect.any(Number) },
    })
    expect(a.notices()).toHaveLength(1)
    release.fire()
    expect((await a.received(2))[1]).toMatchObject({ status: 'resolved', labels: { type: 'hang' } })
  })
})
