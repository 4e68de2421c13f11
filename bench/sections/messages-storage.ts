/** Whether the tables stay as small as what is in them, while messages come, are consumed and removed. */
import { setTimeout as delay } from 'node:timers/promises'
import { nextNumbers, type Shape } from '../programs/message-body.js'
import type { Flowed } from '../programs/message-flow.js'
import type { BenchContext } from '../section.js'
import { type Clients, openQueue, type Server, startServer } from './messages-sites.js'
import { query } from './petitions-sites.js'

export const storageRequestsPerSecond = 100
export const storageItems = 20
const storagePartitions = 200

export interface Sample {
  /** Since the beginning. */
  readonly seconds: number
  /** Tables of messages, with their indexes. */
  readonly megabytes: number
  /** All others of the schema. */
  readonly otherMegabytes: number
  readonly deadTuples: number
}

export interface Stored {
  readonly samples: readonly Sample[]
  readonly flowed: Flowed
  /** In the log when it was over, and a sweep later at the latest. */
  readonly left: number
}

const sampleMs = 500
const queue = 'storage'
/** A queue is swept every few seconds. */
const sweptTimeoutMs = 15_000

export async function measureStorage(context: BenchContext, clients: Clients, seconds: number): Promise<Stored> {
  const server = await startServer(context, 'messages_storage')
  await openQueue(server, queue, { options: { retentionEnabled: true } })
  context.say(`${storageRequestsPerSecond * storageItems} messages/s for ${seconds} s, consumed and removed`)
  const shape: Shape = { queue, partitions: storagePartitions, items: storageItems, lanes: 4 }
  const taking = { origin: server.origin, queue, groups: [''], consumers: 4, batch: 100, partitions: 20 }
  const over = new AbortController()
  const sampling = sample(server, over.signal)
  try {
    const requestsPerSecond = storageRequestsPerSecond
    const flowed = await clients.flow({
      ...{ shape, first: nextNumbers(), requestsPerSecond, seconds, warmUpSeconds: 0, taking },
    })
    over.abort()
    return { samples: await sampling, flowed, left: await untilSwept(server) }
  } finally {
    over.abort()
    await sampling.catch(() => undefined)
    await server.stop()
  }
}

async function sample(server: Server, over: AbortSignal): Promise<Sample[]> {
  const samples: Sample[] = []
  const began = performance.now()
  while (!over.aborted) {
    const [found] = await query<{ own: string; others: string; dead: string }>(
      server.databaseUrl,
      `SELECT sum(pg_total_relation_size(relid)) FILTER (WHERE relname LIKE 'mq\\_%') AS own,
         sum(pg_total_relation_size(relid)) FILTER (WHERE relname NOT LIKE 'mq\\_%') AS others,
         sum(n_dead_tup) FILTER (WHERE relname LIKE 'mq\\_%') AS dead
       FROM pg_stat_user_tables WHERE schemaname = 'spillway'`,
    )
    samples.push({
      seconds: (performance.now() - began) / 1_000,
      megabytes: Number(found?.own) / 1_048_576,
      otherMegabytes: Number(found?.others) / 1_048_576,
      deadTuples: Number(found?.dead),
    })
    await delay(sampleMs)
  }
  return samples
}

/** What was consumed is removed: how much of it is still there when that has ended, or no more is. */
async function untilSwept(server: Server): Promise<number> {
  const deadline = performance.now() + sweptTimeoutMs
  for (;;) {
    const [found] = await query<{ n: number }>(
      server.databaseUrl,
      'SELECT count(*)::int AS n FROM spillway.mq_messages',
    )
    const left = found?.n ?? 0
    if (left === 0 || performance.now() > deadline) return left
    await delay(sampleMs)
  }
}

/**
 * The largest of the last fifth of the run over the largest of its second fifth. Dead tuples come and are vacuumed: single
 * values would show the moment, not the run.
 */
export function growth(samples: readonly Sample[], pick: (sample: Sample) => number): number {
  const end = samples.at(-1)?.seconds ?? 0
  const peak = (from: number, to: number): number =>
    Math.max(...samples.filter(({ seconds }) => seconds >= from * end && seconds <= to * end).map(pick))
  return peak(0.8, 1) / Math.max(peak(0.2, 0.4), Number.EPSILON)
}
