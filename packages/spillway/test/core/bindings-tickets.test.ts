/** The conformance suite of the ticket routes: the same requests over every binding. */
import Type from 'typebox'
import { afterAll, afterEach, beforeAll, describe, expect, it } from 'vitest'
import type { TicketRoutesOptions } from '../../src/http/tickets.js'
import type { DefineOptions, Definition } from '../../src/index.js'
import type { Intake } from '../../src/intake/intake.js'
import { type Api, type Binding, bindings, chunked, eventsOf, json, neverBusy, serve } from '../bindings-fixture.js'
import { type Bench, bench, eventually, overriding, signal } from '../pipeline-fixture.js'

const Order = Type.Object({ item: Type.String() })
const tea = { item: 'tea' }
const unknownId = '01890000-0000-7000-8000-000000000000'

let b: Bench
let intake: Intake
const opened: Api[] = []
const gates: { fire(): void }[] = []
/** Tickets that the streams have read from the store: how often they look. */
let looks = 0
beforeAll(async () => {
  b = await bench()
  intake = await b.intake({
    ...neverBusy,
    wrap: (store) =>
      overriding(store, {
        ticket: (id) => {
          looks++
          return store.ticket(id)
        },
      }),
  })
})
afterEach(() => {
  for (const gate of gates.splice(0)) gate.fire()
  for (const api of opened.splice(0)) api.close()
})
afterAll(() => b.close())

let made = 0
const name = (what: string): string => `${what}-${++made}`

/** Orders named 'held' run until their test ends; 'bad' ones fail. */
function define(options: object = {}): Definition {
  const held = signal()
  gates.push(held)
  return intake.define(name('orders'), {
    body: Order,
    identity: ({ headers }) => headers['x-customer'] ?? 'nobody',
    maxRetries: 0,
    run: async ({ item }, { signal: stop }) => {
      if (item === 'bad') throw new Error('out of stock')
      if (item === 'held') {
        await Promise.race([held.promise, new Promise((resolve) => stop.addEventListener('abort', resolve))])
        stop.throwIfAborted()
      }
      return { shipped: item }
    },
    ...options,
  } as DefineOptions<typeof Order, unknown>)
}

async function mounted(binding: Binding, order = define(), tickets: TicketRoutesOptions = {}): Promise<Api> {
  const api = await serve(binding, { intake, order, tickets })
  opened.push(api)
  return api
}

const bodyOf = async (response: Response) => (await response.json()) as Record<string, unknown>
const as = (customer: string): RequestInit => ({ headers: { 'x-customer': customer } })
const operations = '/api/v1/operations'

async function submitted({ call }: Api, customer: string, order: unknown): Promise<string> {
  const response = await call('/orders', json(order, { 'x-customer': customer, prefer: 'respond-async' }))
  expect(response.status).toBe(202)
  return response.headers.get('location') ?? ''
}

async function expectProblem(response: Response, status: number, code: string): Promise<void> {
  expect(response.status).toBe(status)
  expect(response.headers.get('content-type')).toBe('application/problem+json')
  const problem = await bodyOf(response)
  expect(problem).toMatchObject({ status, code, trace_id: response.headers.get('x-request-id') })
}

describe.each(bindings)('$name, with one identity for the intake', (binding) => {
  it('shows a caller its own tickets, of every type; a definition may say it otherwise', async () => {
    const own = await b.intake({ ...neverBusy, identity: ({ headers }) => headers['x-user'] })
    const [ann, bob, red] = [name('ann'), name('bob'), name('red')]
    const run = ({ item }: { item: string }) => item
    const order = own.define(name('orders'), { body: Order, run })
    const other = own.define(name('others'), {
      body: Order,
      run,
      identity: ({ headers }) => headers['x-team'] ?? 'none',
    })
    const api = await serve(binding, { intake: own, order })
    opened.push(api)
    const queued = await api.call('/orders', json(tea, { 'x-user': ann, prefer: 'respond-async' }))
    const ticket = queued.headers.get('location') ?? ''
    const get = (path: string, headers: Record<string, string>) => api.call(path, { headers })
    expect((await get(ticket, { 'x-user': ann })).status).toBe(200)
    expect((await get(ticket, { 'x-user': bob })).status).toBe(404)
    const answer = await own.submit(other, tea, { identity: red, respondAsync: true })
    const theirs = `${operations}/${answer.kind === 'queued' && answer.operationId}`
    expect((await get(theirs, { 'x-team': red, 'x-user': bob })).status).toBe(200)
    expect((await get(theirs, { 'x-team': 'blue', 'x-user': red })).status).toBe(404)
    const listed = await bodyOf(await get(operations, { 'x-user': ann, 'x-team': 'blue' }))
    expect(listed.items).toEqual([expect.objectContaining({ id: ticket.slice(operations.length + 1) })])
    await own.close()
  })
})

describe.each(bindings)('$name', (binding) => {
  it('reads a ticket for the identity that submitted it, and for no other', async () => {
    const api = await mounted(binding)
    const [ann, bob] = [name('ann'), name('bob')]
    const ticket = await submitted(api, ann, tea)
    const own = await api.call(`${ticket}?wait=30`, as(ann))
    expect(own.status).toBe(200)
    expect(own.headers.get('content-type')).toBe('application/json; charset=utf-8')
    expect(own.headers.get('x-request-id')).toMatch(/^[0-9a-f]{32}$/)
    expect(await bodyOf(own)).toMatchObject({ status: 'completed', result: { shipped: 'tea' } })
    await expectProblem(await api.call(ticket, as(bob)), 404, 'not_found')
    await expectProblem(await api.call(`${operations}/${unknownId}`, as(ann)), 404, 'not_found')
    await expectProblem(await api.call(`${operations}/no-uuid`, as(ann)), 404, 'not_found')
    const head = await api.call(ticket, { method: 'HEAD', ...as(ann) })
    expect([head.status, await head.text()]).toEqual([200, ''])
  })

  it("lists the caller's own, by the identity of each definition", async () => {
    const api = await mounted(binding)
    const [ann, bob] = [name('ann'), name('bob')]
    const tickets = [await submitted(api, ann, tea), await submitted(api, ann, tea)]
    await submitted(api, bob, tea)
    const ids = async (query: string, customer: string): Promise<string[]> => {
      const response = await api.call(`${operations}${query}`, as(customer))
      expect(response.status).toBe(200)
      const { items } = (await bodyOf(response)) as { items: { id: string }[] }
      return items.map(({ id }) => `${operations}/${id}`)
    }
    // Without an address or a user the types without an identity have no answer.
    if (binding.hasNoAddress) return
    expect(await ids('', ann)).toEqual(tickets.toReversed())
    expect(await ids('?limit=1', ann)).toEqual(tickets.slice(1))
    expect(await ids(`?identity=${bob}`, ann)).toEqual([])
    expect((await api.call(`${operations}/stats`, as(ann))).status).toBe(200)
    await expectProblem(await api.call(`${operations}?limit=none`, as(ann)), 400, 'invalid_request')
    await expectProblem(await api.call(`${operations}?cursor=x`, as(ann)), 400, 'invalid_request')
  })

  it('waits with ?wait=N, and stops waiting for a client that leaves', async () => {
    const api = await mounted(binding)
    const ann = name('ann')
    const ticket = await submitted(api, ann, { item: 'held' })
    const leaving = new AbortController()
    const before = looks
    const left = api.call(`${ticket}?wait=60`, { ...as(ann), signal: leaving.signal }).catch(() => 'left')
    await eventually(() => looks > before || undefined, 'the wait to begin')
    leaving.abort()
    // The wait ends with a last look.
    await eventually(() => looks > before + 1 || undefined, 'the wait to end')
    await left
    gates.splice(0).map((gate) => gate.fire())
    const done = await api.call(`${ticket}?wait=60`, as(ann))
    expect(await bodyOf(done)).toMatchObject({ status: 'completed' })
  })

  it('cancels: own ones only, queued or abortable, with an empty body or none', async () => {
    const api = await mounted(binding, define({ abortable: true }))
    const [ann, bob] = [name('ann'), name('bob')]
    const ticket = await submitted(api, ann, { item: 'held' })
    await expectProblem(await api.call(`${ticket}/cancel`, { method: 'POST', ...as(bob) }), 404, 'not_found')
    await expectProblem(
      await api.call(`${ticket}/cancel`, json({ more: 1 }, { 'x-customer': ann })),
      400,
      'invalid_request',
    )
    const cancelled = await api.call(`${ticket}/cancel`, { method: 'POST', ...as(ann) })
    expect([200, 202]).toContain(cancelled.status)
    expect(await bodyOf(await api.call(`${ticket}?wait=30`, as(ann)))).toMatchObject({ status: 'cancelled' })
    for (const body of [
      { method: 'POST', ...as(ann) },
      json('', { 'x-customer': ann }),
      json({}, { 'x-customer': ann }),
    ]) {
      await expectProblem(await api.call(`${ticket}/cancel`, body), 409, 'operation_finished')
    }
  })

  it('redrives, purges, retries and pauses for operators only', async () => {
    const queue = name('queue')
    const api = await mounted(binding, define({ lane: () => queue }), operators)
    const ann = name('ann')
    const ticket = await submitted(api, ann, { item: 'bad' })
    expect(await bodyOf(await api.call(`${ticket}?wait=30`, as(ann)))).toMatchObject({
      status: 'failed',
      error_message: 'out of stock',
    })
    const changes = [
      [`${ticket}/retry`, json('')],
      ['/api/v1/dead-letters/redrive', json({ queue })],
      [`/api/v1/dead-letters?queue=${queue}`, { method: 'DELETE', headers: {} }],
      ['/api/v1/lanes/pause', json({ queue })],
      ['/api/v1/lanes/resume', json({ queue })],
    ] as const
    for (const [path, init] of changes) {
      await expectProblem(
        await api.call(path, { ...init, headers: { ...init.headers, ...as(ann).headers } }),
        403,
        'forbidden',
      )
    }
    const letter = ticket.replace('operations', 'dead-letters')
    expect((await api.call(letter, as('operator'))).status).toBe(200)
    await expectProblem(await api.call(letter, as(name('bob'))), 404, 'not_found')
    const answers = [
      { status: 'pending' },
      { moved: 0 },
      { purged: expect.any(Number) },
      { queue, paused: true, paused_by: 'queue' },
      { queue, paused: false },
    ]
    for (const [n, [path, init]] of changes.entries()) {
      const response = await api.call(path, { ...init, headers: { ...init.headers, ...as('operator').headers } })
      expect(response.status).toBe(200)
      if (n !== 0 && n !== 1) expect(await bodyOf(response)).toMatchObject(answers[n] ?? {})
      else await response.text()
    }
    const missing = json('', { 'x-customer': 'operator' })
    await expectProblem(await api.call('/api/v1/lanes/pause', missing), 400, 'invalid_request')
  })

  it('lists all lanes for unbound keys, and those of its queues for a bound key', async () => {
    const [queue, other] = [name('queue'), name('queue')]
    const viewer: TicketRoutesOptions['viewer'] = ({ headers }) => {
      const identity = headers['x-customer'] ?? ''
      const isBound = identity.startsWith('bound')
      return { identity, operates: false, views: identity !== 'nobody', ...(isBound && { queues: [`${other}*`] }) }
    }
    const api = await mounted(binding, define({ lane: ({ item }: { item: string }) => [queue, item] }), { viewer })
    await intake.lanes.pause({ queue })
    for (const item of ['a', 'b', 'a']) await submitted(api, 'ann', { item })
    const lanes = async (query: string, customer = 'viewer') => {
      const response = await api.call(`/api/v1/lanes${query}`, as(customer))
      expect(response.status).toBe(200)
      return (await bodyOf(response)) as { items: Record<string, unknown>[]; next_cursor: string | null }
    }
    const { items, next_cursor } = await lanes(`?queue=${queue}`)
    expect(next_cursor).toBeNull()
    expect(items.map(({ partition, depth }) => [partition, depth]).sort()).toEqual([
      ['a', 2],
      ['b', 1],
    ])
    expect(items[0]).toEqual({
      ...{ queue, partition: expect.any(String), depth: expect.any(Number), oldest_age_seconds: expect.any(Number) },
      ...{ paused: true, paused_by: 'queue', waiting_because: 'the queue is paused' },
      head: {
        ...{ id: expect.any(String), operation_type: expect.any(String), status: 'pending' },
        ...{ attempt: 0, max_attempts: 1, next_attempt_at: null },
      },
    })
    const first = await lanes(`?queue=${queue}&limit=1`)
    const second = await lanes(`?queue=${queue}&limit=1&cursor=${first.next_cursor}`)
    expect([first, second].flatMap((page) => page.items.map(({ partition }) => partition)).sort()).toEqual(['a', 'b'])
    expect(second.next_cursor).toBeNull()
    expect((await lanes(`?queue=${queue}`, 'bound')).items).toEqual([])
    expect((await lanes('', 'bound')).items).toEqual([])
    await expectProblem(await api.call('/api/v1/lanes', as('nobody')), 403, 'forbidden')
    await expectProblem(await api.call('/api/v1/lanes?limit=none', as('viewer')), 400, 'invalid_request')
    await expectProblem(await api.call('/api/v1/lanes?cursor=x', as('viewer')), 400, 'invalid_request')
    await expectProblem(await api.call('/api/v1/lanes?colour=red', as('viewer')), 400, 'invalid_request')
    await intake.lanes.resume({ queue })
  })

  it('refuses bodies that are malformed or too large', async () => {
    const api = await mounted(binding)
    const pause = (init: RequestInit) => api.call('/api/v1/lanes/pause', init)
    if (binding.parsesItself) return
    await expectProblem(await pause(json('{"queue":')), 400, 'invalid_request')
    await expectProblem(await pause(json('queue=a', { 'content-type': 'text/html' })), 415, 'unsupported_media_type')
    await expectProblem(await pause(json({ queue: 'x'.repeat(1_100_000) })), 413, 'body_too_large')
    await expectProblem(await pause(chunked(['{"queue":"', 'x'.repeat(1_100_000), '"}'])), 413, 'body_too_large')
  })

  it('leaves other paths and methods to others', async () => {
    const { call } = await mounted(binding)
    for (const [method, path] of [
      ['GET', '/elsewhere'],
      ['GET', '/api/v1/operations/'],
      ['GET', '/api/v1/operationsx'],
      ['PUT', '/api/v1/operations'],
      ['GET', '/api/v1/lanes/pause'],
    ] as const) {
      const response = await call(path, { method })
      expect([404, 405]).toContain(response.status)
    }
    expect((await call('/orders', json(tea))).status).toBe(201)
  })
})

/** One customer operates. */
const operators: TicketRoutesOptions = {
  viewer: ({ headers }) => ({
    identity: headers['x-customer'] ?? '',
    operates: headers['x-customer'] === 'operator',
  }),
}

describe.each(bindings)('$name: GET /operations/:id/stream', (binding) => {
  it('sends each status at once, ends after the last, and continues after Last-Event-ID', async () => {
    const api = await mounted(binding)
    const ann = name('ann')
    const ticket = await submitted(api, ann, { item: 'held' })
    const response = await api.call(`${ticket}/stream`, as(ann))
    expect(response.status).toBe(200)
    expect(response.headers.get('content-type')).toBe('text/event-stream; charset=utf-8')
    expect(response.headers.get('cache-control')).toBe('no-cache, no-transform')
    expect(response.headers.get('x-request-id')).toMatch(/^[0-9a-f]{32}$/)
    const seen: string[] = []
    let last = ''
    for await (const { id, event, data } of eventsOf(response)) {
      expect(event).toBe('status')
      // The first ones come while it runs: only then is it let go.
      if (seen.length === 0) for (const gate of gates.splice(0)) gate.fire()
      seen.push(String(data.status))
      last = id
    }
    expect(seen.at(-1)).toBe('completed')
    expect(seen.length).toBeGreaterThan(1)
    const again = await api.call(`${ticket}/stream`, { headers: { ...as(ann).headers, 'last-event-id': last } })
    expect(again.status).toBe(204)
    const first = await api.call(`${ticket}/stream`, { headers: { ...as(ann).headers, 'last-event-id': '0.other' } })
    const ids: string[] = []
    for await (const { id } of eventsOf(first)) ids.push(id)
    expect(ids).toEqual([last])
    await expectProblem(await api.call(`${ticket}/stream`, as(name('bob'))), 404, 'not_found')
  })

  it('stops for a client that leaves, and closes its output', async () => {
    const output = endlessOutput('{}', 1)
    const api = await mounted(binding, define(), { outputOf: async () => output })
    const ann = name('ann')
    const ticket = await submitted(api, ann, { item: 'held' })
    const leaving = new AbortController()
    const response = await api.call(`${ticket}/stream`, { ...as(ann), signal: leaving.signal })
    const events = eventsOf(response)
    await events.next()
    expect(output.isClosed).toBe(false)
    leaving.abort()
    await eventually(() => output.isClosed || undefined, 'the output to be closed')
    await events.return(undefined).catch(() => undefined)
  })

  it('is closed when its client does not read', async () => {
    const output = endlessOutput(JSON.stringify('x'.repeat(65_536)), Number.POSITIVE_INFINITY)
    const api = await mounted(binding, define(), { outputOf: async () => output, unreadMs: 200 })
    const ann = name('ann')
    const ticket = await submitted(api, ann, { item: 'held' })
    const response = await api.call(`${ticket}/stream`, as(ann))
    await eventually(() => output.isClosed || undefined, 'the output to be closed')
    await expect(response.text()).rejects.toThrow()
  })

  it('reads no more of the output than a slow reader takes, and continues after its last chunk', async () => {
    const text = JSON.stringify('x'.repeat(65_536))
    const output = endlessOutput(text, Number.POSITIVE_INFINITY)
    const afters: number[] = []
    const api = await mounted(binding, define(), {
      outputOf: async (_, after) => {
        afters.push(after)
        return output
      },
    })
    const ann = name('ann')
    const ticket = await submitted(api, ann, { item: 'held' })
    const response = await api.call(`${ticket}/stream`, as(ann))
    // The buffers of the sockets fill up, and then nothing more is read: not in many turns of the event loop.
    let taken = -1
    await eventually(async () => {
      const before = output.taken
      for (let turn = 0; turn < 200; turn++) await new Promise((resolve) => setImmediate(resolve))
      const isStill = before > 0 && before === output.taken && before === taken
      taken = output.taken
      return isStill || undefined
    }, 'the reading to stop')
    expect(taken).toBeLessThan(400)
    let chunks = 0
    for await (const { event } of eventsOf(response)) {
      if (event === 'chunk') chunks++
      if (chunks > taken) break
    }
    expect(output.taken).toBeGreaterThan(taken)
    const next = await api.call(`${ticket}/stream`, { headers: { ...as(ann).headers, 'last-event-id': '17' } })
    await next.body?.cancel()
    expect(afters).toEqual([0, 17])
  })
})

/** Output that comes for ever; after `count` chunks it pauses until it is closed. */
function endlessOutput(text: string, count: number) {
  const closed = signal<null>()
  const output = {
    taken: 0,
    isClosed: false,
    async next() {
      if (output.taken >= count) return closed.promise
      if (output.isClosed) return null
      await new Promise((resolve) => setImmediate(resolve))
      return { first: ++output.taken, chunks: [text], end: null }
    },
    close() {
      output.isClosed = true
      closed.fire(null)
    },
  }
  return output
}
