/** Lists of messages, and pops, have a size: what is too long is left out or left for the next one, and nothing is lost. */
import { randomUUID } from 'node:crypto'
import { afterAll, afterEach, beforeAll, describe, expect, it } from 'vitest'
import { freshDatabase, type TestDatabase } from '../../../spillway/test/setup/database.js'
import {
  acked,
  calm,
  configure,
  dataOf,
  type Message,
  type MessageTables,
  messagesOf,
  openMessageTables,
  pop,
  pushed,
  take,
} from '../message-calls.js'
import { type Answer, endAll, get, post, type ServerProcess, startServer } from '../server-process.js'

const pageBytes = 4_194_304
const smallPage = 65_536
const envelope = 1_024
const megabyte = 1_000_000

let database: TestDatabase
let tables: MessageTables
let server: ServerProcess
/** On the same database, with the smallest pages that can be set. */
let small: ServerProcess
let queue = ''

beforeAll(async () => {
  database = await freshDatabase()
  tables = openMessageTables(database.url)
  const env = { DATABASE_URL: database.url, SPILLWAY_ENCRYPTION_KEY: 'ab'.repeat(32), ...calm }
  ;[server, small] = await Promise.all([
    startServer(env),
    startServer({ ...env, SPILLWAY_PAGE_BYTES_MAX: String(smallPage) }),
  ])
})
afterEach(async () => {
  if (queue !== '') expect(await auditOf(queue)).toEqual([])
})
afterAll(async () => {
  await endAll()
  await tables.close()
  await database.drop()
})

/** Cursors of a queue whose books do not agree: open is a part of batch, both only under a lease, which names the partition. */
const auditOf = (name: string) =>
  tables.query(
    `SELECT c.partition, c.grp, c.lease, c.batch, c.open, r.at FROM mq_cursors c JOIN mq_partitions p ON p.id = c.partition JOIN mq_queues q ON q.id = p.queue
       LEFT JOIN mq_leases l ON l.id = c.lease LEFT JOIN mq_ready r ON r.partition = c.partition AND r.grp = c.grp
     WHERE q.name = $1 AND (NOT c.open <@ c.batch OR (c.lease IS NULL) <> (c.open = '{}') OR c.lease IS NOT NULL AND r.at IS NOT NULL
       OR c.lease IS NOT NULL AND NOT coalesce(c.partition = ANY (l.partitions), false)
       OR c.lease IS NULL AND r.at IS NULL AND c.head < p.tail)`,
    [name],
  )

const json = (bytes: number, n = 0): string => String(n).padEnd(bytes - 2, 'x')
const bytesOf = (messages: readonly Message[]): number =>
  messages.reduce((sum, { data }) => sum + Buffer.byteLength(JSON.stringify(data)), 0)
const numbersOf = (messages: readonly Message[]): number[] =>
  messages.map(({ data }) => Number.parseInt(String(data), 10))

/** As many of these payloads as there are, in pushes that are not too large. */
async function fill(name: string, payloads: readonly unknown[], partition = 'p'): Promise<void> {
  for (const payload of payloads) await pushed(server, [{ queue: name, partition, payload }])
}

const series = (count: number, bytes: number): string[] => Array.from({ length: count }, (_, n) => json(bytes, n))

async function bury(name: string, count: number, error = 'no'): Promise<void> {
  for (let left = count; left > 0; ) {
    const found = await take(server, name, { batch: 100 })
    expect(found.length).toBeGreaterThan(0)
    await acked(server, found, { status: 'dlq', error })
    left -= found.length
  }
}

describe('dead letters of messages', () => {
  it('leave out values above 4 KiB, to the byte; a single one is complete, and is replayed completely', async () => {
    queue = randomUUID()
    await fill(queue, [json(4_096), json(4_097), `${'ä'.repeat(2_047)}`, `${'ä'.repeat(2_048)}`, json(megabyte)])
    await bury(queue, 5)
    const { body, text } = await get(server, `/api/v1/dlq?queue=${queue}`)
    const messages = body.messages as Record<string, unknown>[]
    expect(text.length).toBeLessThan(20_000)
    const shown = messages.map(({ data, data_bytes, truncated }) => [data === null, data_bytes, truncated])
    expect(shown.sort()).toEqual(
      [
        [false, undefined, undefined],
        [false, undefined, undefined],
        [true, 4_097, true],
        [true, 4_098, true],
        [true, megabyte, true],
      ].sort(),
    )
    const large = messages.find(({ data_bytes }) => data_bytes === megabyte)
    expect(large?.error).toEqual(expect.stringContaining('/api/v1/messages/'))
    const whole = (await get(server, `/api/v1/messages/${large?.partitionId}/${large?.transactionId}`)).body
    expect(whole.data).toBe(json(megabyte))
    expect((await post(server, `/api/v1/dlq/${large?.id}/replay`)).status).toBe(200)
    expect(dataOf(await take(server, queue, { autoAck: true }))).toEqual([json(megabyte)])
  })

  it('of an encrypted queue are measured by their plain text', async () => {
    queue = randomUUID()
    await configure(server, queue, { encryptionEnabled: true })
    await fill(queue, [json(4_095), json(4_096), json(4_097), json(4_098), json(megabyte)])
    await bury(queue, 5)
    const { messages } = (await get(server, `/api/v1/dlq?queue=${queue}`)).body
    const sizes = (messages as Record<string, unknown>[]).map(({ data, data_bytes }) =>
      data === null ? Number(data_bytes) : Buffer.byteLength(JSON.stringify(data)),
    )
    expect(sizes.map((bytes) => Math.min(bytes, megabyte)).sort((a, b) => a - b)).toEqual([
      4_095,
      4_096,
      4_097,
      4_098,
      megabyte,
    ])
    expect((messages as Message[]).filter(({ data }) => data === null)).toHaveLength(3)
  })

  it('fill pages up to their bytes; offset plus received items leads through all of them', async () => {
    queue = randomUUID()
    await fill(queue, series(30, 4_000))
    await bury(queue, 30, 'é'.repeat(5_000))
    const seen: unknown[] = []
    const pages: Answer[] = []
    for (let offset: number | null = 0; offset !== null; ) {
      const page = await get(small, `/api/v1/dlq?queue=${queue}&limit=200&offset=${offset}`)
      const { messages, total, pagination } = page.body as unknown as {
        messages: { id: string; errorMessage: string; error_message_bytes: number; truncated: boolean }[]
        total: number
        pagination: { nextOffset: number | null }
      }
      expect([total, messages[0]?.error_message_bytes, messages[0]?.truncated]).toEqual([30, 10_000, true])
      expect(messages[0]?.errorMessage).toBe(`${'é'.repeat(1_000)}…`)
      expect(Buffer.byteLength(page.text)).toBeLessThanOrEqual(smallPage + envelope)
      seen.push(...messages.map(({ id }) => id))
      pages.push(page)
      expect(pagination.nextOffset === null || pagination.nextOffset === offset + messages.length).toBe(true)
      offset = pagination.nextOffset
    }
    expect([new Set(seen).size, seen.length]).toEqual([30, 30])
    expect(pages.length).toBeGreaterThan(2)
  })
})

describe('other lists of messages', () => {
  const walk = async (path: string, member: string): Promise<{ items: Record<string, unknown>[]; pages: number }> => {
    const items: Record<string, unknown>[] = []
    for (let offset: number | null = 0, pages = 1; ; pages++) {
      const { text, body } = await get(small, `${path}${path.includes('?') ? '&' : '?'}offset=${offset}`)
      expect(Buffer.byteLength(text)).toBeLessThanOrEqual(smallPage + envelope)
      const page = body as unknown as Record<string, Record<string, unknown>[]> & {
        pagination: { nextOffset: number | null }
      }
      items.push(...(page[member] ?? []))
      offset = page.pagination.nextOffset
      if (offset === null) return { items, pages }
    }
  }
  const long = (n: number): string => `${n}${'\u0001'.repeat(250)}`

  it('messages, queues, partitions: shorter pages, nothing left out', async () => {
    queue = ''
    const name = `long ${randomUUID()}`
    for (let n = 0; n < 60; n++) {
      await pushed(server, [{ queue: name, partition: long(n), transactionId: long(n), payload: n }])
    }
    const here = encodeURIComponent(name)
    const listed = await walk(`/api/v1/messages?queue=${here}&limit=200`, 'messages')
    expect(new Set(listed.items.map(({ transactionId }) => transactionId)).size).toBe(60)
    expect([listed.items.length, listed.pages > 1]).toEqual([60, true])
    for (const path of [`/api/v1/resources/queues/${here}`, `/api/v1/status/queues/${here}`]) {
      const { items, pages } = await walk(path, 'partitions')
      expect(new Set(items.map((item) => item.name)).size, path).toBe(60)
      expect([items.length, pages > 1], path).toEqual([60, true])
    }
    await take(server, name)
    const places = new Set<string>()
    let links = 0
    for (let path: string | null = '/api/v1/consumer-groups/__QUEUE_MODE__?limit=1000'; path !== null; links++) {
      const answer: Answer = await get(small, path)
      expect(Buffer.byteLength(answer.text)).toBeLessThanOrEqual(smallPage + envelope)
      const { partitions = [] } =
        (answer.body as unknown as Record<string, { partitions: { partition: string }[] }>)[name] ?? {}
      for (const { partition } of partitions) {
        expect(places.has(partition)).toBe(false)
        places.add(partition)
      }
      path = /^<([^>]+)>; rel="next"$/.exec(answer.headers.get('link') ?? '')?.[1] ?? null
    }
    expect([places.size, links > 1]).toEqual([60, true])
    for (let n = 0; n < 60; n++) {
      await configure(server, long(n), {}, { namespace: long(n), task: long(n) })
    }
    for (const [path, member, count] of [
      ['/api/v1/resources/queues', 'queues', 61],
      ['/api/v1/status/queues', 'queues', 61],
    ] as const) {
      const { items, pages } = await walk(path, member)
      expect(items.length, path).toBeGreaterThanOrEqual(count)
      expect(new Set(items.map((item) => JSON.stringify(item))).size, path).toBe(items.length)
      expect(pages, path).toBeGreaterThan(1)
    }
  })

  it('consumer groups: the rest is linked', async () => {
    queue = ''
    const name = `groups ${randomUUID()}`
    await pushed(server, [{ queue: name, partition: long(0), payload: 1 }])
    await pushed(server, [{ queue: name, partition: long(1), payload: 1 }])
    for (let n = 0; n < 40; n++) await take(server, name, { consumerGroup: long(n) })
    const seen: string[] = []
    let pages = 0
    for (let path: string | null = '/api/v1/consumer-groups?limit=1000'; path !== null; pages++) {
      const answer: Answer = await get(small, path)
      expect(Buffer.byteLength(answer.text)).toBeLessThanOrEqual(smallPage + envelope)
      const groups = answer.body as unknown as { queueName: string; name: string }[]
      seen.push(...groups.filter(({ queueName }) => queueName === name).map((group) => group.name))
      path = /^<([^>]+)>; rel="next"$/.exec(answer.headers.get('link') ?? '')?.[1] ?? null
    }
    expect([seen.length, new Set(seen).size, pages > 1]).toEqual([40, 40, true])
    // Of one queue: every partition has every group.
    const status = await get(small, `/api/v1/status/queues/${encodeURIComponent(name)}`)
    const [partition] = status.body.partitions as { consumerGroups: unknown[]; truncated?: boolean }[]
    expect(Buffer.byteLength(status.text)).toBeLessThanOrEqual(3 * smallPage)
    expect(partition?.consumerGroups.length === 40 || partition?.truncated).toBe(true)
  })
})

describe('traces', () => {
  it('leave out long data, page by cursor, and a single one is complete', async () => {
    queue = randomUUID()
    const [result] = await pushed(server, [{ queue, payload: 1, transactionId: 'tx' }])
    expect(result?.status).toBe('queued')
    const [message] = await take(server, queue)
    const name = { partitionId: message?.partitionId, transactionId: 'tx' }
    const sizes = [4_096, 4_097, ...Array<number>(30).fill(4_000), ...Array<number>(8).fill(megabyte)]
    const ids: unknown[] = []
    for (const [n, bytes] of sizes.entries()) {
      const { body, status } = await post(server, '/api/v1/traces', { ...name, data: json(bytes, n) })
      expect(status).toBe(201)
      ids.push(body.traceId)
    }
    const path = `/api/v1/traces/${name.partitionId}/tx`
    const all = (await get(server, path)).body as unknown as { traces: Record<string, unknown>[]; next_cursor: null }
    expect(all.traces.map(({ id }) => id)).toEqual(ids)
    expect(all.next_cursor).toBeNull()
    expect(all.traces[0]).toMatchObject({ data: json(4_096, 0) })
    expect(all.traces[1]).toMatchObject({ data: null, data_bytes: 4_097, truncated: true })
    expect(all.traces.at(-1)).toMatchObject({ data: null, data_bytes: megabyte, truncated: true })

    const seen: unknown[] = []
    let pages = 0
    for (let cursor: string | null = ''; cursor !== null; pages++) {
      const page = await get(small, `${path}?limit=25${cursor === '' ? '' : `&cursor=${cursor}`}`)
      expect(Buffer.byteLength(page.text)).toBeLessThanOrEqual(smallPage + envelope)
      seen.push(...(page.body.traces as { id: string }[]).map(({ id }) => id))
      cursor = page.body.next_cursor
    }
    expect(seen).toEqual(ids)
    expect(pages).toBeGreaterThan(2)
    expect((await get(server, `${path}/${ids.at(-1)}`)).body).toMatchObject({
      ...{ id: ids.at(-1), data: json(megabyte, sizes.length - 1) },
    })
    for (const none of ['0', 'x', '99999999999999999999']) {
      expect((await get(server, `${path}/${none}`)).status).toBe(404)
    }
    expect((await get(server, `${path}?cursor=x`)).status).toBe(400)
  })
})

describe('a pop', () => {
  /** Settles what came, and goes on until there is nothing. */
  const drain = async (options: Parameters<typeof take>[2], settle = true): Promise<Message[][]> => {
    const pops: Message[][] = []
    for (;;) {
      const found = await take(server, queue, { batch: 1_000, ...options })
      if (found.length === 0) return pops
      pops.push(found)
      if (settle) await acked(server, found)
    }
  }

  it('ends at 4 MiB of payload, and the next one continues', async () => {
    queue = randomUUID()
    await fill(queue, series(12, megabyte))
    const answer = await pop(server, queue, { batch: 1_000 })
    expect(Buffer.byteLength(answer.text)).toBeLessThanOrEqual(pageBytes + 1_000 * messagesOf(answer).length)
    expect(numbersOf(messagesOf(answer))).toEqual([0, 1, 2, 3])
    const [cursor] = await tables.query<{ batch: string[]; open: string[] }>(
      'SELECT c.batch, c.open FROM mq_cursors c JOIN mq_partitions p ON p.id = c.partition JOIN mq_queues q ON q.id = p.queue WHERE q.name = $1',
      [queue],
    )
    expect([cursor?.batch.length, cursor?.open.length]).toEqual([4, 4])
    await acked(server, messagesOf(answer))
    expect((await drain({})).map(numbersOf)).toEqual([
      [4, 5, 6, 7],
      [8, 9, 10, 11],
    ])
  })

  it('takes what fits exactly, and not a byte more', async () => {
    queue = randomUUID()
    await fill(queue, [json(smallPage - 100, 0), json(100, 1), json(smallPage - 100, 2), json(101, 3), json(1_000, 4)])
    const pops: number[][] = []
    for (;;) {
      const found = messagesOf(await pop(small, queue, { batch: 100 }))
      if (found.length === 0) break
      pops.push(numbersOf(found))
      await acked(small, found)
    }
    expect(pops).toEqual([[0, 1], [2], [3, 4]])
  })

  it('has one message at least, however long it is', async () => {
    queue = randomUUID()
    await fill(queue, [json(megabyte, 0), json(10, 1), json(megabyte, 2)])
    for (const n of [0, 1, 2]) {
      const found = messagesOf(await pop(small, queue, { batch: 100 }))
      expect(numbersOf(found)).toEqual([n])
      await acked(small, found)
    }
  })

  it('with autoAck settles its own messages and no others', async () => {
    queue = randomUUID()
    await fill(queue, series(9, megabyte))
    expect((await drain({ autoAck: true }, false)).map(numbersOf)).toEqual([[0, 1, 2, 3], [4, 5, 6, 7], [8]])
  })

  it('of encrypted messages too', async () => {
    queue = randomUUID()
    await configure(server, queue, { encryptionEnabled: true })
    await fill(queue, series(6, megabyte))
    const pops = await drain({ autoAck: true }, false)
    expect(pops.flatMap(numbersOf)).toEqual([0, 1, 2, 3, 4, 5])
    for (const found of pops) expect(bytesOf(found)).toBeLessThanOrEqual(pageBytes)
  })

  it('over several partitions leaves the one that does not fit in its turn', async () => {
    queue = randomUUID()
    for (const [n, partition] of ['a', 'b', 'c', 'd'].entries()) {
      await fill(queue, [json(megabyte, 10 * n), json(megabyte, 10 * n + 1)], partition)
    }
    const first = await take(server, queue, { batch: 1_000, partitions: 10 })
    expect(numbersOf(first)).toEqual([0, 1, 10, 11])
    const second = await take(server, queue, { batch: 1_000, partitions: 10 })
    expect(numbersOf(second)).toEqual([20, 21, 30, 31])
    await acked(server, [...first, ...second])
    expect(await take(server, queue, { batch: 1_000, partitions: 10 })).toEqual([])
  })

  it('keeps the turn of a partition whose first message does not fit', async () => {
    queue = randomUUID()
    await fill(queue, [json(3 * megabyte, 0)], 'a')
    await fill(queue, [json(3 * megabyte, 1)], 'b')
    await fill(queue, [json(10, 2)], 'c')
    const ready = () =>
      tables.query<{ name: string; at: Date }>(
        'SELECT p.name, r.at FROM mq_ready r JOIN mq_partitions p ON p.id = r.partition JOIN mq_queues q ON q.id = p.queue WHERE q.name = $1 ORDER BY r.at',
        [queue],
      )
    expect(await take(server, queue, { partition: 'none' })).toEqual([])
    const before = await ready()
    const first = await take(server, queue, { batch: 1_000, partitions: 10 })
    expect(numbersOf(first)).toEqual([0])
    expect(await ready()).toEqual(before.slice(1))
    const second = await take(server, queue, { batch: 1_000, partitions: 10 })
    expect(numbersOf(second)).toEqual([1, 2])
    expect(first[0]?.leaseId).not.toBe(second[0]?.leaseId)
    await acked(server, [...first, ...second])
  })

  it('continues in order after failures, and one by one after an expiry', async () => {
    queue = randomUUID()
    await configure(server, queue, { retryDelay: 0, retryLimit: 5 })
    await fill(queue, series(6, megabyte))
    const first = await take(server, queue, { batch: 1_000 })
    expect(numbersOf(first)).toEqual([0, 1, 2, 3])
    await acked(server, first.slice(0, 2))
    await acked(server, first.slice(2), { status: 'failed', error: 'no' })
    const second = await take(server, queue, { batch: 1_000 })
    expect(second.map(({ retryCount }) => retryCount)).toEqual([1, 1, 0, 0])
    expect(numbersOf(second)).toEqual([2, 3, 4, 5])
    await tables.query('UPDATE mq_leases SET until = now()')
    for (const n of [2, 3, 4, 5]) {
      const alone = await take(server, queue, { batch: 1_000 })
      expect(numbersOf(alone)).toEqual([n])
      await acked(server, alone)
    }
  })

  it('groups do not affect each other', async () => {
    queue = randomUUID()
    await fill(queue, series(6, megabyte))
    for (const consumerGroup of ['a', 'b']) {
      expect((await drain({ consumerGroup })).map(numbersOf)).toEqual([
        [0, 1, 2, 3],
        [4, 5],
      ])
    }
  })

  it('many at once get all of it, once', async () => {
    queue = randomUUID()
    const count = 24
    for (let n = 0; n < count; n++) await fill(queue, [json(2 * megabyte, n), json(10, 100 + n)], `p${n}`)
    const answers = await Promise.all(
      Array.from({ length: count }, () => pop(server, queue, { batch: 10, wait: true, timeout: 10_000 })),
    )
    const numbers = answers.flatMap((answer) => numbersOf(messagesOf(answer)))
    const wanted = Array.from({ length: count }, (_, n) => [n, 100 + n]).flat()
    expect(numbers.sort((a, b) => a - b)).toEqual(wanted.sort((a, b) => a - b))
    for (const answer of answers) await acked(server, messagesOf(answer))
  })
})
