/**
 * The connections of one process: at most `poolMax`, one for heartbeats, and one for LISTEN (listen.ts).
 *
 *   shared     up to poolMax, in lanes (below): what releases work never waits for what brings it, and transactions of
 *              handlers, which may last, leave a connection for everything else
 *   streams    two of poolMax, from the first use of streams: their plans need settings of their own
 *   heartbeat  one that is always available
 *
 * With a pool of the user, shared and streams are connections of that pool (borrowed-pool.ts).
 */
import type pg from 'pg'
import type { OpenTx, PoolState } from '../port.js'
import { BorrowedPool, type ConnectionSource } from './borrowed-pool.js'
import { openPool } from './connect.js'
import { StoreFault, toStoreFault } from './faults.js'
import type { Log } from './options.js'
import type { Origin } from './origin.js'
import { type QueryConfig, queryPinned, type Result } from './pinned-query.js'
import { findReach, type Reach } from './reach.js'
import { pinSql, type Settings } from './session.js'
import { openTx } from './transaction.js'
import { types } from './types.js'

interface LaneLimits {
  /** Always available to this lane. */
  least: number
  /** Default: no limit of its own. */
  most?: number
  waitMs: number
}

interface Waiter {
  order: number
  start(): void
  fail(): void
}

interface LaneState {
  readonly limits: LaneLimits
  used: number
  waiting: Waiter[]
}

/**
 * Divides a number of connections among purposes. Each lane has a minimum that the others cannot use, and may use what is
 * free beyond the minimums of the others:
 *
 *   asked ──below its minimum, or something is free beyond the others' minimums──► in use ──► free
 *     └──else──► waits ──its turn, those that have waited longest first──► in use
 *                  └──waitMs are over──► fault
 */
export class ConnectionLanes<Name extends string> {
  readonly #total: () => number
  readonly #lanes = new Map<Name, LaneState>()
  #used = 0
  #order = 0

  constructor(total: () => number, limits: Readonly<Record<Name, LaneLimits>>) {
    this.#total = total
    for (const name in limits) this.#lanes.set(name, { limits: limits[name], used: 0, waiting: [] })
  }

  used(name: Name): number {
    return this.#lane(name).used
  }

  waiting(name: Name): number {
    return this.#lane(name).waiting.length
  }

  /** Null: at once. Every call is followed by one of `leave`, unless it rejects. */
  enter(name: Name): Promise<void> | null {
    const lane = this.#lane(name)
    if (lane.waiting.length === 0 && this.#mayStart(lane)) {
      this.#start(lane)
      return null
    }
    return new Promise((resolve, reject) => {
      const fail = (): void => {
        clearTimeout(timer)
        lane.waiting = lane.waiting.filter((other) => other !== waiter)
        reject(new StoreFault('unavailable', { cause: new Error(`no connection was free for ${name} in time`) }))
      }
      const timer = setTimeout(fail, lane.limits.waitMs)
      const start = (): void => {
        clearTimeout(timer)
        this.#start(lane)
        resolve()
      }
      const waiter: Waiter = { order: this.#order++, start, fail }
      lane.waiting.push(waiter)
    })
  }

  leave(name: Name): void {
    this.#lane(name).used--
    this.#used--
    for (let lane = this.#next(); lane !== undefined; lane = this.#next()) lane.waiting.shift()?.start()
  }

  /** Rejects all that wait. */
  close(): void {
    for (const lane of this.#lanes.values()) for (const waiter of lane.waiting) waiter.fail()
  }

  #lane(name: Name): LaneState {
    const lane = this.#lanes.get(name)
    if (lane === undefined) throw new Error(`unknown lane ${name}`)
    return lane
  }

  #start(lane: LaneState): void {
    lane.used++
    this.#used++
  }

  #mayStart(lane: LaneState): boolean {
    const { least, most = Number.POSITIVE_INFINITY } = lane.limits
    if (lane.used >= most) return false
    if (lane.used < least) return true
    let free = this.#total() - this.#used
    for (const other of this.#lanes.values()) free -= Math.max(0, other.limits.least - other.used)
    return free > 0
  }

  /** The lane whose first waiter has waited longest, of those that may start. */
  #next(): LaneState | undefined {
    let next: LaneState | undefined
    for (const lane of this.#lanes.values()) {
      const [first] = lane.waiting
      if (first === undefined || !this.#mayStart(lane)) continue
      if (next === undefined || first.order < (next.waiting[0]?.order ?? 0)) next = lane
    }
    return next
  }
}

const streamsMax = 2

/** Settling a large batch after a pause may take longer than a caller would wait. */
const settleTimeoutMs = 10_000
/** An audit may take longer. */
const sweepTimeoutMs = 120_000
const waitMs = 2_000
/** How long a handler waits for a connection; its own timeout may be shorter. */
const handlersWaitMs = 30_000

/**
 * - `settle`     settlements with the claims in the same statement, acks, halts
 * - `accept`     accepted operations and pushes
 * - `take`       pops, sweeps, the bell of streams
 * - `reads`      tickets, lists, reads of the user's own tables
 * - `operators`  short transactions of operators and workloads
 * - `handlers`   transactions of handlers
 */
export type Lane = 'settle' | 'accept' | 'take' | 'reads' | 'operators' | 'handlers'

const lanesFor = (poolMax: number, total: () => number): ConnectionLanes<Lane> =>
  new ConnectionLanes(total, {
    settle: { least: 1, most: 5, waitMs: settleTimeoutMs },
    accept: { least: 1, most: 3, waitMs },
    take: { least: 1, most: 3, waitMs },
    reads: { least: 1, most: Math.floor(poolMax / 3), waitMs },
    operators: { least: 1, most: 4, waitMs },
    handlers: { least: 1, waitMs: handlersWaitMs },
  })

/** A pool that is replaced as a whole: see `judge`. */
interface Connections {
  readonly pool: ConnectionSource
  /** The same, if it is ours. */
  readonly own: pg.Pool | null
  /** The settings of each transaction, behind a pooler in transaction mode and on connections of the user. */
  readonly pins: string
  readonly lanes: ConnectionLanes<Lane>
  answeredAt: number
}

type Purpose = 'shared' | 'streams' | 'heartbeat'

interface OpenersOptions {
  origin: Origin
  poolMax: number
  /** `poolMax` without what streams have, once they have it. */
  sharedMax(): number
  streamSettings: Settings
  log: Log
  reach(): Promise<Reach>
}

/** Opens the connections of each purpose, now or again. */
function openersOf(options: OpenersOptions): Record<Purpose, () => Connections> {
  const { origin, poolMax, sharedMax, streamSettings, log, reach } = options
  const connectionsOn = (own: pg.Pool | null, pool: ConnectionSource, settings: Settings): Connections => ({
    ...{ own, pool, answeredAt: 0 },
    pins: pinSql(settings, { local: true }),
    lanes: lanesFor(poolMax, sharedMax),
  })
  const open = (max: number, applicationName: string, settings: Settings = {}, keepIdle = false): Connections => {
    const own = openPool({ url: origin, max, applicationName, log, keepIdle, pin: { settings, reach } })
    return connectionsOn(own, own, settings)
  }
  const borrow = (max: number, settings: Settings = {}): Connections | null =>
    origin.pool && connectionsOn(null, new BorrowedPool(origin.pool, max, waitMs, log), settings)
  return {
    shared: () => borrow(poolMax) ?? open(sharedMax(), 'spillway'),
    streams: () => borrow(streamsMax, streamSettings) ?? open(streamsMax, 'spillway streams', streamSettings),
    heartbeat: () => open(1, 'spillway heartbeat', {}, true),
  }
}

/** `streamSettings`: of the connections of streams. */
export function openPools(origin: Origin, poolMax: number, timeoutMs: number, streamSettings: Settings, log: Log) {
  let known: Reach | undefined
  const detectReach = reachOf(origin, log, (found) => {
    known = found
  })
  let sharedMax = poolMax
  const shared = { origin, poolMax, streamSettings, log }
  const openers = openersOf({ ...shared, sharedMax: () => sharedMax, reach: detectReach })
  const current = { shared: openers.shared(), streams: openers.streams(), heartbeat: openers.heartbeat() }

  /**
   * Behind a broken network or a frozen server all connections hang, and detecting that one by one would take a timeout for
   * each. So if one fails and no other has answered in the second half of its wait, those that wait for a connection fail
   * with it; and if it did not answer in time, the pool is replaced.
   */
  const judge = (purpose: Purpose, connections: Connections, askedAt: number, error: unknown): StoreFault => {
    const fault = toStoreFault(error)
    // With a SQLSTATE the server itself reported the fault, so it answers.
    if (fault.sqlState !== undefined || hasAnswered(connections, askedAt)) return fault
    if (fault.code === 'unavailable' || fault.code === 'timeout') connections.lanes.close()
    if (fault.code === 'timeout' && current[purpose] === connections && connections.own !== null) {
      current[purpose] = openers[purpose]()
      // Ends once its last connection is released; nobody waits for that.
      connections.pool.end().catch(() => undefined)
    }
    return fault
  }

  const ask = async <Row>(
    purpose: Purpose,
    lane: Lane | null,
    config: QueryConfig,
    ms: number,
  ): Promise<Result<Row>> => {
    const reach = known ?? (await detectReach())
    const connections = current[purpose]
    const { own, pool, pins, lanes } = connections
    if (lane !== null) await lanes.enter(lane)
    const askedAt = performance.now()
    try {
      const { name, ...plain } = { ...config, query_timeout: ms }
      const answer: unknown =
        own === null || reach === 'transaction'
          ? await queryPinned(pool, { ...plain, types }, pins)
          : await own.query(name === undefined ? plain : { ...plain, name })
      connections.answeredAt = performance.now()
      return answer as Result<Row>
    } catch (error) {
      throw judge(purpose, connections, askedAt, error)
    } finally {
      if (lane !== null) lanes.leave(lane)
    }
  }

  return {
    /** Behind a pooler in transaction mode, what needs a session of its own is not possible. */
    reach: detectReach,
    query: <Row>(lane: Lane, config: QueryConfig) =>
      ask<Row>('shared', lane, config, lane === 'settle' ? settleTimeoutMs : timeoutMs),
    sweep: <Row>(config: QueryConfig) => ask<Row>('shared', 'take', config, sweepTimeoutMs),
    heartbeat: <Row>(config: QueryConfig) => ask<Row>('heartbeat', null, config, timeoutMs),
    streams: <Row>(config: QueryConfig) => ask<Row>('streams', null, config, timeoutMs),
    begin: async (lane: Lane, statementTimeoutMs: number): Promise<OpenTx> => {
      const reach = await detectReach()
      const connections = current.shared
      const { own, pool, pins, lanes } = connections
      await lanes.enter(lane)
      const askedAt = performance.now()
      try {
        const isBorrowed = own === null || reach === 'transaction'
        return await openTx(pool, statementTimeoutMs, isBorrowed ? pins : null, () => lanes.leave(lane))
      } catch (error) {
        throw judge('shared', connections, askedAt, error)
      }
    },
    /** From now on, streams have their own connections. */
    openStreams: (): void => {
      sharedMax = poolMax - streamsMax
      if (current.shared.own !== null) current.shared.own.options.max = sharedMax
    },
    /** Of the connections for reads and for transactions of handlers. */
    state: (): PoolState => {
      const { lanes, pool } = current.shared
      return {
        max: poolMax,
        busy: lanes.used('reads') + lanes.used('handlers'),
        idle: pool.idleCount,
        waiting: lanes.waiting('reads') + lanes.waiting('handlers'),
      }
    },
    end: async (): Promise<void> => {
      await Promise.all(Object.values(current).map(({ pool }) => pool.end()))
    },
  }
}

/** Whether any call was answered in the second half of the time since `askedAt`. */
const hasAnswered = ({ answeredAt }: Pick<Connections, 'answeredAt'>, askedAt: number): boolean =>
  answeredAt >= (askedAt + performance.now()) / 2

/** Detected once, at the first call; retried while the database is not reachable. */
function reachOf(origin: Origin, log: Log, onFound: (reach: Reach) => void): () => Promise<Reach> {
  let finding: Promise<Reach> | undefined
  return () => {
    finding ??= findReach(origin).then(
      (found) => {
        if (found !== 'direct') log.info({ pooler: found }, `the database is reached through a pooler in ${found} mode`)
        onFound(found)
        return found
      },
      (fault: unknown) => {
        finding = undefined
        throw fault
      },
    )
    return finding
  }
}
