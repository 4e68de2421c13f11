/**
 * One run: starts everything, plays the faults while clients submit, lets it come to rest, and gathers the evidence.
 *
 *   boot ──► faults ──► calm (all is up again, connections pass) ──► certain (every client has its answer) ──► drained ──► consumed
 */
import { createWriteStream } from 'node:fs'
import { mkdir, mkdtemp, rm, writeFile } from 'node:fs/promises'
import { tmpdir } from 'node:os'
import { join } from 'node:path'
import { setTimeout as delay } from 'node:timers/promises'
import { type Breakage, breakSchema } from './breakage.js'
import { Clients } from './clients.js'
import { pause } from './clock.js'
import { type Cluster, schema, startCluster } from './cluster.js'
import { Consumers, configureQueue, consumerGroups, consumerLeaseMs } from './consumers.js'
import { Faults } from './faults.js'
import { drainMs, makeFleet } from './fleet.js'
import type { PlannedFault } from './plan.js'
import type { Evidence, Fault, Life } from './records.js'
import { type Sink, startSink } from './sink.js'
import type { Slot } from './slot.js'
import { type Lane, ratedLimit, type Temper } from './workload.js'

export interface RunOptions {
  seed: number
  lanes: readonly Lane[]
  temper: Temper
  servers: number
  workers: number
  rate: number
  leaseMs: number
  breakage: Breakage | null
  /** Clients go on for so long at least, whatever the plan. Default: as long as the plan. */
  forMsMin?: number
  /** Made once the fleet is known: which slots there are. */
  plan(slots: readonly string[]): readonly PlannedFault[]
  /** A line for people; now and then, and at every turn. */
  say(line: string): void
  signal?: AbortSignal
}

export interface RunResult {
  evidence: Evidence
  /** Logs of the processes and of the clients; the caller removes it. */
  folder: string
  /** Kills in the plan; fewer were played if the machine was too slow for it. */
  planned: number
  /** Of the database: version, fsync and the like. */
  database: Record<string, string>
  interrupted: boolean
}

/** A request that got no answer for so long hangs: the longest waits inside a process together are shorter. */
export const deadlineMs = 12_000
const progressMs = 5_000
const bootMaxMs = 60_000
const certainMaxMs = 60_000
const drainMaxMs = 90_000
const drainLookMs = 100
const consumeMaxMs = 60_000
const auditPauseMs = 500

export async function run(options: RunOptions): Promise<RunResult> {
  const folder = await mkdtemp(join(tmpdir(), 'spillway-chaos-'))
  const started: (() => Promise<void>)[] = []
  let ok = false
  try {
    const result = await runIn(folder, options, started)
    ok = true
    return result
  } finally {
    for (const end of started.reverse()) await end()
    // The caller knows of it only when the run came to its end.
    if (!ok) options.say(`logs are in ${folder}`)
    await rm(join(folder, 'data'), { recursive: true, force: true })
  }
}

async function runIn(folder: string, options: RunOptions, started: (() => Promise<void>)[]): Promise<RunResult> {
  const { say, seed, lanes, temper } = options
  const logDir = join(folder, 'logs')
  await mkdir(logDir)
  const journal = createWriteStream(join(folder, 'journal.jsonl'))
  started.push(() => new Promise((resolve) => journal.end(resolve)))
  const note = (entry: string, fields: object): void => void journal.write(`${JSON.stringify({ entry, ...fields })}\n`)

  say('starting PostgreSQL')
  const databaseLog = createWriteStream(join(logDir, 'database.log'))
  const cluster = await startCluster(join(folder, 'data'), (line) => databaseLog.write(`${line}\n`))
  started.push(() => cluster.stop())
  await breakSchema(cluster.url, schema, options.breakage)
  const sink = await startSink({ seed, lanes, temper })
  started.push(() => sink.close())
  const lives: Life[] = []
  const slots = await makeFleet({ ...options, cluster, sinkOrigin: sink.origin, logDir, lives })
  started.push(async () => {
    await Promise.all(slots.map((slot) => slot.kill()))
    await Promise.all(slots.map((slot) => slot.proxy.close()))
  })
  say(`starting ${slots.map((slot) => slot.name).join(', ')}`)
  await Promise.all(slots.map((slot) => slot.start()))
  const database = await cluster.settings()

  const hasMessages = lanes.some((lane) => lane.routes.includes('push')) && (await configureQueue(slots, bootMaxMs))
  const clients = new Clients({ ...options, slots, sinkOrigin: sink.origin, deadlineMs, note })
  started.push(() => clients.close())
  const consumers = hasMessages ? new Consumers({ seed, slots, deadlineMs, note }) : null
  if (consumers !== null) started.push(() => consumers.close())
  const watch = watchMessages(cluster)
  started.push(async () => void (await watch.end()))
  await allAccept(slots, clients, options.signal)
  const plan = options.plan(slots.map((slot) => slot.name))
  say(`plan: ${describe(plan)}`)
  const faults = new Faults({
    plan,
    slots,
    cluster,
    drainMs,
    hasAccepted: (pid) => clients.acceptors.has(pid),
    maxMs: boundOf(plan),
    note: (fault) => note('fault', fault),
  })
  const stop = (): void => faults.stop()
  options.signal?.addEventListener('abort', stop)
  if (options.signal?.aborted === true) stop()
  const progress = setInterval(() => say(progressOf(plan, faults, clients, sink)), progressMs)
  started.push(async () => {
    clearInterval(progress)
    faults.stop()
    // Its faults are reported where they are awaited.
    await faults.over.catch(() => undefined)
  })
  await Promise.all([faults.over, delay(options.forMsMin ?? 0)])
  say(progressOf(plan, faults, clients, sink))
  const interrupted = options.signal?.aborted === true
  const rest = await comeToRest({ say, slots, clients, consumers, cluster, stop: (slot) => faults.end(slot) })
  clearInterval(progress)
  const seen = await watch.end()
  const evidence = await gather({ options, clients, consumers, sink, cluster, faults, lives, seen, ...rest })
  await writeFile(join(folder, 'evidence.json'), JSON.stringify(evidence))
  return { evidence, folder, planned: plan.filter(isKill).length, database, interrupted }
}

/** Faults begin when every server and app has accepted something: what is slow to start is not what is looked for. */
async function allAccept(slots: readonly Slot[], clients: Clients, signal: AbortSignal | undefined): Promise<void> {
  const wanted = new Set(slots.filter((slot) => slot.origin !== null).map((slot) => slot.name))
  const deadline = Date.now() + bootMaxMs
  for (let seen = 0; wanted.size > 0 && signal?.aborted !== true; ) {
    for (; seen < clients.tries.length; seen++) {
      const made = clients.tries[seen]
      if (made?.end === 'answered' && (made.status ?? 500) < 300) wanted.delete(made.slot)
    }
    if (Date.now() > deadline) throw new Error(`${[...wanted].join(', ')} accepted nothing within ${bootMaxMs} ms`)
    await delay(drainLookMs)
  }
}

async function comeToRest(o: {
  say(line: string): void
  slots: readonly Slot[]
  clients: Clients
  consumers: Consumers | null
  cluster: Cluster
  stop(slot: Slot): Promise<void>
}): Promise<{ drained: boolean; consumed: boolean }> {
  o.say('faults are over; everything runs, clients make sure of what they sent')
  for (const slot of o.slots) slot.proxy.restore()
  o.consumers?.calm()
  await Promise.all(o.slots.map((slot) => slot.exclusively(() => slot.start())))
  const certain = await Promise.race([o.clients.finish().then(() => true), delay(certainMaxMs, false, { ref: false })])
  if (!certain) o.say(`some clients have no answer after ${certainMaxMs} ms`)
  o.say(`draining: ${await o.cluster.unfinished()} operations are left`)
  const drained = await isNothingLeft(() => o.cluster.unfinished(), drainMaxMs)
  const unread = (): Promise<number> =>
    o.consumers === null ? Promise.resolve(0) : o.cluster.unconsumed(consumerGroups)
  o.say(`consuming: ${await unread()} partitions and leases are left`)
  const consumed = await isNothingLeft(unread, consumeMaxMs)
  await o.consumers?.close()
  o.say('stopping everything')
  // At rest all have signed off: what is still taken then belongs to nobody.
  await Promise.all(o.slots.map((slot) => o.stop(slot)))
  return { drained, consumed }
}

async function isNothingLeft(count: () => Promise<number>, withinMs: number): Promise<boolean> {
  const deadline = Date.now() + withinMs
  for (;;) {
    if ((await count()) === 0) return true
    if (Date.now() > deadline) return false
    await delay(drainLookMs)
  }
}

/** What must hold of the messages at any moment is asked for all the time; each finding is reported once. */
function watchMessages(cluster: Cluster): { end(): Promise<string[]> } {
  const found = new Set<string>()
  const ended = new AbortController()
  const over = (async () => {
    while (!ended.signal.aborted) {
      for (const fault of (await cluster.messagesAudit()) ?? []) found.add(fault)
      await pause(auditPauseMs, ended.signal)
    }
  })()
  return {
    end: async () => {
      ended.abort()
      await over
      return [...found]
    },
  }
}

async function gather(o: {
  options: RunOptions
  clients: Clients
  consumers: Consumers | null
  sink: Sink
  cluster: Cluster
  faults: Faults
  lives: readonly Life[]
  seen: readonly string[]
  drained: boolean
  consumed: boolean
}): Promise<Evidence> {
  const { clients, consumers, cluster, options } = o
  return {
    seed: options.seed,
    deadlineMs,
    submitted: clients.submitted,
    tries: clients.tries,
    reads: clients.reads,
    effects: await cluster.effects(),
    deliveries: o.sink.deliveries,
    pops: consumers?.pops ?? [],
    acks: consumers?.acks ?? [],
    consumers: { groups: consumers === null ? [] : consumerGroups, leaseMs: consumerLeaseMs },
    tickets: await cluster.tickets(),
    faults: o.faults.played,
    lives: o.lives,
    audit: [...new Set([...o.seen, ...(await cluster.audit())])],
    petitionsMoved: await cluster.petitionsMoved(),
    placesHeld: await cluster.placesHeld(),
    rated: options.lanes
      .filter((lane) => lane.routes.includes('rated'))
      .map((lane) => ({ lane: lane.name, limit: ratedLimit })),
    drained: o.drained,
    consumed: o.consumed,
  }
}

/** A plan may take so much longer than planned: each fault of a slot waits for the one before it. */
const boundOf = (plan: readonly PlannedFault[]): number => 60_000 + 5 * Math.max(0, ...plan.map(({ atMs }) => atMs))

function describe(plan: readonly PlannedFault[]): string {
  const counts = new Map<string, number>()
  for (const { kind } of plan) counts.set(kind, (counts.get(kind) ?? 0) + 1)
  return [...counts].map(([kind, count]) => `${count} × ${kind}`).join(', ')
}

const isKill = (fault: { kind: string }): boolean => ['kill', 'vanish', 'postgres', 'backend'].includes(fault.kind)

function progressOf(plan: readonly PlannedFault[], faults: Faults, clients: Clients, sink: Sink): string {
  const kills = faults.played.filter(isKill)
  const holders = kills.filter((fault: Fault) => (fault.held?.length ?? 0) > 0).length
  const share = kills.length === 0 ? '' : ` (${Math.round((100 * holders) / kills.length)}% held leased work)`
  return `${kills.length} of ${plan.filter(isKill).length} kills${share}, ${faults.played.length} of ${plan.length} faults, ${clients.accepted} accepted, ${sink.deliveries.length} delivered to the sink`
}
