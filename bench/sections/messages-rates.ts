/** How many messages come in and go out: over HTTP, beside the bare echo and PostgreSQL itself. */
import { ask } from '../measurement.js'
import { usageOf } from '../process-usage.js'
import type { Rows } from '../programs/measured.js'
import { nextNumbers, type Shape } from '../programs/message-body.js'
import type { Consumed, Consumption } from '../programs/message-consumers.js'
import { interleave, type Variant } from '../rounds.js'
import type { BenchContext } from '../section.js'
import {
  type Clients,
  fill,
  openQueue,
  type PushLoad,
  pushedBy,
  type Server,
  storedIn,
  untilStored,
} from './messages-sites.js'
import type { Site } from './petitions-sites.js'

export const singleConnections = 64
export const batchConnections = 16
export const batch = 100
/** Partitions that a batch is spread over. */
export const batchLanes = 5
export const partitions = 200
export const fewPartitions = 10
export const manyPartitions = 10_000
/** Consumers of the backlog, and of the few and many partitions: of ten partitions ten can be read at once. */
export const consumers = 16
export const laneConsumers = 8
/** Messages of a pop of the few and many: each of the many holds that much. */
export const laneBatch = 2

const shapes = {
  single: { queue: 'single', partitions, items: 1, lanes: 1 },
  backlog: { queue: 'backlog', partitions, items: batch, lanes: batchLanes },
  few: { queue: 'few', partitions: fewPartitions, items: 1, lanes: 1 },
  many: { queue: 'many', partitions: manyPartitions, items: 1, lanes: 1 },
} as const satisfies Record<string, Shape>
export const singleShape: Shape = shapes.single

export const pushNames = {
  echo: 'bare echo',
  single: `Spillway, ${partitions} partitions`,
  few: `Spillway, ${fewPartitions} partitions`,
  many: `Spillway, ${manyPartitions} partitions`,
  batch: `Spillway, ${batch} in a request`,
  rawOne: 'INSERT of unnest, one connection',
  rawSeveral: 'INSERT of unnest, several connections',
} as const

export const popNames = {
  backlog: `Spillway, ${partitions} partitions`,
  few: `Spillway, ${fewPartitions} partitions`,
  many: `Spillway, ${manyPartitions} partitions`,
  rawOne: 'SELECT of a range, one connection',
  rawSeveral: 'SELECT of a range, several connections',
} as const

export interface Rated {
  /** Messages that were stored, or acked, by the end of the load. */
  readonly perSecond: number
  /** Of a request; of a pop with its ack; of a statement. */
  readonly p99Ms: number
  /** Of what was asked for. */
  readonly refusedPercent: number
  /** Of what was accepted: 202. */
  readonly queuedPercent: number
  /** CPU time of the server's process for each request (push), or message (pop). */
  readonly cpuUs: number
}

export interface RatesPace {
  readonly rounds: number
  readonly seconds: number
  readonly warmUpSeconds: number
  /** Messages that each of the many partitions has before. */
  readonly laneEach: number
}

export interface RateSites {
  readonly server: Server
  readonly echo: Site
  readonly raw: Site
  readonly clients: Clients
  readonly load: PushLoad
}

const fromRows = ({ rows, seconds, p99Ms }: Rows): Rated => ({
  perSecond: rows / seconds,
  ...{ p99Ms, refusedPercent: 0, queuedPercent: 0, cpuUs: 0 },
})

/** Queues, their groups, and what the partitions of `few` and `many` need so that no push has to make one. */
export async function openQueues(
  context: BenchContext,
  { laneEach: each }: RatesPace,
  { server, clients }: RateSites,
): Promise<void> {
  for (const { queue } of Object.values(shapes)) await openQueue(server, queue)
  context.say(`filling ${fewPartitions} and ${manyPartitions} partitions`)
  await fill(clients, server, shapes.many.queue, { partitions: manyPartitions, each })
  await fill(clients, server, shapes.few.queue, {
    partitions: fewPartitions,
    each: (each * manyPartitions) / fewPartitions,
  })
}

export async function measurePushing(
  context: BenchContext,
  pace: RatesPace,
  sites: RateSites,
): Promise<ReadonlyMap<string, readonly Rated[]>> {
  const accepted = new Map<string, number>()
  const { server, raw } = sites
  const variants = (seconds: number): Variant<Rated>[] => {
    const own = (name: string, shape: Shape, connections: number): Variant<Rated> => ({
      name,
      run: () => pushRate(sites, shape, connections, seconds, accepted),
    })
    const rows = (name: string, measurement: string): Variant<Rated> => ({
      name,
      run: async () => fromRows(await ask<Rows>(raw.origin, measurement, { seconds })),
    })
    return [
      { name: pushNames.echo, run: () => echoRate(sites, seconds) },
      own(pushNames.single, shapes.single, singleConnections),
      own(pushNames.few, shapes.few, singleConnections),
      own(pushNames.many, shapes.many, singleConnections),
      own(pushNames.batch, shapes.backlog, batchConnections),
      rows(pushNames.rawOne, 'push-one'),
      rows(pushNames.rawSeveral, 'push-several'),
    ]
  }
  context.say('warming up')
  const before = new Map<string, number>()
  for (const { queue } of Object.values(shapes)) before.set(queue, await storedIn(server, queue))
  for (const variant of variants(pace.warmUpSeconds)) await variant.run()
  const rates = await interleave(variants(pace.seconds), pace.rounds, (round) =>
    context.say(`pushing: round ${round + 1} of ${pace.rounds}`),
  )
  for (const { queue } of Object.values(shapes)) {
    const stored = (await storedIn(server, queue)) - (before.get(queue) ?? 0)
    const answered = accepted.get(queue) ?? 0
    if (stored < answered) throw new Error(`${queue}: ${answered} messages were accepted and ${stored} are stored`)
  }
  return rates
}

async function echoRate({ load, echo }: RateSites, seconds: number): Promise<Rated> {
  const cpuBefore = usageOf(echo.pid).cpuSeconds
  const { answered, refused, seconds: took, p99Ms } = await load(echo, shapes.single, singleConnections, seconds)
  if (refused > 0) throw new Error(`the echo refused ${refused} of ${answered}`)
  const cpuUs = ((usageOf(echo.pid).cpuSeconds - cpuBefore) / answered) * 1e6
  return { perSecond: answered / took, p99Ms, refusedPercent: 0, queuedPercent: 0, cpuUs }
}

/** What was accepted with 202 is not in the log when it is answered: it does not count. */
async function pushRate(
  { server, load }: RateSites,
  shape: Shape,
  connections: number,
  seconds: number,
  accepted: Map<string, number>,
): Promise<Rated> {
  const before = await pushedBy(server)
  const cpuBefore = usageOf(server.pid).cpuSeconds
  const { answered, refused, seconds: took, p99Ms } = await load(server, shape, connections, seconds)
  const cpuUs = ((usageOf(server.pid).cpuSeconds - cpuBefore) / answered) * 1e6
  const after = await pushedBy(server)
  const more = (status: string): number => (after.get(status) ?? 0) - (before.get(status) ?? 0)
  const messages = (answered - refused) * shape.items
  accepted.set(shape.queue, (accepted.get(shape.queue) ?? 0) + messages)
  await untilStored(server)
  return {
    perSecond: Math.min(more('stored'), messages) / took,
    refusedPercent: (refused / answered) * 100,
    queuedPercent: (more('pending') / messages) * 100,
    ...{ p99Ms, cpuUs },
  }
}

export async function measurePopping(
  context: BenchContext,
  pace: RatesPace,
  sites: RateSites,
): Promise<ReadonlyMap<string, readonly Rated[]>> {
  const { server, raw, clients } = sites
  const { origin } = server
  const group = { origin, groups: [''], partitions: 1 }
  const variants = (seconds: number): Variant<Rated>[] => {
    const own = (name: string, of: Pick<Consumption, 'queue' | 'consumers' | 'batch'>): Variant<Rated> => ({
      name,
      run: async () => {
        const cpuBefore = usageOf(server.pid).cpuSeconds
        const consumed = await clients.consume({ ...group, ...of, seconds })
        const cpuUs = ((usageOf(server.pid).cpuSeconds - cpuBefore) / consumed.deliveries) * 1e6
        return { ...fromConsumed(of.queue, consumed), cpuUs }
      },
    })
    const rows = (name: string, measurement: string): Variant<Rated> => ({
      name,
      run: async () => fromRows(await ask<Rows>(raw.origin, measurement, { seconds })),
    })
    return [
      own(popNames.backlog, { queue: shapes.backlog.queue, consumers, batch }),
      own(popNames.few, { queue: shapes.few.queue, consumers: laneConsumers, batch: laneBatch }),
      own(popNames.many, { queue: shapes.many.queue, consumers: laneConsumers, batch: laneBatch }),
      rows(popNames.rawOne, 'pop-one'),
      rows(popNames.rawSeveral, 'pop-several'),
    ]
  }
  await topUp(context, sites, popsPerSecondMax * (pace.rounds * pace.seconds + popWarmUpSeconds))
  for (const variant of variants(popWarmUpSeconds)) await variant.run()
  return interleave(variants(pace.seconds), pace.rounds, (round) =>
    context.say(`popping: round ${round + 1} of ${pace.rounds}`),
  )
}

const popWarmUpSeconds = 0.5
/** More than is expected: a backlog that ends makes a round worthless. */
const popsPerSecondMax = 30_000

/** What was pushed is the backlog; where pushing was slow it is too little. */
async function topUp(context: BenchContext, { server, clients }: RateSites, wanted: number): Promise<void> {
  const { queue } = shapes.backlog
  const missing = wanted - (await storedIn(server, queue))
  if (missing <= 0) return
  context.say(`making the backlog ${missing} messages longer`)
  const requests = Math.ceil(missing / batch)
  const { origin } = server
  await clients.produce({ origin, shape: shapes.backlog, first: nextNumbers(), connections: 4, requests })
  await untilStored(server)
}

function fromConsumed(queue: string, consumed: Consumed): Rated {
  const { deliveries, seconds, p99Ms, pops, refused } = consumed
  checkConsumed(queue, consumed)
  return { perSecond: deliveries / seconds, p99Ms, refusedPercent: (refused / pops) * 100, queuedPercent: 0, cpuUs: 0 }
}

/** The last pop of each consumer may find all partitions taken. More empty pops mean that the backlog ran out. */
function checkConsumed(queue: string, { twice, empty, pops }: Consumed): void {
  if (twice > 0) throw new Error(`${queue}: ${twice} messages were delivered twice`)
  if (empty > consumers) throw new Error(`${queue}: the backlog was too short, ${empty} of ${pops} pops found nothing`)
}

/** What is left of all queues, so that every message has been delivered to its group exactly once, or this fails. */
export async function drainAll(context: BenchContext, { server, clients }: RateSites): Promise<number> {
  context.say('popping what is left, to count it')
  let all = 0
  for (const { queue } of Object.values(shapes)) {
    all += await drain(clients, server, queue)
  }
  return all
}

async function drain(clients: Clients, server: Server, queue: string): Promise<number> {
  const each = await storedIn(server, queue)
  const many = { groups: [''], consumers: 4, batch: 500, partitions: 100 }
  const { seenEach, twice } = await clients.consume({ origin: server.origin, queue, ...many, each })
  if (twice > 0 || seenEach !== each) {
    throw new Error(`${queue}: ${each} messages are stored, ${seenEach} were delivered, ${twice} of them twice`)
  }
  return each
}
