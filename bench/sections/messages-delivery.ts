/** One log and many readers: deliveries to several groups, and the time from a push to whoever waits for it. */
import { nextNumbers, type Shape } from '../programs/message-body.js'
import type { Consumed } from '../programs/message-consumers.js'
import type { Flowed } from '../programs/message-flow.js'
import { interleave, type Variant } from '../rounds.js'
import type { BenchContext } from '../section.js'
import { checkConsumed, drain, partitions } from './messages-rates.js'
import { type Clients, fill, openQueue, type Server } from './messages-sites.js'

export interface DeliveryPace {
  readonly rounds: number
  readonly seconds: number
  /** Of each of the partitions that the fan-out reads. */
  readonly fanOutEach: number
  readonly endToEndSeconds: number
}

export const fanOutGroups = 10
export const endToEndPerSecond = 1_000
export const fanOutNames = { one: 'one group', many: `${fanOutGroups} groups` } as const

/** A consumer for each group; all of them read the same messages. */
export async function measureFanOut(
  context: BenchContext,
  pace: DeliveryPace,
  clients: Clients,
  server: Server,
): Promise<ReadonlyMap<string, readonly Consumed[]>> {
  const queue = 'fan-out'
  await openQueue(server, queue)
  await fill(clients, server, queue, { partitions, each: pace.fanOutEach })
  const { origin } = server
  const { seconds } = pace
  const taken = new Set<string>()
  let turn = 0
  const variant = (name: string, count: number): Variant<Consumed> => ({
    name,
    async run() {
      turn += 1
      // Groups that begin anew: what one has read is not there for it to be read again.
      const groups = Array.from({ length: count }, (_, i) => `g${turn}-${i}`)
      for (const group of groups) taken.add(group)
      const consumed = await clients.consume({
        origin,
        queue,
        groups,
        consumers: 1,
        batch: 100,
        partitions: 1,
        seconds,
      })
      checkConsumed(queue, consumed)
      return consumed
    },
  })
  const variants = [variant(fanOutNames.one, 1), variant(fanOutNames.many, fanOutGroups)]
  const results = await interleave(variants, pace.rounds, (round) =>
    context.say(`fan-out: round ${round + 1} of ${pace.rounds}`),
  )
  // The groups of the first turns, to their ends.
  const [first = ''] = taken
  await drain(
    clients,
    server,
    queue,
    [...taken].slice(0, fanOutGroups + 1).filter((group) => group !== first),
  )
  await drain(clients, server, queue, [first])
  return results
}

export async function measureEndToEnd(
  context: BenchContext,
  pace: DeliveryPace,
  clients: Clients,
  server: Server,
): Promise<Flowed> {
  const queue = 'end-to-end'
  await openQueue(server, queue)
  context.say(`${endToEndPerSecond}/s from producers to waiting consumers`)
  const shape: Shape = { queue, partitions, items: 1, lanes: 1 }
  const flowed = await clients.flow({
    ...{ shape, first: nextNumbers(), requestsPerSecond: endToEndPerSecond },
    ...{ seconds: pace.endToEndSeconds, warmUpSeconds: 2 },
    taking: { origin: server.origin, queue, groups: [''], consumers: 8, batch: 100, partitions: 20 },
  })
  checkFlow(queue, flowed)
  return flowed
}

/** Everything that was accepted came, once. */
export function checkFlow(queue: string, { pushed, received, twice }: Flowed): void {
  if (received !== pushed || twice > 0) {
    throw new Error(`${queue}: ${pushed} messages were accepted, ${received} were delivered, ${twice} of them twice`)
  }
}
