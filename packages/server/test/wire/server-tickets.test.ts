/** What becomes of accepted work: reading, waiting, streaming, cancelling, retrying, redriving, pausing. */
import { afterAll, afterEach, beforeAll, describe, expect, it } from 'vitest'
import { freshDatabase, type TestDatabase } from '../../../spillway/test/setup/database.js'
import {
  type Body,
  call,
  endAll,
  finishes,
  get,
  latch,
  operation,
  post,
  type ServerProcess,
  startServer,
  startTarget,
  submit,
  type Target,
} from '../server-process.js'

const rfc3339 = /^\d{4}-\d\d-\d\dT\d\d:\d\d:\d\d\.\d{3}Z$/

let database: TestDatabase
let server: ServerProcess
let target: Target
let gate = latch()
let broken = true

beforeAll(async () => {
  database = await freshDatabase()
  target = await startTarget(async ({ path }, response) => {
    if (path.startsWith('/held')) await gate.opened
    response.writeHead(path.startsWith('/broken') && broken ? 400 : 200).end()
  })
  server = await startServer({
    DATABASE_URL: database.url,
    SPILLWAY_FORWARD_ALLOW: target.origin,
    SPILLWAY_DIRECT_WAIT_MS: '200',
  })
})

afterEach(() => {
  gate.open()
  gate = latch()
  broken = true
})

afterAll(async () => {
  await endAll()
  await target.close()
  await database.drop()
})

const pausedQueue = async (queue: string, count: number, headers: Record<string, string> = {}): Promise<string[]> => {
  await post(server, '/api/v1/lanes/pause', { queue })
  const ids = []
  for (let n = 0; n < count; n++) {
    const { status, body } = await submit(server, `${target.origin}/${queue}?${n}`, { queue }, headers)
    expect(status).toBe(202)
    ids.push(body.operationId)
  }
  return ids
}
const resume = (queue: string) => post(server, '/api/v1/lanes/resume', { queue })

describe('GET /operations/:id', () => {
  it('has every member, with times in UTC and milliseconds', async () => {
    const { body } = await submit(server, `${target.origin}/a`, {
      queue: 'shape',
      partition: 'p',
      priority: 2,
      max_retries: 7,
    })
    const seen = await operation(server, body.operationId)
    expect(Object.keys(seen).sort()).toEqual(
      [
        'id',
        'operation_type',
        'queue',
        'partition',
        'priority',
        'status',
        'created_at',
        'processing_started_at',
        'processed_at',
        'attempt',
        'max_attempts',
        'retry_count',
        'error_message',
        'latency_seconds',
        'queuePosition',
        'result',
      ].sort(),
    )
    expect(seen).toMatchObject({ partition: 'p', priority: 2, max_attempts: 8 })
    for (const at of [seen.created_at, seen.processing_started_at, seen.processed_at]) expect(at).toMatch(rfc3339)
    expect(Math.abs(Date.parse(seen.created_at) - Date.now())).toBeLessThan(10_000)
    expect(seen.latency_seconds).toBeGreaterThanOrEqual(0)
    expect(seen.latency_seconds).toBeLessThan(5)
  })

  it.each([
    '01890a5d-ac96-774b-bcce-b302099a8057',
    'nonsense',
    '1',
    '01890a5d-ac96-774b-bcce-b302099a805',
    '..%2f',
    '%ff',
  ])('404 for %s', async (id) => {
    const answer = await get(server, `/api/v1/operations/${id}`)
    expect([400, 404]).toContain(answer.status)
    if (id !== '%ff') expect(answer.status).toBe(404)
    expect(answer.headers.get('content-type')).toContain('problem+json')
  })

  it('?wait=N is answered when it finishes, not before and not long after', async () => {
    const { body } = await submit(server, `${target.origin}/held`, { queue: 'poll' })
    let answered = false
    const waiting = get(server, `/api/v1/operations/${body.operationId}?wait=30`).then((answer) => {
      answered = true
      return answer
    })
    const short = await get(server, `/api/v1/operations/${body.operationId}?wait=0.5`)
    expect(short.body.status).toBe('processing')
    expect(short.ms).toBeGreaterThan(450)
    expect(short.ms).toBeLessThan(2_000)
    expect(answered).toBe(false)
    gate.open()
    const opened = performance.now()
    expect((await waiting).body.status).toBe('completed')
    expect(performance.now() - opened).toBeLessThan(1_000)
  })

  it.each(['-1', '61', 'x', ''])('400 for wait=%s', async (wait) => {
    const { body } = await submit(server, `${target.origin}/a`, { queue: 'wait' })
    expect((await get(server, `/api/v1/operations/${body.operationId}?wait=${wait}`)).status).toBe(400)
  })
})

describe('the list', () => {
  it('is newest first, in pages without gap or repeat while more comes', async () => {
    const ids = await pausedQueue('pages', 7)
    const first = await get(server, '/api/v1/operations?queue=pages&limit=3')
    expect(first.body.items.map((o) => o.id)).toEqual(ids.slice(4).reverse())
    const later = await submit(server, `${target.origin}/later`, { queue: 'pages' })
    const second = await get(server, `/api/v1/operations?queue=pages&limit=3&cursor=${first.body.next_cursor}`)
    expect(second.body.items.map((o) => o.id)).toEqual(ids.slice(1, 4).reverse())
    const third = await get(server, `/api/v1/operations?queue=pages&limit=3&cursor=${second.body.next_cursor}`)
    expect(third.body.items.map((o) => o.id)).toEqual(ids.slice(0, 1))
    expect(third.body.next_cursor).toBeNull()
    await resume('pages')
    await finishes(server, later.body.operationId)
    const all = await get(server, '/api/v1/operations?queue=pages&status=completed')
    expect(all.body.items).toHaveLength(8)
  })

  it('pages over finished and unfinished ones together', async () => {
    const done = []
    for (let n = 0; n < 3; n++)
      done.push((await submit(server, `${target.origin}/m`, { queue: 'mixed' })).body.operationId)
    const open = await pausedQueue('mixed', 3)
    const seen: string[] = []
    for (let cursor = ''; ; ) {
      const { body } = await get(server, `/api/v1/operations?queue=mixed&limit=2${cursor}`)
      seen.push(...body.items.map((o) => o.id))
      if (body.next_cursor === null) break
      cursor = `&cursor=${body.next_cursor}`
    }
    expect(seen).toEqual([...done, ...open].reverse())
    await resume('mixed')
  })

  it('filters by status, type, partition, identity and time', async () => {
    const before = new Date().toISOString()
    const a = await submit(server, `${target.origin}/f`, { queue: 'filter', partition: 'a' }, { 'x-user-id': 'ann' })
    const b = await submit(server, `${target.origin}/broken`, { queue: 'filter', partition: 'b' })
    const list = async (query: string) =>
      (await get(server, `/api/v1/operations?queue=filter&${query}`)).body.items.map((o) => o.id)
    expect(await list('partition=a')).toEqual([a.body.operationId])
    expect(await list('status=failed')).toEqual([b.body.operationId])
    expect(await list('status=completed')).toEqual([a.body.operationId])
    expect(await list('type=http.request')).toHaveLength(2)
    expect(await list('type=other')).toEqual([])
    expect(await list('identity=ann')).toEqual([a.body.operationId])
    expect(await list(`from=${before}`)).toHaveLength(2)
    expect(await list(`to=${before}`)).toEqual([])
  })

  it.each([
    'limit=0',
    'limit=201',
    'limit=x',
    'status=done',
    'cursor=nonsense',
    'from=yesterday',
    'to=2020-13-01T00:00:00Z',
    'identity=',
  ])('400 for %s', async (query) => {
    const { status, body } = await get(server, `/api/v1/operations?${query}`)
    expect(status).toBe(400)
    expect(body.errors.length).toBeGreaterThan(0)
  })
})

it('stats cover unfinished and recently finished operations', async () => {
  const ids = await pausedQueue('stats', 2)
  const { body } = await get(server, '/api/v1/operations/stats')
  const pending = body.stats.filter((s) => s.status === 'pending' && s.priority === 5)
  expect(pending).toHaveLength(1)
  expect(pending[0]).toMatchObject({
    operation_type: 'http.request',
    oldest: expect.stringMatching(rfc3339),
    newest: expect.stringMatching(rfc3339),
  })
  expect(pending[0]?.count).toBeGreaterThanOrEqual(2)
  expect(body.stats.find((s) => s.status === 'completed')?.avg_latency_seconds).toBeGreaterThanOrEqual(0)
  expect(Object.keys(body.systemHealth).sort()).toEqual([
    'oldestAgeSeconds',
    'poolUtilization',
    'poolWaiting',
    'queueDepth',
  ])
  expect(body.systemHealth.queueDepth).toBeGreaterThanOrEqual(2)
  await resume('stats')
  for (const id of ids) await finishes(server, id)
})

describe('cancel', () => {
  it('takes a pending one out of its lane, once', async () => {
    const [first, second, third] = await pausedQueue('cancel', 3)
    const cancelled = await post(server, `/api/v1/operations/${second}/cancel`)
    expect(cancelled.status).toBe(200)
    expect(cancelled.body).toMatchObject({ id: second, status: 'cancelled' })
    expect((await operation(server, third ?? '')).queuePosition).toBe(1)
    const again = await post(server, `/api/v1/operations/${second}/cancel`)
    expect(again.status).toBe(409)
    await resume('cancel')
    await finishes(server, third ?? '')
    expect((await operation(server, first ?? '')).status).toBe('completed')
    expect(target.calls.filter((c) => c.path.startsWith('/cancel')).map((c) => c.path)).toEqual([
      '/cancel?0',
      '/cancel?2',
    ])
  })

  it('wakes its waiters, and frees the lane when it was the head', async () => {
    const delayed = await submit(server, `${target.origin}/d`, { queue: 'head', delay_seconds: 60 })
    const behind = await submit(server, `${target.origin}/behind-head`, { queue: 'head' })
    expect(behind.body.reason).toBe('maintaining_order')
    const waiting = get(server, `/api/v1/operations/${delayed.body.operationId}?wait=30`)
    expect((await post(server, `/api/v1/operations/${delayed.body.operationId}/cancel`)).status).toBe(200)
    const cancelled = await waiting
    expect(cancelled.body.status).toBe('cancelled')
    expect(cancelled.ms).toBeLessThan(3_000)
    expect((await finishes(server, behind.body.operationId, 5_000)).status).toBe('completed')
  })

  it('409 once running or finished; 404 if unknown', async () => {
    const running = await submit(server, `${target.origin}/held`, { queue: 'running' })
    expect(running.body.reason).toBe('still_running')
    const refused = await post(server, `/api/v1/operations/${running.body.operationId}/cancel`)
    expect(refused.status).toBe(409)
    expect(refused.body.code).toBe('operation_running')
    gate.open()
    await finishes(server, running.body.operationId)
    expect((await post(server, `/api/v1/operations/${running.body.operationId}/cancel`)).status).toBe(409)
    expect((await post(server, '/api/v1/operations/01890a5d-ac96-774b-bcce-b302099a8057/cancel')).status).toBe(404)
  })

  it('takes an empty body of JSON type', async () => {
    const [id] = await pausedQueue('empty', 1)
    const { status } = await call(server, 'POST', `/api/v1/operations/${id}/cancel`, { body: '' })
    expect(status).toBe(200)
    await resume('empty')
  })
})

it('a route without members accepts none, neither in a body nor in a query', async () => {
  const [id] = await pausedQueue('members', 1)
  const own = `/api/v1/operations/${id}`
  const wrong = [
    ...['cancel', 'retry'].flatMap((verb) =>
      [{ zz: 1 }, [1], 'null', '1'].map((body) => post(server, `${own}/${verb}`, body)),
    ),
    ...['/api/v1/operations/stats', `${own}/stream`].map((path) => get(server, `${path}?zz=1`)),
    ...['cancel', 'retry'].map((verb) => post(server, `${own}/${verb}?zz=1`)),
    ...['lanes/pause', 'lanes/resume'].map((path) => post(server, `/api/v1/${path}?zz=1`, { queue: 'members' })),
    post(server, '/api/v1/dead-letters/redrive?zz=1', { ids: [] }),
  ]
  for (const { status, body } of await Promise.all(wrong)) {
    expect([status, body.code]).toEqual([400, 'invalid_request'])
    expect(body.errors.length).toBeGreaterThan(0)
  }
  expect((await post(server, `${own}/cancel`, {})).status).toBe(200)
  await resume('members')
})

describe('lanes', () => {
  it('a paused queue accepts and holds; others continue; a partition can be paused alone', async () => {
    expect((await post(server, '/api/v1/lanes/pause', { queue: 'paused', partition: 'a' })).status).toBe(200)
    const held = await submit(server, `${target.origin}/p`, { queue: 'paused', partition: 'a' })
    expect(held.status).toBe(202)
    expect((await submit(server, `${target.origin}/p`, { queue: 'paused', partition: 'b' })).status).toBe(201)
    expect((await get(server, `/api/v1/operations/${held.body.operationId}?wait=1`)).body.status).toBe('pending')
    expect((await post(server, '/api/v1/lanes/resume', { queue: 'paused', partition: 'a' })).status).toBe(200)
    expect((await finishes(server, held.body.operationId, 5_000)).status).toBe('completed')
  })

  it('shows what holds a lane: a partition is not resumed while its queue is paused, a queue with all of them', async () => {
    const change = async (action: 'pause' | 'resume', partition?: string) => {
      const { body } = await post(server, `/api/v1/lanes/${action}`, { queue: 'scopes', partition })
      return [body.paused, body.paused_by]
    }
    expect(await change('pause', 'a')).toEqual([true, 'partition'])
    expect(await change('pause')).toEqual([true, 'queue'])
    expect(await change('pause', 'b')).toEqual([true, 'queue'])
    expect(await change('resume', 'a')).toEqual([true, 'queue'])
    const held = await submit(server, `${target.origin}/s`, { queue: 'scopes', partition: 'b' })
    expect(held.status).toBe(202)
    expect(await change('resume')).toEqual([false, null])
    expect((await finishes(server, held.body.operationId, 5_000)).status).toBe('completed')
    expect(await change('resume', 'b')).toEqual([false, null])
  })

  it('pausing twice is pausing once, and the running one ends', async () => {
    const running = await submit(server, `${target.origin}/held`, { queue: 'twice' })
    await post(server, '/api/v1/lanes/pause', { queue: 'twice' })
    await post(server, '/api/v1/lanes/pause', { queue: 'twice' })
    const next = await submit(server, `${target.origin}/next`, { queue: 'twice' })
    gate.open()
    expect((await finishes(server, running.body.operationId)).status).toBe('completed')
    expect((await get(server, `/api/v1/operations/${next.body.operationId}?wait=0.7`)).body.status).toBe('pending')
    await resume('twice')
    expect((await finishes(server, next.body.operationId, 5_000)).status).toBe('completed')
  })
})

describe('the stream', () => {
  const events = (text: string) =>
    text
      .split('\n\n')
      .filter((block) => block.includes('data:'))
      .map((block) => ({
        id: /^id: (.+)$/m.exec(block)?.[1] ?? '',
        event: /^event: (.*)$/m.exec(block)?.[1],
        data: JSON.parse(/^data: (.*)$/m.exec(block)?.[1] ?? 'null') as Body,
      }))

  it('sends position, start and end, with headers against buffering by proxies, and then ends', async () => {
    const first = await submit(server, `${target.origin}/held`, { queue: 'sse' })
    const { body } = await submit(server, `${target.origin}/streamed`, { queue: 'sse' })
    const answer = await fetch(`${server.origin}/api/v1/operations/${body.operationId}/stream`)
    expect(answer.status).toBe(200)
    expect(answer.headers.get('content-type')).toBe('text/event-stream; charset=utf-8')
    expect(answer.headers.get('cache-control')).toBe('no-cache, no-transform')
    expect(answer.headers.get('x-accel-buffering')).toBe('no')
    gate.open()
    const sent = events(await answer.text())
    expect(sent[0]).toMatchObject({ event: 'status', data: { status: 'pending', id: body.operationId } })
    expect(sent.at(-1)).toMatchObject({ event: 'status', data: { status: 'completed' } })
    expect(new Set(sent.map((e) => e.id)).size).toBe(sent.length)
    expect((await operation(server, first.body.operationId)).status).toBe('completed')
  })

  it('of a finished one is its end, always with the same id, and 204 for a client that has it', async () => {
    const { body } = await submit(server, `${target.origin}/done`, { queue: 'sse-done' })
    const stream = (headers = {}) => get(server, `/api/v1/operations/${body.operationId}/stream`, headers)
    const [only, ...more] = events((await stream()).text)
    expect(only?.data.status).toBe('completed')
    expect(more).toEqual([])
    const again = await stream({ 'last-event-id': only?.id })
    expect([again.status, again.text]).toEqual([204, ''])
    expect(events((await stream({ 'last-event-id': '7' })).text)).toEqual([{ ...only, id: expect.any(String) }])
    expect(events((await stream()).text)).toEqual([only])
  })

  it('sends the new end after a retry to a client that has the first end', async () => {
    const { body } = await submit(server, `${target.origin}/broken`, { queue: 'sse-again' })
    const path = `/api/v1/operations/${body.operationId}`
    const [before] = events((await get(server, `${path}/stream`)).text)
    const had = { 'last-event-id': before?.id ?? '' }
    expect((await get(server, `${path}/stream`, had)).status).toBe(204)
    expect((await post(server, `${path}/retry`)).status).toBe(200)
    await finishes(server, body.operationId)
    const sent = events((await get(server, `${path}/stream`, had)).text)
    expect(sent.map(({ data }) => data.status)).toEqual(['failed'])
    expect(sent[0]?.id).not.toBe(before?.id)
  })
})

describe('identities', () => {
  const ann = { 'x-user-id': 'ann' }
  const bob = { 'x-user-id': 'bob' }

  it("another one's operation is not there, in any way", async () => {
    await post(server, '/api/v1/lanes/pause', { queue: 'secret' })
    const { body } = await submit(server, `${target.origin}/secret`, { queue: 'secret' }, ann)
    const id = body.operationId
    for (const [method, path] of [
      ['GET', ''],
      ['GET', '?wait=5'],
      ['GET', '/stream'],
      ['POST', '/cancel'],
      ['POST', '/retry'],
    ] as const) {
      const answer = await call(server, method, `/api/v1/operations/${id}${path}`, { headers: bob })
      expect(answer.status).toBe(404)
      expect(answer.text).not.toContain('secret')
    }
    expect((await get(server, '/api/v1/operations?queue=secret', bob)).body.items).toEqual([])
    expect((await get(server, '/api/v1/operations?identity=ann', bob)).body.items).toEqual([])
    expect((await get(server, `/api/v1/operations/${id}`, ann)).status).toBe(200)
    expect((await get(server, `/api/v1/operations/${id}`)).status).toBe(200)
    expect((await post(server, `/api/v1/operations/${id}/cancel`, undefined, ann)).status).toBe(200)
    await resume('secret')
  })

  it("another one's dead letters are not there either", async () => {
    await submit(server, `${target.origin}/broken`, { queue: 'anns' }, ann)
    expect((await get(server, '/api/v1/dead-letters?queue=anns', bob)).body.items).toEqual([])
    expect((await get(server, '/api/v1/dead-letters?queue=anns', ann)).body.items).toHaveLength(1)
  })

  it('named ones do not operate', async () => {
    const [id] = await pausedQueue('roles', 1, ann)
    for (const [method, path, body] of [
      ['POST', `/api/v1/operations/${id}/retry`, undefined],
      ['POST', '/api/v1/dead-letters/redrive', { filter: {} }],
      ['DELETE', '/api/v1/dead-letters?all=true', undefined],
      ['POST', '/api/v1/lanes/pause', { queue: 'x' }],
      ['POST', '/api/v1/lanes/resume', { queue: 'x' }],
    ] as const) {
      const { status, body: problem } = await call(server, method, path, { headers: ann, body })
      expect([method, path, status]).toEqual([method, path, 403])
      expect(problem.code).toBe('forbidden')
    }
    await resume('roles')
  })
})
