/** What has been kept long enough goes, and nothing else. */
import { afterAll, beforeAll, describe, expect, it } from 'vitest'
import { messageSweep } from '../../src/workloads/messages/sweeper.js'
import { type MessagesBench, messagesBench, partitionOf } from '../messages-administration-fixture.js'

let m: MessagesBench
beforeAll(async () => {
  m = await messagesBench()
})
afterAll(() => m.close())

const numbered = (count: number) =>
  Array.from({ length: count }, (_, n) => ({ payload: { n }, transactionId: `tx-${n}` }))
const left = async (queue: string, partition = 'p'): Promise<string[]> =>
  (
    await m.bench.sql<{ tx: string }>(
      'SELECT transaction_id AS tx FROM spillway.mq_messages WHERE partition = $1 ORDER BY seq',
      [partitionOf(queue, partition)],
    )
  ).map(({ tx }) => tx)
const age = (queue: string, seconds: number, upTo: number) =>
  m.bench.sql(
    'UPDATE spillway.mq_messages SET created_at = now() - make_interval(secs => $1) WHERE partition = $2 AND seq <= $3',
    [seconds, partitionOf(queue, 'p'), upTo],
  )

async function sweepAll(most = 1_000) {
  const batch = messageSweep(m.intake, '"spillway"', most)
  const all: Record<string, number> = {}
  for (;;) {
    const { removed, goesOn } = await batch()
    for (const [table, rows] of Object.entries(removed)) all[table] = (all[table] ?? 0) + rows
    if (goesOn !== true) return all
  }
}

describe('a sweep', () => {
  it('removes what every group has consumed, and keeps the rest', async () => {
    await m.configure('consumed', { retention_enabled: true })
    await m.push('consumed', 'p', numbered(5))
    await m.pop('consumed', 'quick', 4, { auto: true })
    await m.pop('consumed', 'slow', 2, { auto: true })
    expect(await sweepAll()).toMatchObject({ mq_messages: 2, mq_given_up: 0 })
    expect(await left('consumed')).toEqual(['tx-2', 'tx-3', 'tx-4'])
    expect((await m.pop('consumed', 'slow', 9)).transactions).toEqual(['tx-2', 'tx-3', 'tx-4'])
  })

  it('keeps unconsumed messages for ever', async () => {
    await m.configure('unread', { retention_enabled: true })
    await m.push('unread', 'p', numbered(2))
    await age('unread', 1e8, 2)
    await sweepAll()
    expect(await left('unread')).toHaveLength(2)
  })

  it('touches no queue that did not ask for it', async () => {
    await m.push('kept', 'p', numbered(2))
    await m.pop('kept', 'g', 2, { auto: true })
    await sweepAll()
    expect(await left('kept')).toHaveLength(2)
  })

  it('removes messages older than retentionSeconds, read or not', async () => {
    await m.configure('old', { retention_enabled: true, retention_seconds: 60 })
    await m.push('old', 'p', numbered(3))
    await age('old', 90, 2)
    expect(await sweepAll()).toMatchObject({ mq_messages: 2 })
    expect(await left('old')).toEqual(['tx-2'])
    expect((await m.pop('old', 'g', 9)).transactions).toEqual(['tx-2'])
  })

  it('gives up what waited longer than maxWaitTimeSeconds, for groups that never popped it too', async () => {
    await m.configure('waited', { max_wait_seconds: 60, dead_letter_queue: true })
    await m.push('waited', 'p', numbered(3))
    await m.bench.sql(`SELECT spillway.mq_subscribe(spillway.mq_queue('waited'), 'g', 'all', NULL)`)
    await age('waited', 90, 2)
    expect(await sweepAll()).toMatchObject({ mq_given_up: 2 })
    const { body } = await m.call('GET', '/api/v1/dlq?queue=waited')
    expect(body.messages.map(({ transactionId }) => transactionId).sort()).toEqual(['tx-0', 'tx-1'])
    expect((await m.pop('waited', 'g', 9)).transactions).toEqual(['tx-2'])
  })

  it('removes more than one batch in small steps', async () => {
    await m.configure('many', { retention_enabled: true })
    await m.push('many', 'p', numbered(25))
    await m.pop('many', 'g', 25, { auto: true })
    const first = await messageSweep(m.intake, '"spillway"', 10)()
    expect(first).toMatchObject({ removed: { mq_messages: 10 }, isFull: true, goesOn: true })
    expect(await left('many')).toHaveLength(15)
    await sweepAll(10)
    expect(await left('many')).toEqual([])
  })
})
