/** Runs every door at every step, interleaved: at each offered load one door after the other. */
import { setTimeout as delay } from 'node:timers/promises'
import { askHealth, HealthWatch, type Watched } from './overload-health.js'
import {
  type DownstreamState,
  type EffectsReport,
  firstNumber,
  type StepReport,
  type StepRequest,
} from './overload-wire.js'
import { rotated } from './rounds.js'
import type { BenchContext, BenchProcess } from './section.js'
import { percentile } from './statistics.js'

export interface Door {
  readonly name: string
  readonly program: string
  readonly env: Readonly<Record<string, string>>
  /** Needs a database of its own. */
  readonly hasStore: boolean
  /** Not measured below this offered load. */
  readonly fromPerSecond?: number
}

export const doors: readonly Door[] = [
  { name: 'spillway', program: 'programs/overload-spillway.ts', env: { WHEN_BUSY: 'refuse' }, hasStore: true },
  { name: 'spillway, queueing', program: 'programs/overload-spillway.ts', env: { WHEN_BUSY: 'queue' }, hasStore: true },
  { name: 'under-pressure', program: 'programs/overload-fastify.ts', env: { WATCH: 'process' }, hasStore: false },
  {
    name: 'under-pressure, healthCheck',
    program: 'programs/overload-fastify.ts',
    env: { WATCH: 'downstream' },
    hasStore: false,
  },
  { name: 'nothing', program: 'programs/overload-fastify.ts', env: { WATCH: 'none' }, hasStore: false },
  {
    // The physical limit: how many a Fastify that does nothing else can refuse on this machine.
    name: 'refusing all',
    program: 'programs/overload-fastify.ts',
    env: { WATCH: 'refuse' },
    hasStore: false,
    fromPerSecond: 5_000,
  },
]

export interface StepResult {
  readonly door: string
  readonly ratePerSecond: number
  readonly seconds: number
  readonly clients: StepReport
  readonly effects: EffectsReport
  readonly health: Watched
  readonly downstream: DownstreamState
  /** The door had to be started again before this step. */
  readonly restarted: boolean
}

export interface Plan {
  readonly doors: readonly Door[]
  readonly ratesPerSecond: readonly number[]
  readonly seconds: number
  /** Before the first step, at its load, not counted: a cold process is slow, which would make the first step a poor one to compare with. */
  readonly warmUpSeconds: number
}

/** How long what is still under way after a step may take: a full queue is ten seconds of the downstream's work. */
const settleMsMax = 60_000
const settleLookMs = 200
/** A door may have calls of its own to hand on between two looks. */
const idleLooksWanted = 3
const startMsMax = 60_000
const listening = /^listening on (http:\/\/\S+)/

/** A process that listens. */
interface Listener {
  readonly origin: string
  readonly process: BenchProcess
}

/** The doors that are open, the downstream behind them and the clients before them. */
class Scene {
  readonly #context: BenchContext
  readonly #downstream: Listener
  readonly #clients: Listener
  readonly #opened = new Map<string, Listener>()
  readonly #databases = new Map<string, string>()
  /** Orders are numbered through, over all doors and steps. */
  #first = firstNumber

  private constructor(context: BenchContext, downstream: Listener, clients: Listener) {
    this.#context = context
    this.#downstream = downstream
    this.#clients = clients
  }

  static async set(context: BenchContext): Promise<Scene> {
    const downstream = await listen(context, 'programs/overload-downstream.ts', {})
    const clients = await listen(context, 'programs/overload-clients.ts', { DOWNSTREAM: downstream.origin })
    return new Scene(context, downstream, clients)
  }

  async open(door: Door): Promise<Listener> {
    const env: Record<string, string> = { ...door.env, DOWNSTREAM: this.#downstream.origin }
    if (door.hasStore) env.DATABASE_URL = await this.#database(door)
    const listener = await listen(this.#context, door.program, env)
    this.#opened.set(door.name, listener)
    return listener
  }

  /** The open door, or the same program restarted if an earlier step killed it. */
  async alive(door: Door): Promise<{ origin: string; restarted: boolean }> {
    const opened = this.#opened.get(door.name)
    if (opened !== undefined && (await askHealth(opened.origin)) !== null) {
      return { origin: opened.origin, restarted: false }
    }
    if (opened !== undefined) this.#context.say(`${door.name} does not answer any more and is started again`)
    await opened?.process.stop()
    return { origin: (await this.open(door)).origin, restarted: opened !== undefined }
  }

  async step(origin: string, load: { ratePerSecond: number; seconds: number; seed: number }) {
    const { hostname, port } = new URL(origin)
    const request: StepRequest = { host: hostname, port: Number(port), first: this.#first, ...load }
    await this.#state()
    const watch = new HealthWatch(origin)
    const clients = (await ask(`${this.#clients.origin}/step`, request)) as StepReport
    const health = await watch.stop()
    this.#first += clients.due
    const downstream = await this.#state()
    const effects = await this.#settled()
    return { clients, health, downstream, effects }
  }

  async strike(): Promise<void> {
    for (const { process } of [...this.#opened.values(), this.#clients, this.#downstream]) await process.stop()
    for (const name of this.#databases.keys()) await this.#context.postgres.dropDatabase(name)
  }

  async #database(door: Door): Promise<string> {
    const name = `overload_${door.name.replaceAll(/\W+/g, '_')}`
    const url = this.#databases.get(name) ?? (await this.#context.postgres.createDatabase(name))
    this.#databases.set(name, url)
    return url
  }

  /** Also resets the late-answer counter. */
  async #state(): Promise<DownstreamState> {
    return (await ask(`${this.#downstream.origin}/state`)) as DownstreamState
  }

  /** Waits until nothing of this step is under way any more: the next door finds the downstream idle. */
  async #settled(): Promise<EffectsReport> {
    const until = performance.now() + settleMsMax
    for (let idleLooks = 0; ; ) {
      const effects = (await ask(`${this.#clients.origin}/effects`)) as EffectsReport
      const isIdle = effects.queuedUndone === 0 && (await this.#state()).inFlight === 0
      idleLooks = isIdle ? idleLooks + 1 : 0
      if (idleLooks >= idleLooksWanted || performance.now() > until) return effects
      await delay(settleLookMs)
    }
  }
}

export async function runPlan(context: BenchContext, plan: Plan): Promise<StepResult[]> {
  const scene = await Scene.set(context)
  for (const door of plan.doors) {
    const { origin } = await scene.open(door)
    context.say(`${door.name}: warming up for ${plan.warmUpSeconds} s`)
    await scene.step(origin, { ratePerSecond: plan.ratesPerSecond[0] ?? 1, seconds: plan.warmUpSeconds, seed: 0 })
  }
  const results: StepResult[] = []
  for (const [index, ratePerSecond] of plan.ratesPerSecond.entries()) {
    const measured = plan.doors.filter(({ fromPerSecond = 0 }) => ratePerSecond >= fromPerSecond)
    for (const door of rotated(measured, index)) {
      const { origin, restarted } = await scene.alive(door)
      const { seconds } = plan
      context.say(`${door.name}: ${ratePerSecond}/s offered for ${seconds} s`)
      // The same seed: all doors meet the same arrivals.
      const outcome = await scene.step(origin, { ratePerSecond, seconds, seed: index + 1 })
      const result: StepResult = { door: door.name, ratePerSecond, seconds, restarted, ...outcome }
      results.push(result)
      context.say(`  ${summary(result)}`)
    }
  }
  await scene.strike()
  const order = (result: StepResult): number => plan.doors.findIndex(({ name }) => name === result.door)
  return results.sort((a, b) => a.ratePerSecond - b.ratePerSecond || order(a) - order(b))
}

function summary({ clients, health, effects, seconds }: StepResult): string {
  const perSecond = (count: number): string => `${Math.round(count / seconds)}/s`
  const statuses = Object.entries(clients.byStatus).map(([status, count]) => `${status} ${perSecond(count)}`)
  return [
    `good ${perSecond(clients.goodDuring)}, p50 ${clients.goodMs.p50.toFixed(0)} ms, p99 ${clients.goodMs.p99.toFixed(0)} ms`,
    statuses.join(', '),
    `left ${perSecond(clients.timedOut + clients.connectionLost + clients.noConnection)}`,
    `health p99 ${percentile(health.tookMs, 0.99).toFixed(0)} ms`,
    `door ${health.cores.toFixed(2)} cores, ${health.rssMb.at(-1)?.toFixed(0) ?? '?'} MB`,
    `clients ${clients.cores.toFixed(2)} cores, lag p99 ${clients.lagMs.p99.toFixed(0)} ms`,
    `lost ${effects.lostDone + effects.queuedUndone}`,
  ].join(' · ')
}

async function listen(context: BenchContext, program: string, env: Record<string, string>): Promise<Listener> {
  const process = context.start(program, { env })
  const [, origin = ''] = await process.line(listening, startMsMax)
  return { origin, process }
}

async function ask(url: string, body?: object): Promise<unknown> {
  const answer = await fetch(url, body === undefined ? {} : { method: 'POST', body: JSON.stringify(body) })
  if (!answer.ok) throw new Error(`${url} answered ${answer.status}: ${await answer.text()}`)
  return answer.json()
}
