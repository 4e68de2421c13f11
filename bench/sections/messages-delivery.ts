/** One log and many readers: deliveries to several groups, and the time from a push to a waiting consumer. */
import { nextNumbers, type Shape } from '../programs/message-body.js'
import type { Flowed } from '../programs/message-flow.js'
import { interleave, type Variant } from '../rounds.js'
import type { BenchContext } from '../section.js'
import { partitions } from './messages-rates.js'
import { type Clients, openQueue, type Server } from './messages-sites.js'

export interface DeliveryPace {
  readonly rounds: number
  readonly seconds: number
  readonly endToEndSeconds: number
}

export const fanOutGroups = 10
export const fanOutPerSecond = 1_000
export const fanOutItems = 10
export const fanOutPartitions = 20
export const endToEndPerSecond = 1_000
export const fanOutNames = { one: 'one group', many: `${fanOutGroups} groups` } as const

/**
 * As many deliveries as come: the same pushes for one group and for ten, each with a consumer that waits. With a backlog one
 * group alone can have all that the machine gives, and ten would share it: that is no matter of fan-out.
 */
export async function measureFanOut(
  context: BenchContext,
  pace: DeliveryPace,
  clients: Clients,
  server: Server,
): Promise<ReadonlyMap<string, readonly Flowed[]>> {
  let turn = 0
  const variant = (name: string, count: number): Variant<Flowed> => ({
    name,
    async run() {
      turn += 1
      const queue = `fan-out-${turn}`
      const groups = Array.from({ length: count }, (_, i) => `group-${i}`)
      await openQueue(server, queue, { groups })
      const flowed = await clients.flow({
        shape: { queue, partitions: fanOutPartitions, items: fanOutItems, lanes: 1 },
        ...{ first: nextNumbers(), requestsPerSecond: fanOutPerSecond / fanOutItems },
        ...{ seconds: fanOutSeconds(pace), warmUpSeconds: 0 },
        taking: { origin: server.origin, queue, groups, consumers: 1, batch: 100, partitions: fanOutPartitions },
      })
      checkFlow(queue, flowed, count)
      return flowed
    },
  })
  const variants = [variant(fanOutNames.one, 1), variant(fanOutNames.many, fanOutGroups)]
  return interleave(variants, pace.rounds, (round) => context.say(`fan-out: round ${round + 1} of ${pace.rounds}`))
}

export const fanOutSeconds = ({ seconds }: Pick<DeliveryPace, 'seconds'>): number => seconds + 1

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

/** Everything that was accepted came to every group, once. */
export function checkFlow(queue: string, { pushed, received, twice }: Flowed, groups = 1): void {
  if (received !== pushed * groups || twice > 0) {
    throw new Error(
      `${queue}: ${pushed} messages were accepted, ${received} delivered to ${groups} groups, ${twice} of them twice`,
    )
  }
}
