/**
 * The router's part of backpressure: samples the signals each second, exports them, and reports every change.
 *
 *   sample ──► level (pressure/router-pressure.ts) ──changed──► metrics, log, alert
 *         └──► each signal: below its critical bound ──at it──► alert firing ──below half of it for 3 s──► resolved
 */
import type { LevelHold } from 'spillway/workload'
import type { AlertChange } from '../../workload.js'
import type { RoutingDeps } from './parts.js'

const sampleMs = 1_000
/** Without a broker the backlog comes from the heartbeat each second, so sampling is free. */
const sampleQueueMs = 250
/** The objectives' limit (docs/guides/routing.md#alerts-and-objectives), independent of the levels' settings. */
const objectiveLatencyMs = 500
const objectiveDepth = 100

interface SignalAlert {
  name: AlertChange['name']
  severity: AlertChange['severity']
  what: string
  bound: number
  read: (sample: Sample) => number
  hold: LevelHold
}

interface Sample {
  pending: number
  backlog: number
  latencyMs: number
  inFlight: number
}

export class Signals {
  readonly #deps: RoutingDeps
  readonly #alerts: SignalAlert[]
  #timer: NodeJS.Timeout | undefined
  #inFlight = 0
  #inFlightMax = 0
  #sampling = false
  readonly #counted = new Set<string>()
  #last: Sample = { pending: 0, backlog: 0, latencyMs: 0, inFlight: 0 }

  constructor(deps: RoutingDeps) {
    this.#deps = deps
    const { backlog, latencyMs, inFlight } = deps.settings.bounds
    this.#alerts = [
      {
        ...{ name: 'router_intake_queue_depth_high', severity: 'critical', what: 'backlog' },
        ...{ bound: backlog[1], read: (sample) => sample.backlog, hold: deps.makeHold() },
      },
      {
        ...{ name: 'router_intake_latency_high', severity: 'critical', what: 'latency' },
        ...{ bound: latencyMs[1], read: (sample) => sample.latencyMs, hold: deps.makeHold() },
      },
      {
        ...{ name: 'router_intake_inflight_high', severity: 'warning', what: 'in-flight' },
        ...{ bound: inFlight[1], read: (sample) => sample.inFlight, hold: deps.makeHold() },
      },
    ]
  }

  get inFlight(): number {
    return this.#inFlight
  }

  start(): void {
    const { metrics } = this.#deps
    metrics.inFlight.set(this.#inFlight)
    metrics.inFlightMax.set(this.#inFlightMax)
    metrics.backpressureActive.set(0)
    metrics.backpressureLevel.set(0)
    const everyMs = this.#deps.broker === null ? sampleQueueMs : sampleMs
    this.#timer = setInterval(() => void this.sample(), everyMs)
    this.#timer.unref()
  }

  stop(): void {
    clearInterval(this.#timer)
  }

  began(): void {
    this.#inFlight++
    const { metrics } = this.#deps
    metrics.inFlight.set(this.#inFlight)
    if (this.#inFlight <= this.#inFlightMax) return
    this.#inFlightMax = this.#inFlight
    metrics.inFlightMax.set(this.#inFlightMax)
  }

  /** `tookMs`: since its arrival in the broker. `isGood`: it was answered correctly, whatever the answer. */
  ended(status: string, tookMs: number, isGood: boolean): void {
    const { metrics, latency, objectives } = this.#deps
    this.#inFlight--
    metrics.inFlight.set(this.#inFlight)
    metrics.latency(status).observe(tookMs / 1_000)
    latency.add(tookMs)
    objectives.count('availability', isGood ? 1 : 0, 1)
    objectives.count('latency', tookMs < objectiveLatencyMs ? 1 : 0, 1)
  }

  /** It died while no router held it. This says nothing about this router's speed, so it adds no latency sample. */
  diedUnheld(tookMs: number): void {
    const { metrics, objectives } = this.#deps
    metrics.latency('exhausted').observe(tookMs / 1_000)
    objectives.count('availability', 0, 1)
    objectives.count('latency', tookMs < objectiveLatencyMs ? 1 : 0, 1)
  }

  /** Returned to the broker: not ended, but no longer running here. */
  putBack(): void {
    this.#inFlight--
    this.#deps.metrics.inFlight.set(this.#inFlight)
  }

  async sample(): Promise<void> {
    if (this.#sampling) return
    this.#sampling = true
    try {
      const backlog = await this.#deps.backlog()
      this.#observe(backlog)
    } catch (fault) {
      this.#deps.log.warn({ err: fault }, 'cannot read the backlog of the router')
      this.#observe(null)
    } finally {
      this.#sampling = false
    }
  }

  #observe(backlog: { pending: number; ackPending: number } | null): void {
    const { metrics, latency, objectives, pressure } = this.#deps
    const { p50, p95, p99 } = latency.percentiles()
    metrics.latencyP50.set(p50)
    metrics.latencyP95.set(p95)
    metrics.latencyP99.set(p99)
    if (backlog !== null) {
      metrics.pending.set(backlog.pending)
      metrics.ackPending.set(backlog.ackPending)
      objectives.count('depth', backlog.pending < objectiveDepth ? 1 : 0, 1)
    }
    const waiting = backlog === null ? null : backlog.pending + backlog.ackPending
    this.#last = {
      pending: backlog?.pending ?? this.#last.pending,
      // An unknown value does not count as recovered.
      backlog: waiting ?? this.#last.backlog,
      latencyMs: p95,
      inFlight: this.#inFlight,
    }
    const now = performance.now()
    const observed = pressure.observe({ backlog: waiting, latencyMs: p95, inFlight: this.#inFlight }, now)
    metrics.backpressureActive.set(observed.level === 'active' ? 1 : 0)
    metrics.backpressureLevel.set({ inactive: 0, warning: 1, active: 2 }[observed.level])
    this.#countTriggers(observed)
    if (observed.changedFrom !== null) this.#changed(observed.changedFrom, observed)
    for (const alert of this.#alerts) this.#checkAlert(alert, now)
  }

  /** Counts each signal once per level that it caused or joined, until the pressure ends: a fluctuation is not a new trigger. */
  #countTriggers({ level, triggers }: ReturnType<RoutingDeps['pressure']['observe']>): void {
    if (level === 'inactive') this.#counted.clear()
    for (const trigger of triggers) {
      const name = `${level} ${trigger}`
      if (this.#counted.has(name)) continue
      this.#counted.add(name)
      this.#deps.metrics.triggered(triggerNames[trigger]).inc()
    }
  }

  #changed(from: string, { level, triggers }: ReturnType<RoutingDeps['pressure']['observe']>): void {
    const { log } = this.#deps
    const isWorse = rank[level] > (rank[from as keyof typeof rank] ?? 0)
    const fields = { from, to: level, triggers, ...this.#last }
    if (isWorse) log.warn(fields, 'router backpressure')
    else log.info(fields, 'router backpressure')
    if (level !== 'active' && from !== 'active') return
    this.#report('router_intake_backpressure_active', 'warning', level === 'active', 'backpressure active')
  }

  #checkAlert({ name, severity, what, bound, read, hold }: SignalAlert, now: number): void {
    const value = read(this.#last)
    const before = hold.level
    const at = (times: number) => (value * times >= bound ? ('warning' as const) : ('inactive' as const))
    const level = hold.observe({ enter: at(1), stay: at(2) }, now)
    if (level !== before) this.#report(name, severity, level !== 'inactive', `${what} high (critical from ${bound})`)
  }

  #report(name: AlertChange['name'], severity: AlertChange['severity'], isFiring: boolean, what: string): void {
    const { pending, latencyMs, inFlight } = this.#last
    const { alerts, subject } = this.#deps
    const figures = `pending=${pending}, latency_p95=${Math.round(latencyMs)}ms, inflight=${inFlight}`
    alerts.report({
      name,
      severity,
      status: isFiring ? 'firing' : 'resolved',
      message: isFiring ? `Router intake ${what}: ${figures}` : `Router intake recovered, was: ${what}: ${figures}`,
      labels: { subject },
      annotations: {
        pending_messages: pending,
        latency_p95_ms: Math.round(latencyMs),
        inflight_messages: inFlight,
      },
    })
  }
}

const rank = { inactive: 0, warning: 1, active: 2 } as const
const triggerNames = { backlog: 'backlog', latencyMs: 'latency', inFlight: 'inflight' } as const
