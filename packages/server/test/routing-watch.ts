/** Asks every process of a fleet for its health and its metrics all the time, and keeps what it said and how long it took. */
import { readFile } from 'node:fs/promises'
import { setTimeout as delay } from 'node:timers/promises'
import type { GatewaySample, IntakeSample, Poll } from './routing-evidence.js'
import type { RoutingFleet } from './routing-fleet.js'
import { get, type ServerProcess, sample } from './server-process.js'

const everyMs = 100
const tickMs = 20
const statuses = ['inactive', 'warning', 'active', 'unknown']

export class FleetWatch {
  readonly polls: Poll[] = []
  readonly intakes: Record<string, IntakeSample[]> = {}
  readonly gateway: GatewaySample[] = []
  readonly backlog: { at: number; count: number }[] = []
  readonly #fleet: RoutingFleet
  readonly #loops: Promise<void>[] = []
  readonly #ticking: NodeJS.Timeout
  #stopped = false
  /** For how long this process could not look, all in all. */
  #heldUpMs = 0

  constructor(fleet: RoutingFleet) {
    this.#fleet = fleet
    let last = performance.now()
    this.#ticking = setInterval(() => {
      const now = performance.now()
      this.#heldUpMs += Math.max(0, now - last - 2 * tickMs)
      last = now
    }, tickMs)
    for (const name of Object.keys(fleet.intakes)) this.intakes[name] = []
    for (const [name, server] of Object.entries(fleet.all)) {
      this.#loops.push(this.#again(() => this.#health(name, server)))
      this.#loops.push(this.#again(() => this.#metrics(name, server)))
    }
    const { stranger } = fleet
    if (stranger === null) return
    const look = async (): Promise<void> => {
      const count = await stranger.backlog()
      this.backlog.push({ at: performance.now(), count })
    }
    this.#loops.push(this.#again(look))
  }

  get status(): string {
    return this.gateway.at(-1)?.status ?? 'unknown'
  }

  /** The highest level that a process reports now: 0 inactive, 1 warning, 2 active; NaN before all have reported. */
  get level(): number {
    return Math.max(...Object.values(this.intakes).map((samples) => samples.at(-1)?.level ?? Number.NaN))
  }

  async stop(): Promise<void> {
    this.#stopped = true
    clearInterval(this.#ticking)
    await Promise.all(this.#loops)
  }

  async #again(look: () => Promise<void>): Promise<void> {
    while (!this.#stopped) {
      const began = performance.now()
      await look()
      await delay(Math.max(0, began + everyMs - performance.now()))
    }
  }

  async #ask(process: string, server: ServerProcess, path: string): Promise<string> {
    const before = { heldUpMs: this.#heldUpMs, starvedMs: await starvedMs(server.pid) }
    const at = performance.now()
    // Status 0 is a poll without an answer, which the verdict finds.
    const { status, text } = await get(server, path).catch(() => ({ status: 0, text: '' }))
    const tookMs = performance.now() - at
    const starved = (await starvedMs(server.pid)) - before.starvedMs
    // Both may have been at the same time: the longer one, not their sum.
    const ms = Math.max(0, tookMs - Math.max(this.#heldUpMs - before.heldUpMs, starved))
    this.polls.push({ process, path, at, tookMs, ms, status })
    return status === 200 ? text : ''
  }

  async #health(name: string, server: ServerProcess): Promise<void> {
    await this.#ask(name, server, '/_health')
  }

  async #metrics(name: string, server: ServerProcess): Promise<void> {
    const text = ofRouting(await this.#ask(name, server, '/_metrics'))
    if (text === '') return
    const at = performance.now()
    if (name === 'gateway') {
      const status = statuses.find((one) => sample(text, 'gateway_backpressure_status', { status: one }) === 1)
      this.gateway.push({ at, status: status ?? 'missing' })
    }
    const value = (series: string, labels = {}): number => sample(text, series, labels) ?? 0
    const active = sample(text, 'router_intake_backpressure_active')
    // Before the first look at the signals there is nothing to tell.
    if (active === undefined) return
    this.intakes[name]?.push({
      ...{ at, active },
      level: value('router_intake_backpressure_level'),
      pending: value('router_jetstream_pending_messages'),
      p95: value('router_intake_processing_latency_p95'),
      inFlight: value('router_intake_inflight_messages'),
      triggered: ['backlog', 'latency', 'inflight']
        .map((trigger) => value('router_intake_backpressure_triggered_total', { trigger }))
        .reduce((sum, count) => sum + count),
    })
  }

  /** Of the gateway, now. */
  async counted(series: string, labels: Record<string, string> = {}): Promise<number> {
    const { text } = await get(this.#fleet.gateway, '/_metrics')
    return sample(text, series, labels) ?? Number.NaN
  }
}

/**
 * For how long a process was ready to run and had no CPU, all in all: on a machine with more to do than it can, that is
 * most of what an answer takes, and says nothing of the one who answers. 0 where the system does not tell.
 */
async function starvedMs(pid: number): Promise<number> {
  const schedstat = await readFile(`/proc/${pid}/schedstat`, 'utf8').catch(() => '')
  return Number(schedstat.split(' ')[1] ?? 0) / 1_000_000
}

/** The few lines that are looked at: all of them, ten times a second and process, would take the CPU of the test. */
function ofRouting(metrics: string): string {
  return metrics
    .split('\n')
    .filter((line) => /^(router|gateway)_/.test(line) && !line.includes('_bucket'))
    .join('\n')
}
