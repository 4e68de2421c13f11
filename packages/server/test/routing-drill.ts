/**
 * Plays one overload on a fleet of real processes and gathers what was seen of it; routing-verdict.ts judges.
 *
 *   calm ──load──► overloaded (doors and reads are tried) ──every message has its end──► recovering ──► calm, alerts resolved
 */
import { randomUUID } from 'node:crypto'
import { setTimeout as delay } from 'node:timers/promises'
import type { End, Evidence, Read, Scenario, Sent, Shed, Way } from './routing-evidence.js'
import { type RoutingFleet, startRoutingFleet, task } from './routing-fleet.js'
import { FleetWatch } from './routing-watch.js'
import { type Answer, call, type Env, finishes, get, post, until } from './server-process.js'

export interface DrillOptions {
  databaseUrl: string
  /** False: the operation queue is the intake. */
  nats?: boolean
  say?: (line: string) => void
  /** The machine is free for others: what is left is to wait for the recovery. */
  onLoadOver?: () => void
}

const atOnce = 100
const trickleMs = 100
const spreadStepMs = 50
const errorLevels = ['error', 'fatal']
/** However long it takes: what is too long, the verdict says. */
const patienceMs = 60_000
/** Longer than recovery may take, gateway included. */
const recoveryPatienceMs = 30_000
const decidePath = '/api/v1/routes/decide'
const adjustmentsName = 'gateway_rate_limit_backpressure_adjustment_total'
const messagesPath = '/api/v1/messages'

type Fleet = Pick<RoutingFleet, 'gateway' | 'stranger'>

export async function drill(scenario: Scenario, options: DrillOptions): Promise<Evidence> {
  const { databaseUrl, nats = true } = options
  const book = new Book()
  const fleet = await startRoutingFleet(
    { databaseUrl, nats, env: envOf(scenario), routers: routersOf(scenario, nats) },
    (answer) => book.answered(answer),
  )
  try {
    return await play(scenario, fleet, book, options)
  } finally {
    await fleet.close()
  }
}

function envOf({ bounds, delayMs, checkIntervalSeconds, checkTimeoutMs, decidePerMinute }: Scenario): Env {
  const [queue, latency, inflight] = [bounds.backlog, bounds.latency, bounds.inflight]
  const three = (name: string, unit: string, [warn, critical, overload]: readonly [number, number, number]): Env => ({
    [`ROUTER_${name}_WARN${unit}`]: `${warn}`,
    [`ROUTER_${name}_CRIT${unit}`]: `${critical}`,
    [`ROUTER_${name}_OVERLOAD${unit}`]: `${overload}`,
  })
  return {
    ...three('QUEUE', '', queue),
    ...three('LATENCY', '_MS', latency),
    ...three('INFLIGHT', '', inflight),
    ROUTER_SIMULATE_DELAY_MS: `${delayMs}`,
    GATEWAY_BACKPRESSURE_CHECK_INTERVAL_SECONDS: `${checkIntervalSeconds}`,
    GATEWAY_BACKPRESSURE_TIMEOUT_MS: `${checkTimeoutMs}`,
    GATEWAY_RATE_LIMIT_ROUTES_DECIDE_LIMIT: `${decidePerMinute}`,
  }
}

function routersOf({ concurrency }: Scenario, nats: boolean): Env[] {
  return concurrency.map((count) => ({ [nats ? 'ROUTER_CONCURRENCY' : 'SPILLWAY_CONCURRENCY']: `${count}` }))
}

/** Every message that went in, and every end that one had. */
class Book {
  readonly sent: Sent[] = []
  readonly ends: End[] = []
  readonly refusals: Shed[] = []
  readonly #ended = new Set<string>()

  send(id: string, way: Way): void {
    this.sent.push({ id, way, at: performance.now() })
  }

  end(id: string, kind: End['kind'], said?: string): void {
    this.#ended.add(id)
    this.ends.push({ id, at: performance.now(), kind, ...(said !== undefined && { said }) })
  }

  get firstDecided(): string | undefined {
    return this.ends.find(({ kind }) => kind === 'decided')?.id
  }

  get openOfSubject(): number {
    return this.sent.filter(({ id, way }) => way === 'subject' && !this.#ended.has(id)).length
  }

  answered({ ok, context, ...rest }: Record<string, unknown>): void {
    const { request_id: id } = context as { request_id?: string }
    this.end(id ?? 'nobody', ok === true ? 'decided' : 'other', JSON.stringify(rest))
  }
}

async function play(
  scenario: Scenario,
  fleet: RoutingFleet,
  book: Book,
  { say = () => undefined, onLoadOver = () => undefined }: DrillOptions,
): Promise<Evidence> {
  const watch = new FleetWatch(fleet)
  try {
    await until('all to be calm', () => watch.status === 'inactive' && watch.level === 0)
    // A gateway that has not heard of its routers yet is careful, and counts that.
    const adjustedBefore = await watch.counted(adjustmentsName)
    const startedAt = performance.now()
    say('the load begins')
    const load = new Load(scenario, fleet, book)
    const [{ shed, reads }] = await Promise.all([tryDoors(fleet, watch, book), load.run()])
    await findDead(fleet, book)
    const endedAt = Math.max(...book.ends.filter(({ kind }) => kind !== 'dead').map(({ at }) => at))
    say('every message has its end; waiting for the recovery')
    onLoadOver()
    await until('the recovery', () => watch.status === 'inactive' && watch.level === 0, recoveryPatienceMs)
    await until('all alerts to be resolved', () => openAlerts(fleet) === 0, recoveryPatienceMs)
    const overloaded = { reason: 'router_overloaded' }
    const rejections = await watch.counted('router_intake_backpressure_rejections_total', overloaded)
    const adjustments = (await watch.counted(adjustmentsName)) - adjustedBefore
    await watch.stop()
    const { polls, intakes, gateway } = watch
    const { sent, ends, refusals } = book
    const after = await ask(fleet, decidePath, task())
    return {
      ...{ scenario, startedAt, endedAt, sent, ends, shed, reads, polls, intakes, gateway, rejections, adjustments },
      refusals: [...refusals, ...shed.filter(({ code }) => code === 'service_overloaded')],
      backlog: fleet.stranger === null ? load.accepted : watch.backlog,
      notices: fleet.notices(),
      stored: (await fleet.stranger?.stored()) ?? 0,
      after: { status: after.status, policy: after.headers.get('ratelimit-policy') },
      mishaps: mishapsOf(fleet),
    }
  } finally {
    await watch.stop()
  }
}

function openAlerts(fleet: RoutingFleet): number {
  const last = new Map(fleet.notices().map(({ name, status }) => [name, status]))
  return [...last.values()].filter((status) => status !== 'resolved').length
}

function mishapsOf({ all }: RoutingFleet): string[] {
  return Object.entries(all).flatMap(([name, server]) => {
    const errors = server.logs().filter(({ level }) => errorLevels.includes(String(level)))
    return errors.map((line) => `${name} logged: ${JSON.stringify(line)}`)
  })
}

const ask = (fleet: Fleet, path: string, body: object, headers: Record<string, string> = {}): Promise<Answer> =>
  call(fleet.gateway, 'POST', path, { body, headers, timeoutMs: patienceMs })

/** The load: straight to the subject, and through the gateway beside it until the subject is worked off. */
class Load {
  /** Without a broker: how many were accepted until when. */
  readonly accepted: { at: number; count: number }[] = []
  readonly #scenario: Scenario
  readonly #fleet: RoutingFleet
  readonly #book: Book

  constructor(scenario: Scenario, fleet: RoutingFleet, book: Book) {
    this.#scenario = scenario
    this.#fleet = fleet
    this.#book = book
  }

  /** Resolves when all but the dead ones have had their ends. */
  async run(): Promise<void> {
    const { viaGateway } = this.#scenario
    const through = Array.from({ length: viaGateway }, (_, i) => this.#through(i % 2 === 0 ? 'decide' : 'message'))
    if (this.#fleet.stranger === null) await this.#submitAll()
    else {
      const published = this.#publishAll()
      through.push(this.#trickle(published))
      await published
      await until('all to be answered', () => this.#book.openOfSubject === 0, patienceMs)
    }
    await Promise.all(through)
  }

  async #publishAll(): Promise<void> {
    const { messages, hopeless, overMs = 0 } = this.#scenario
    const began = performance.now()
    const step = overMs === 0 ? atOnce : Math.ceil((messages * spreadStepMs) / overMs)
    for (let from = 0; from < messages; from += step) {
      const batch = Array.from({ length: Math.min(step, messages - from) }, (_, i) =>
        this.#publish(from + i < hopeless),
      )
      await Promise.all(batch)
      if (overMs > 0) await delay(Math.max(0, began + (overMs * (from + step)) / messages - performance.now()))
    }
  }

  async #publish(isHopeless: boolean): Promise<void> {
    const one = task(isHopeless ? { policy_id: 'of nobody' } : {})
    this.#book.send(one.request_id, isHopeless ? 'hopeless' : 'subject')
    await this.#fleet.stranger?.publish(one, { answered: !isHopeless })
  }

  /** Without a broker all of it goes through the gateway, to be worked on later. */
  async #submitAll(): Promise<void> {
    const { messages } = this.#scenario
    const ends: Promise<void>[] = []
    for (let from = 0; from < messages; from += atOnce) {
      const batch = Array.from({ length: Math.min(atOnce, messages - from) }, () => this.#submit())
      ends.push(...(await Promise.all(batch)).map(({ end }) => end))
    }
    await Promise.all(ends)
  }

  /** Resolves when it is accepted or refused; its end comes later. */
  async #submit(): Promise<{ end: Promise<void> }> {
    const one = task()
    this.#book.send(one.request_id, 'message')
    const answer = await ask(this.#fleet, messagesPath, one)
    if (answer.status === 202) this.accepted.push({ at: performance.now(), count: this.accepted.length + 1 })
    return { end: this.#endOf(one.request_id, answer) }
  }

  /** A few at a time: the routers' own limits are what is tried here, and the door has to be seen from outside. */
  async #trickle(published: Promise<void>): Promise<void> {
    const asked: Promise<void>[] = []
    let isPublished = false
    void published.then(() => {
      isPublished = true
    })
    for (let i = 0; !isPublished || this.#book.openOfSubject > 0; i++) {
      asked.push(this.#through(i % 2 === 0 ? 'decide' : 'message'))
      await delay(trickleMs)
    }
    await Promise.all(asked)
  }

  async #through(way: 'decide' | 'message'): Promise<void> {
    const one = task()
    this.#book.send(one.request_id, way)
    await this.#endOf(one.request_id, await ask(this.#fleet, way === 'decide' ? decidePath : messagesPath, one))
  }

  async #endOf(id: string, answer: Answer): Promise<void> {
    if (answer.status === 503) {
      this.#book.refusals.push(shedOf('the load', answer))
      return this.#book.end(id, 'refused')
    }
    if (answer.status === 200) return this.#book.end(id, 'decided')
    if (answer.status !== 202) return this.#book.end(id, 'other', `${answer.status} ${answer.text}`)
    const { status, error_message: why } = await finishes(this.#fleet.gateway, answer.body.operationId, patienceMs)
    return this.#book.end(id, status === 'completed' ? 'decided' : 'other', why)
  }
}

/** The dead letters, whole, are the ends of those that nobody waits for. */
async function findDead(fleet: RoutingFleet, book: Book): Promise<void> {
  if (fleet.stranger === null) return
  const hopeless = book.sent.filter(({ way }) => way === 'hopeless').length
  const path = '/api/v1/routes/dead-letters?limit=100'
  const found = await until('the dead letters', async () => {
    const { items } = (await get(fleet.gateway, path)).body
    return items.length >= hopeless && items
  })
  for (const { data_base64: data } of found) {
    const { request_id: id } = JSON.parse(Buffer.from(String(data), 'base64').toString()) as { request_id: string }
    book.end(id, 'dead')
  }
}

/** While the gateway knows of the overload, before and after: what is closed, and what goes on. */
async function tryDoors(fleet: RoutingFleet, watch: FleetWatch, book: Book): Promise<{ shed: Shed[]; reads: Read[] }> {
  const isActive = (): boolean => watch.status === 'active'
  for (;;) {
    await until('the gateway to know of the overload', isActive, patienceMs)
    const known = await until('a first answer', () => (isActive() ? book.firstDecided : 'over'), patienceMs)
    if (known === 'over') continue
    const reads = await readAll(fleet, known)
    const shed = await shedAll(fleet)
    const since = performance.now()
    await until('the next look at the gateway', () => (watch.gateway.at(-1)?.at ?? 0) > since + trickleMs)
    if (isActive()) return { shed, reads }
    book.refusals.push(...shed.filter(({ code }) => code === 'service_overloaded'))
  }
}

async function shedAll(fleet: RoutingFleet): Promise<Shed[]> {
  const policy = {
    policy_id: randomUUID(),
    providers: [{ provider_id: 'a', expected_latency_ms: 1, expected_cost: 1 }],
  }
  const block = { type: `block-${randomUUID()}`, version: '1.0.0' }
  const { request_id: _id, ...asked } = task()
  const { gateway } = fleet
  const blocks = '/api/v1/registry/blocks'
  const tries: [string, () => Promise<Answer>][] = [
    [`POST ${decidePath}`, () => post(gateway, decidePath, task())],
    [`POST ${messagesPath}`, () => post(gateway, messagesPath, task())],
    ['POST /api/v1/policies', () => post(gateway, '/api/v1/policies', policy)],
    ['POST /api/v1/policies/dry-run', () => post(gateway, '/api/v1/policies/dry-run', { tasks: [asked] })],
    ['DELETE /api/v1/policies/:id', () => call(gateway, 'DELETE', `/api/v1/policies/${policy.policy_id}`)],
    [`POST ${blocks}`, () => post(gateway, blocks, block)],
    [`PUT ${blocks}/:type/:version`, () => call(gateway, 'PUT', `${blocks}/${block.type}/1.0.0`, { body: {} })],
    [`DELETE ${blocks}/:type/:version`, () => call(gateway, 'DELETE', `${blocks}/${block.type}/1.0.0`)],
  ]
  return Promise.all(tries.map(async ([what, attempt]) => shedOf(what, await attempt())))
}

async function readAll({ gateway, stranger }: RoutingFleet, id: string): Promise<Read[]> {
  const paths = ['/api/v1/registry/blocks', '/api/v1/policies', '/api/v1/alerts', '/api/v1/slo', '/health/ready']
  if (stranger !== null) paths.push('/api/v1/routes/dead-letters')
  const others = await Promise.all(
    paths.map(async (path) => ({ what: path, status: (await get(gateway, path)).status })),
  )
  // Who is answered does not wait until the answer is kept for others: that follows.
  const kept = await until('the decision to be kept', async () => {
    const { status } = await get(gateway, `${decidePath}/${id}`)
    return status !== 404 && status
  })
  return [...others, { what: `${decidePath}/:id`, status: kept }]
}

function shedOf(what: string, { status, body, headers }: Answer): Shed {
  const { code, detail, ok, retry_after_seconds: retryAfterInBody } = body
  return { what, status, code, detail, ok, retryAfter: Number(headers.get('retry-after')), retryAfterInBody }
}
