import { sendProblem } from 'spillway/workload'
import type { App, AppReply, AppRouteConfig } from './app.js'

export interface CheckState {
  ok: boolean
  /** The problem, for people; no driver message. */
  detail?: string
  /** Work can be accepted without it: a failure degrades health but not readiness. */
  optional?: boolean
  /** The routes that fail meanwhile. */
  routes?: readonly string[]
}

export interface HealthDeps {
  version: string
  /**
   * The last known state of each dependency. Synchronous: a probe queries nothing, so health answers under any load and
   * with everything else down.
   */
  checks: Readonly<Record<string, () => CheckState>>
  metrics: { contentType: string; render: () => string | Promise<string> }
  protectMetrics: boolean
}

const liveUrls = ['/_health', '/health', '/health/live']
const readyUrl = '/health/ready'
const metricsUrls = ['/metrics', '/_metrics']
const probeUrls = new Set([...liveUrls, readyUrl, ...metricsUrls])

export function isProbe(url: string): boolean {
  return probeUrls.has(url)
}

const notReadyRetryAfterMs = 1_000

type Answer = (reply: AppReply) => unknown

export function addHealth(app: App, deps: HealthDeps): void {
  const states = (): [string, CheckState][] => Object.entries(deps.checks).map(([name, check]) => [name, check()])
  const probe = { public: true, neverShed: true, anyHost: true } as const

  const live = () => {
    const current = states()
    return {
      status: current.every(([, { ok }]) => ok) ? 'healthy' : 'degraded',
      version: deps.version,
      uptime_seconds: Math.round(process.uptime()),
      checks: Object.fromEntries(current.map(([name, state]) => [name, shown(state)])),
    }
  }

  const add = (urls: readonly string[], summary: string, config: AppRouteConfig, answer: Answer): void => {
    for (const url of urls) {
      app.get(url, { config, schema: { tags: ['health'], summary } }, async (_, reply) =>
        answer(reply.header('cache-control', 'no-store')),
      )
    }
  }

  add(liveUrls, 'Answers while the process runs', probe, live)
  add([readyUrl], 'Whether work can be accepted', probe, (reply) => {
    const failing = states().filter(([, state]) => !state.ok && state.optional !== true)
    if (failing.length === 0) return { status: 'ready', version: deps.version }
    return sendProblem(reply, {
      code: 'not_ready',
      detail: `Not ready: ${failing.map(([name, { detail }]) => (detail === undefined ? name : `${name} (${detail})`)).join(', ')}.`,
      retryAfterMs: notReadyRetryAfterMs,
      extensions: { failing: failing.map(([name]) => name), checks: live().checks },
    })
  })
  const guarded: AppRouteConfig = deps.protectMetrics ? { role: ['metrics', 'view'] } : { public: true }
  add(metricsUrls, 'Prometheus text format', { ...guarded, neverShed: true }, (reply) => {
    reply.type(deps.metrics.contentType)
    return deps.metrics.render()
  })
}

function shown({ ok, detail, routes }: CheckState) {
  return { ok, ...(detail !== undefined && { detail }), ...(!ok && routes !== undefined && { routes }) }
}
