/** A group that joins its partitions one by one gets what one gets that joins all at once, whatever happens meanwhile. */
import { afterAll, beforeAll, expect, it } from 'vitest'
import { type MessagesBench, messagesBench, partitionOf } from '../messages-administration-fixture.js'

let m: MessagesBench
beforeAll(async () => {
  m = await messagesBench()
  const [row] = await m.bench.sql<{ text: string }>(
    `SELECT pg_get_functiondef('spillway.mq_subscribe'::regproc) AS text`,
  )
  expect(row?.text).toContain('DEFAULT 500')
  await m.bench.sql(row?.text.replace('DEFAULT 500', 'DEFAULT 1') ?? '')
})
afterAll(() => m.close())

function seeded(seed: number): () => number {
  let state = seed
  return () => {
    state = (Math.imul(state, 1_664_525) + 1_013_904_223) | 0
    return (state >>> 0) / 2 ** 32
  }
}

const broken = (queue: string) =>
  m.bench.sql(
    `SELECT g.name, p.name AS partition FROM spillway.mq_queues q JOIN spillway.mq_groups g ON g.queue = q.id JOIN spillway.mq_partitions p ON p.queue = q.id
       LEFT JOIN spillway.mq_cursors c ON c.partition = p.id AND c.grp = g.id LEFT JOIN spillway.mq_ready r ON r.partition = p.id AND r.grp = g.id,
       LATERAL (SELECT greatest(p.low, spillway.mq_head(c.head, r.head, g.reached, p.id, p.low, p.tail)) AS head) h
     WHERE q.name = $1 AND (h.head > p.tail OR CASE WHEN c.head IS NULL AND p.id > g.reached THEN r.at IS NOT NULL ELSE h.head < p.tail AND (r.at IS NULL) = (c.lease IS NULL) END)`,
    [queue],
  )

const modes = ['all', 'new', 'time', 'future'] as const

it.each(Array.from({ length: 8 }, (_, n) => n))('history %i', async (n) => {
  const seed = Math.floor(Math.random() * 2 ** 31) + n
  const random = seeded(seed)
  const pick = (count: number): number => Math.floor(random() * count)
  const queue = `history ${n}`
  const kind = modes[n % 4] ?? 'all'
  const mode = kind === 'future' ? 'time' : kind
  const partitions = Array.from({ length: 12 }, (_, p) => `p${p}`)
  let next = 0
  const pushSome = async (among: number): Promise<void> => {
    const partition = partitions[pick(among)] ?? ''
    const messages = Array.from({ length: 1 + pick(3) }, () => ({ transactionId: `t${next}`, payload: next++ }))
    await m.push(queue, partition, messages)
  }
  for (let i = 0; i < 12; i++) await pushSome(8)
  const [since] = await m.bench.sql<{ at: Date }>('SELECT spillway.clock() AS at')
  if (kind === 'time') for (let i = 0; i < 12; i++) await pushSome(9)
  const from = kind === 'time' ? since?.at : kind === 'future' ? new Date(Date.now() + 3_600_000) : null
  const begin = (group: string, slice: number) =>
    m.bench.sql(
      'SELECT spillway.mq_subscribe((SELECT id FROM spillway.mq_queues WHERE name = $1), $2, $3, $4, NULL, NULL, $5)',
      [queue, group, mode, from, slice],
    )
  await begin('eager', 1_000)
  await begin('lazy', 1)
  const got = { eager: new Map<string, unknown[]>(), lazy: new Map<string, unknown[]>() }
  const popSome = async (group: 'eager' | 'lazy', batch: number): Promise<number> => {
    const taken = await m.pop(queue, group, batch, { partitions: 1 + pick(3) })
    const outcomes = await m.ack(taken, group)
    expect(outcomes.every((outcome) => outcome === 'done')).toBe(true)
    for (const [i, partition] of taken.partitions.entries()) {
      got[group].set(partition, [...(got[group].get(partition) ?? []), taken.payloads[i]])
    }
    return taken.payloads.length
  }
  const partition = () => partitionOf(queue, partitions[pick(12)] ?? '')
  const removed = new Set<unknown>()
  /** What leaves the log before everybody has read it may be missing in either. */
  const gone = (rows: readonly { tx: string }[]) => {
    for (const { tx } of rows) removed.add(Number(tx.slice(1)))
  }
  const steps: (() => Promise<unknown>)[] = [
    () => pushSome(12),
    () => pushSome(12),
    () => popSome('lazy', 1 + pick(3)),
    () => popSome('eager', 1 + pick(3)),
    async () => {
      const [at, upTo] = [partition(), 1 + pick(3)]
      gone(
        await m.bench.sql('SELECT transaction_id AS tx FROM spillway.mq_messages WHERE partition = $1 AND seq <= $2', [
          at,
          upTo,
        ]),
      )
      await m.bench.sql('SELECT spillway.mq_cut($1, $2, 100)', [at, upTo])
    },
    async () => {
      const [at, tx] = [partition(), `t${pick(next)}`]
      gone([{ tx }])
      await m.call('DELETE', `/api/v1/messages/${at}/${tx}`)
    },
    async () => {
      const tx = `t${pick(next)}`
      for (const at of partitions.map((name) => partitionOf(queue, name))) {
        const { status } = await m.call('POST', `/api/v1/messages/${at}/${tx}/dlq`)
        if (status === 200) gone([{ tx }])
      }
    },
    () => m.call('GET', `/api/v1/status/queues/${encodeURIComponent(queue)}`),
  ]
  for (let i = 0; i < 50; i++) {
    await steps[pick(steps.length)]?.()
    expect(await broken(queue), `seed ${seed}, step ${i}`).toEqual([])
  }
  for (const group of ['eager', 'lazy'] as const) while ((await popSome(group, 5)) > 0);
  const kept = (lists: Map<string, unknown[]>) =>
    Object.fromEntries(
      [...lists]
        .map(([at, list]) => [at, list.filter((each) => !removed.has(each))] as const)
        .filter(([, list]) => list.length > 0),
    )
  expect(kept(got.lazy), `seed ${seed}, ${kind}`).toEqual(kept(got.eager))
  if (kind !== 'time') expect(Object.values(kept(got.lazy)).flat().length).toBeGreaterThan(0)
  expect(await broken(queue), `seed ${seed}`).toEqual([])
  const { body } = await m.call('GET', '/api/v1/consumer-groups?limit=200')
  const lags = (body as unknown as { queueName: string; totalLag: number }[]).filter(
    ({ queueName }) => queueName === queue,
  )
  expect(
    lags.map(({ totalLag }) => totalLag),
    `seed ${seed}`,
  ).toEqual([0, 0])
})

it('messages that waited too long expire for a group that has not joined their partition, and are removed', async () => {
  await m.configure('slow', { max_wait_seconds: 60, dead_letter_queue: true, retention_enabled: true })
  for (const partition of ['a', 'b', 'c']) await m.push('slow', partition, [{ transactionId: `old ${partition}` }])
  await m.bench.sql(`SELECT spillway.mq_subscribe(spillway.mq_queue('slow'), 'g', 'all', NULL)`)
  const [group] = await m.bench.sql<{ reached: string | null }>(
    `SELECT reached FROM spillway.mq_groups WHERE queue = spillway.mq_queue('slow')`,
  )
  expect(group?.reached).not.toBeNull()
  await m.bench.sql(
    `UPDATE spillway.mq_messages SET created_at = now() - interval '2 minutes' WHERE transaction_id LIKE 'old %'`,
  )
  const [swept] = await m.bench.sql<{ given_up: string; removed: string }>(
    'SELECT given_up, removed FROM spillway.mq_sweep(1000, NULL, 500)',
  )
  expect(swept).toMatchObject({ given_up: '3', removed: '3' })
  await m.push('slow', 'c', [{ transactionId: 'young' }])
  expect((await m.pop('slow', 'g', 10, { partitions: 5 })).transactions).toEqual(['young'])
  expect(await broken('slow')).toEqual([])
})
