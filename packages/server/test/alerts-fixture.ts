/** Processes that report alerts, on one database, and a receiver for what they send. */
import { pino } from 'pino'
import type { FastifyLike } from '../../spillway/src/http/fastify-tickets.js'
import type { Intake } from '../../spillway/src/intake/intake.js'
import { type Bench, bench, eventually, loggingTo } from '../../spillway/test/pipeline-fixture.js'
import { buildApp } from '../src/app.js'
import type { Authenticator } from '../src/auth/auth.js'
import type { Role } from '../src/auth/identity.js'
import { createMetrics } from '../src/prometheus/metrics.js'
import type { AlertChange as Alert } from '../src/workload.js'
import { Alerts, type AlertsOptions } from '../src/workloads/alerts/index.js'
import { createAlertMetrics } from '../src/workloads/alerts/metrics.js'
import { type Call, type Handle, startTarget, type Target } from './server-process.js'

export const secret = 'a secret of both sides'

export interface Notice {
  alert_name: string
  status: string
  labels: Record<string, string>
  [member: string]: unknown
}

export interface Reporter {
  intake: Intake
  alerts: Alerts
  metrics(): Promise<string>
}

export interface AlertsBench {
  bench: Bench
  receiver: Target
  /** Another process, as far as the database can tell. */
  reporter(options?: Partial<AlertsOptions>, intake?: Parameters<Bench['intake']>[0]): Promise<Reporter>
  notices(): Notice[]
  /** What has come in, once there are so many. */
  received(count: number, ms?: number): Promise<Notice[]>
  /** The database's clock goes ahead by so much from now on. */
  ahead(interval: string): Promise<void>
  close(): Promise<void>
}

const noticeOf = ({ body }: Call): Notice => JSON.parse(body) as Notice

export async function alertsBench(handle?: Handle): Promise<AlertsBench> {
  const b = await bench()
  const receiver = await startTarget(handle)
  const all: Alerts[] = []
  return {
    bench: b,
    receiver,
    reporter: async (options = {}, settings = {}) => {
      const metrics = createMetrics({ runtime: false })
      const intake = await b.intake({ metrics, ...settings })
      const alerts = new Alerts(intake, {
        schema: '"spillway"',
        log: loggingTo(b.logged),
        webhook: { url: `${receiver.origin}/hook`, secret },
        metrics: createAlertMetrics(metrics.registry),
        ...options,
        timing: { retryBaseMs: 20, retryMaxMs: 40, ...options.timing },
      })
      all.push(alerts)
      return { intake, alerts, metrics: () => metrics.scrape() }
    },
    notices: () => receiver.calls.map(noticeOf),
    received: (count, ms) =>
      eventually(
        () => (receiver.calls.length >= count ? receiver.calls.map(noticeOf) : undefined),
        `${count} notices`,
        ms,
      ),
    ahead: async (interval) => {
      await b.sql(`CREATE OR REPLACE FUNCTION spillway.clock() RETURNS timestamptz LANGUAGE sql VOLATILE AS
        $$ SELECT clock_timestamp() + interval '${interval}' $$`)
    },
    close: async () => {
      await Promise.all(all.map((alerts) => alerts.close()))
      await b.close()
      await receiver.close()
    },
  }
}

export function latencyAlert(status: Alert['status'], subject = 's', change: Partial<Alert> = {}): Alert {
  return {
    name: 'router_intake_latency_high',
    severity: 'critical',
    status,
    message: `latency is ${status}`,
    labels: { subject },
    annotations: { pending_messages: 7, latency_p95_ms: 2_345.5, inflight_messages: 3 },
    ...change,
  }
}

/** Routes in an app. A request with `Bearer <role>` has that role. */
export async function listening(...routes: ((app: FastifyLike) => Promise<void>)[]) {
  const authenticator: Authenticator = {
    enabled: true,
    clientAddress: () => '127.0.0.1',
    authenticate: ({ authorization = '' }) => ({
      identity: 'somebody',
      roles: new Set([authorization.slice('Bearer '.length) as Role]),
    }),
  }
  const { app } = buildApp({
    ...{ log: pino({ level: 'silent' }), authenticator, corsOrigins: [] },
    ...{ bodyLimitBytes: 1_048_576, requestTimeoutMs: 30_000, headersTimeoutMs: 10_000, connectionsMax: 100 },
  })
  for (const route of routes) await app.register(async (inner) => route(inner as unknown as FastifyLike))
  const origin = await app.listen({ host: '127.0.0.1', port: 0 })
  return {
    get: async (path: string, role: Role = 'operate') => {
      const answer = await fetch(`${origin}${path}`, { headers: { authorization: `Bearer ${role}` } })
      return { status: answer.status, body: (await answer.json()) as Page }
    },
    close: () => app.close(),
  }
}

/** What these tests look into. */
export interface Page {
  items: Record<string, unknown>[]
  next_cursor: string | null
  objectives: Record<string, unknown>[]
  code: string
}
