/**
 * The router's part of backpressure: samples the signals each second, exports them, and reports every change.
 *
 *   sample ──► level (pressure/router-pressure.ts) ──changed──► metrics, log, alert
 *         └──► each signal: below its critical bound ──at it──► alert firing ──below half of it for 3 s──► resolved
 */
import { type Intake, LatencyWindow, LevelHold, RouterPressure } from 'spillway/workload'
import type { Backlog } from '../../brokers/nats/broker.js'
import type { AlertChange } from '../../workload.js'
import type { RoutingContext } from './context.js'

const sampleMs = 1_000
/** Without a broker the backlog comes from the heartbeat each second, so sampling is free. */
const sampleQueueMs = 250
/** The objectives' limit (docs/guides/routing.md#alerts-and-objectives), independent of the levels' settings. */
const objectiveLatencyMs = 500
const objectiveDepth = 100
/** Like the levels: 3 s, less a margin for early samples. */
const alertHoldMs = 2_900
const rank = { inactive: 0, warning: 1, active: 2 } as const
const triggerNames = { backlog: 'backlog', latencyMs: 'latency', inFlight: 'inflight' } as const

/** The alert of each signal at its critical bound. */
const signalAlerts = [
  { signal: 'backlog', name: 'router_intake_queue_depth_high', severity: 'critical', what: 'backlog' },
  { signal: 'latencyMs', name: 'router_intake_latency_high', severity: 'critical', what: 'latency' },
  { signal: 'inFlight', name: 'router_intake_inflight_high', severity: 'warning', what: 'in-flight' },
] as const

type Observed = ReturnType<RouterPressure['observe']>

export class Signals {
  readonly #context: RoutingContext
  readonly #pressure: RouterPressure
  readonly #latency = new LatencyWindow()
  readonly #alerts = signalAlerts.map((alert) => ({ ...alert, hold: new LevelHold(alertHoldMs) }))
  readonly #counted = new Set<string>()
  #timer: NodeJS.Timeout | undefined
  #isSampling = false
  #inFlight = 0
  #inFlightMax = 0
  #last = { pending: 0, backlog: 0, latencyMs: 0, inFlight: 0 }

  constructor(context: RoutingContext) {
    this.#context = context
    this.#pressure = new RouterPressure({ bounds: context.bounds, policy: context.settings.policy })
  }

  get level(): Observed['level'] {
    return this.#pressure.level
  }

  start(): void {
    const { metrics, broker } = this.#context
    metrics.inFlight.set(this.#inFlight)
    metrics.inFlightMax.set(this.#inFlightMax)
    metrics.backpressureActive.set(0)
    metrics.backpressureLevel.set(0)
    // Not periodic(): with a slow broker its pause would come on top of the time that the look takes.
    this.#timer = setInterval(() => void this.#sample(), broker === null ? sampleQueueMs : sampleMs)
    this.#timer.unref()
  }

  stop(): void {
    clearInterval(this.#timer)
  }

  began(): void {
    this.#inFlight++
    const { metrics } = this.#context
    metrics.inFlight.set(this.#inFlight)
    if (this.#inFlight <= this.#inFlightMax) return
    this.#inFlightMax = this.#inFlight
    metrics.inFlightMax.set(this.#inFlightMax)
  }

  /** `tookMs`: since its arrival in the broker. `isGood`: it was answered correctly, whatever the answer. */
  ended(status: string, tookMs: number, isGood: boolean): void {
    this.putBack()
    this.#latency.add(tookMs)
    this.#count(status, tookMs, isGood)
  }

  /** It died while no router held it. This says nothing about this router's speed, so it adds no latency sample. */
  diedUnheld(tookMs: number): void {
    this.#count('exhausted', tookMs, false)
  }

  /** Returned to the broker: not ended, but no longer running here. */
  putBack(): void {
    this.#inFlight--
    this.#context.metrics.inFlight.set(this.#inFlight)
  }

  #count(status: string, tookMs: number, isGood: boolean): void {
    const { metrics, objectives } = this.#context
    metrics.latency(status).observe(tookMs / 1_000)
    objectives.count('availability', isGood ? 1 : 0, 1)
    objectives.count('latency', tookMs < objectiveLatencyMs ? 1 : 0, 1)
  }

  async #sample(): Promise<void> {
    const { broker, intake, log } = this.#context
    if (this.#isSampling) return
    this.#isSampling = true
    try {
      this.#observe(broker === null ? queueBacklog(intake) : await broker.backlog())
    } catch (fault) {
      log.warn({ err: fault }, 'cannot read the backlog of the router')
      this.#observe(null)
    }
    this.#isSampling = false
  }

  /** Null: unknown. */
  #observe(backlog: Pick<Backlog, 'pending' | 'ackPending'> | null): void {
    const { metrics, objectives } = this.#context
    const { p50, p95, p99 } = this.#latency.percentiles()
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
    const observed = this.#pressure.observe({ backlog: waiting, latencyMs: p95, inFlight: this.#inFlight }, now)
    metrics.backpressureActive.set(observed.level === 'active' ? 1 : 0)
    metrics.backpressureLevel.set(rank[observed.level])
    this.#countTriggers(observed)
    if (observed.changedFrom !== null) this.#changed(observed.changedFrom, observed)
    this.#checkAlerts(now)
  }

  /** Counts each signal once per level that it caused or joined, until the pressure ends: a fluctuation is not a new trigger. */
  #countTriggers({ level, triggers }: Observed): void {
    if (level === 'inactive') this.#counted.clear()
    for (const trigger of triggers) {
      const name = `${level} ${trigger}`
      if (this.#counted.has(name)) continue
      this.#counted.add(name)
      this.#context.metrics.triggered(triggerNames[trigger]).inc()
    }
  }

  #changed(from: Observed['level'], { level, triggers }: Observed): void {
    const { log } = this.#context
    const isWorse = rank[level] > rank[from]
    const fields = { from, to: level, triggers, ...this.#last }
    if (isWorse) log.warn(fields, 'router backpressure')
    else log.info(fields, 'router backpressure')
    if (level !== 'active' && from !== 'active') return
    this.#report('router_intake_backpressure_active', 'warning', level === 'active', 'backpressure active')
  }

  #checkAlerts(now: number): void {
    for (const { signal, name, severity, what, hold } of this.#alerts) {
      const bound = this.#context.bounds[signal][1]
      const before = hold.level
      const at = (times: number) => (this.#last[signal] * times >= bound ? ('warning' as const) : ('inactive' as const))
      const level = hold.observe({ enter: at(1), stay: at(2) }, now)
      if (level !== before) this.#report(name, severity, level !== 'inactive', `${what} high (critical from ${bound})`)
    }
  }

  #report(name: AlertChange['name'], severity: AlertChange['severity'], isFiring: boolean, what: string): void {
    const { pending, latencyMs, inFlight } = this.#last
    const { alerts, subject } = this.#context
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

/** Without a broker: the operations waiting in the queue, and those that its workers hold. */
function queueBacklog({ fleet }: Intake): Pick<Backlog, 'pending' | 'ackPending'> {
  const [decide, message] = [fleet.countsOf('routing.decide'), fleet.countsOf('routing.message')]
  return { pending: decide.pending + message.pending, ackPending: decide.running + message.running }
}
