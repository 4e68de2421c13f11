/** Operators look, move and delete while others push and consume: nobody is disturbed, and nothing ends in a fault. */
import { afterAll, beforeAll, expect, it } from 'vitest'
import { type Called, type MessagesBench, messagesBench, partitionOf } from '../messages-administration-fixture.js'

let m: MessagesBench
beforeAll(async () => {
  m = await messagesBench()
})
afterAll(() => m.close())

const partitions = ['a', 'b', 'c', 'd', 'e', 'f']
const perPartition = 60

/** Pushes everything, in turn over the partitions, a few at a time. */
async function produce(queue: string): Promise<void> {
  for (let n = 0; n < perPartition; n += 3) {
    for (const partition of partitions) {
      const three = [n, n + 1, n + 2].map((i) => ({ payload: `${partition}${i}`, transactionId: `t${i}` }))
      await m.push(queue, partition, three)
    }
  }
}

/** Takes until all were seen; what was settled, by partition, in the order of the answers. */
async function consume(queue: string, group: string, seen: Map<string, unknown[]>): Promise<void> {
  const count = () => [...seen.values()].reduce((sum, list) => sum + list.length, 0)
  while (count() < partitions.length * perPartition) {
    const taken = await m.pop(queue, group, 8, { partitions: 3 })
    const outcomes = await m.ack(taken, group)
    for (const [i, partition] of taken.partitions.entries()) {
      expect(outcomes[i]).toBe('done')
      const list = seen.get(partition) ?? []
      list.push(taken.payloads[i])
      seen.set(partition, list)
    }
  }
}

it('consumers see everything once and in order, whatever operators do to other groups and queues', async () => {
  const seen = new Map<string, unknown[]>()
  let over = false
  let pushed = 0
  const fine = () => ({ status: 200 }) as Called
  const troubles: Called[] = []
  const operate = async (calls: readonly (() => Promise<Called>)[]): Promise<void> => {
    while (!over) {
      for (const call of calls) {
        const answer = await call()
        if (answer.status >= 500) troubles.push(answer)
      }
    }
  }
  const api = (method: 'GET' | 'POST' | 'DELETE', url: string, body?: unknown) => () =>
    m.call(method, `/api/v1${url}`, { ...(body !== undefined && { body }) })
  for (const queue of ['busy', 'third']) await m.pop(queue, 'other', 1)
  const operators = [
    operate([
      api('POST', '/consumer-groups/other/queues/busy/seek', { toBeginning: true }),
      api('POST', '/consumer-groups/other/queues/busy/seek', { toEnd: true }),
      api('DELETE', '/consumer-groups/other/queues/busy?deleteMetadata=false'),
    ]),
    operate([
      () => m.pop('busy', 'other', 5, { partitions: 2 }).then(fine),
      () => m.push('third', 'a', [{ transactionId: `t${++pushed}` }]).then(fine),
      () => m.call('POST', `/api/v1/messages/${partitionOf('third', 'a')}/t${pushed}/dlq`),
      () => m.call('POST', `/api/v1/messages/${partitionOf('third', 'a')}/t${pushed}/retry`),
      () => m.call('DELETE', `/api/v1/messages/${partitionOf('third', 'a')}/t${pushed}`),
    ]),
    operate([
      () => m.push('side', 'a', [{}]).then(fine),
      api('DELETE', '/queues/side/clear'),
      api('DELETE', '/resources/queues/side'),
    ]),
    operate([api('GET', '/status'), api('GET', '/status/queues/busy'), api('GET', '/consumer-groups')]),
  ]
  await Promise.all([produce('busy'), consume('busy', 'worker', seen), consume('busy', 'worker', seen)])
  over = true
  await Promise.all(operators)
  expect(troubles).toEqual([])
  const inOrder = (partition: string) => Array.from({ length: perPartition }, (_, n) => `${partition}${n}`)
  for (const partition of partitions)
    expect(seen.get(partitionOf('busy', partition)), partition).toEqual(inOrder(partition))
})
