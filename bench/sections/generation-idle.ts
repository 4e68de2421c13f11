/** What ten thousand streams cost that have nothing to send. */
import { setTimeout as delay } from 'node:timers/promises'
import { usageOf } from '../process-usage.js'
import type { Held } from '../programs/stream-holding.js'
import type { BenchContext } from '../section.js'
import { nativePath, type Sites, sendCommand, untilEmpty } from './generation-sites.js'
import { query } from './petitions-sites.js'

/** The default of Spillway. */
const heartbeatSeconds = 12
/** Enough to have compiled what is run for each, before memory is looked at. */
export const warmUp = 500
/** Garbage of the opening is collected, and what waits goes into its rhythm. */
const settleSeconds = 15

export interface Idle {
  readonly streams: number
  readonly kbEach: number
  /** Of one core. */
  readonly cpuPercent: number
  readonly openedPerSecond: number
  /** Heartbeats that came, for each stream and heartbeat interval. */
  readonly beatShare: number
}

/**
 * Streams that wait for their turn: accepted, durable, informed of their position, with heartbeats. One process has them
 * all; the workers have no place for them.
 */
export async function measureIdle(
  context: BenchContext,
  { upstream, clients }: Sites,
  { streams, seconds }: { streams: number; seconds: number },
): Promise<Idle> {
  const databaseUrl = await context.postgres.createDatabase('generation_idle')
  const server = await context.serve({
    ...{ DATABASE_URL: databaseUrl, SPILLWAY_ROLES: 'gateway', GENERATION_UPSTREAM_URL: `${upstream.origin}/v1` },
    ...{ CONNECTION_POOL_MAX_GLOBAL: '1', CONNECTION_POOL_MAX_PER_USER: '1', GENERATION_CONCURRENCY: '1' },
    ...{ QUEUE_FAILOVER_TIMEOUT_SECONDS: '3600', QUEUE_FAILOVER_MAX_DEPTH: '20000' },
    ...{ STREAM_FIRST_TOKEN_SECONDS: '3600', STREAM_IDLE_SECONDS: '3600', STREAM_TOTAL_SECONDS: '86400' },
  })
  const to = { origin: server.origin, path: nativePath }
  const hold = (count: number, users: string): Promise<Held> => sendCommand<Held>(clients, 'hold', { to, count, users })
  const { open: others } = await sendCommand<Held>(clients, 'held', {})
  await hold(warmUp, 'early')
  const before = usageOf(server.pid).rssMb
  const began = performance.now()
  await hold(streams, 'waiting')
  const openedPerSecond = (streams / (performance.now() - began)) * 1_000
  await delay(settleSeconds * 1_000)
  await sendCommand<Held>(clients, 'held', {})
  const usage = usageOf(server.pid)
  const from = performance.now()
  await delay(seconds * 1_000)
  const after = usageOf(server.pid)
  const elapsed = (performance.now() - from) / 1_000
  const { open, beats } = await sendCommand<Held>(clients, 'held', {})
  const all = streams + warmUp
  if (open - others !== all) throw new Error(`of ${all} streams ${open - others} were open at the end`)
  await checkWaiting(databaseUrl, streams)
  const found: Idle = {
    ...{ streams, openedPerSecond, kbEach: ((usage.rssMb - before) * 1_024) / streams },
    cpuPercent: ((after.cpuSeconds - usage.cpuSeconds) / elapsed) * 100,
    beatShare: beats / (all * (elapsed / heartbeatSeconds)),
  }
  await sendCommand<Held>(clients, 'let-go', {})
  await server.stop()
  await untilEmpty(upstream)
  return found
}

/** Streams that are open because nobody noticed that they are over would be cheap. */
async function checkWaiting(databaseUrl: string, streams: number): Promise<void> {
  const [found] = await query<{ waiting: number }>(databaseUrl, 'SELECT count(*)::int AS waiting FROM spillway.ops')
  if ((found?.waiting ?? 0) < streams) throw new Error(`of ${streams} streams only ${found?.waiting} wait in the queue`)
}
