/** Messages: what the partitioned queue leaves of the bare echo and of PostgreSQL, and whether it stays as it began. */
import { Children } from '../children.js'
import type { BenchContext, Section, SectionResult } from '../section.js'
import { checkFlow, type DeliveryPace, measureEndToEnd, measureFanOut } from './messages-delivery.js'
import {
  batchLanes,
  drainAll,
  measurePopping,
  measurePushing,
  openQueues,
  partitions,
  type RateSites,
  type RatesPace,
  singleShape,
} from './messages-rates.js'
import { conclude } from './messages-report.js'
import { Clients, compareAnswers, pushLoad, startServer } from './messages-sites.js'
import { measureStorage } from './messages-storage.js'
import { startProgram } from './petitions-sites.js'

interface Pace extends RatesPace, DeliveryPace {
  readonly storageSeconds: number
}

const paces: Readonly<Record<'full' | 'quick', Pace>> = {
  full: { rounds: 5, seconds: 4, warmUpSeconds: 3, laneEach: 8, endToEndSeconds: 30, storageSeconds: 600 },
  quick: { rounds: 3, seconds: 1, warmUpSeconds: 1, laneEach: 2, endToEndSeconds: 8, storageSeconds: 20 },
}

/** Of the environment: the storage run is most of a full run. */
const storageName = 'BENCH_STORAGE_SECONDS'

function paceOf(quick: boolean): Pace {
  const pace = paces[quick ? 'quick' : 'full']
  const given = process.env[storageName]
  if (given === undefined) return pace
  const storageSeconds = Number(given)
  if (!(storageSeconds >= 5)) throw new Error(`${storageName} is a number of seconds, 5 or more, not ${given}`)
  return { ...pace, storageSeconds }
}

/** As many as the server has for the same: see store/postgres/store.ts. */
const rawConnections = { PUSH_CONNECTIONS: '3', POP_CONNECTIONS: '4' }

export const messages: Section = {
  name: 'messages',
  title: 'Messages: a partitioned log with consumer groups',
  estimateSeconds(quick) {
    const { rounds, seconds, warmUpSeconds, endToEndSeconds, storageSeconds } = paceOf(quick)
    const pushing = 7 * (rounds * (seconds + 0.3) + warmUpSeconds)
    const popping = 5 * rounds * (seconds + 0.2) + 2 * rounds * (seconds + 2)
    return pushing + popping + endToEndSeconds + storageSeconds + 45
  },
  run: (context) => measure(context, paceOf(context.quick)),
}

async function measure(context: BenchContext, pace: Pace): Promise<SectionResult> {
  const children = new Children()
  try {
    context.say('starting the servers')
    const clients = new Clients(await startProgram(context, 'programs/message-clients.ts'))
    const server = await startServer(context, 'messages')
    const sites: RateSites = {
      server,
      clients,
      echo: await startProgram(context, 'programs/message-echo.ts'),
      raw: await startProgram(context, 'programs/message-raw.ts', {
        ...{ DATABASE_URL: server.databaseUrl, PARTITIONS: String(partitions), LANES: String(batchLanes) },
        ...rawConnections,
      }),
      load: await pushLoad(context, children, clients),
    }
    await compareAnswers(server, sites.echo, { ...singleShape, queue: 'probe' })
    await openQueues(context, pace, sites)
    const pushing = await measurePushing(context, pace, sites)
    const popping = await measurePopping(context, pace, sites)
    const delivered = await drainAll(context, sites)
    const fanOut = await measureFanOut(context, pace, clients, server)
    const endToEnd = await measureEndToEnd(context, pace, clients, server)
    await server.stop()
    const storage = await measureStorage(context, clients, pace.storageSeconds)
    checkFlow('storage', storage.flowed)
    return conclude(context, { pace, pushing, popping, fanOut, endToEnd, storage, delivered })
  } finally {
    await children.close()
  }
}
