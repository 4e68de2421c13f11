/** `POST /api/v1/stream` through the real server: its head, its events, and how it waits. */
import { afterAll, beforeAll, describe, expect, it } from 'vitest'
import { monotonicMs } from '../../../spillway/test/setup/scripted-upstream.js'
import {
  as,
  blocksWithoutData,
  type Fleet,
  native,
  occupy,
  open,
  type SseStream,
  startFleet,
} from '../generation-server.js'
import { get, type ServerProcess } from '../server-process.js'

const uuid = /^[\da-f]{8}(?:-[\da-f]{4}){3}-[\da-f]{12}$/
/** "At once": long before there is anything to tell, on a machine that runs other tests too. */
const atOnceMs = 5_000

let fleet: Fleet
let demo: ServerProcess
let server: ServerProcess

beforeAll(async () => {
  fleet = await startFleet()
  const started = await Promise.all([
    fleet.startDemo({ GENERATION_DEMO_TOKENS_PER_SECOND: '50' }),
    fleet.start({ CONNECTION_POOL_MAX_PER_USER: '1', STREAM_HEARTBEAT_SECONDS: '1' }),
  ])
  demo = started[0]
  server = started[1]
})

afterAll(() => fleet.close())

const ask = (query: string, headers: Record<string, string> = {}) =>
  open(demo, '/api/v1/stream', { headers: { ...as('ann'), ...headers }, body: { query, model: 'demo' } })

describe.concurrent('a native stream', () => {
  it('has the headers of a stream', async () => {
    const { status, headers } = await (await ask('3 words')).whole()
    expect(status).toBe(200)
    expect(Object.fromEntries(headers)).toMatchObject({
      'content-type': 'text/event-stream; charset=utf-8',
      'cache-control': 'no-cache, no-transform',
      'x-accel-buffering': 'no',
      'x-resilience-layer': '1-Direct',
      'x-stream-id': expect.stringMatching(uuid),
      'x-thread-id': expect.stringMatching(uuid),
      'x-request-id': expect.stringMatching(/./),
    })
  })

  it('is a status, chunks, complete, and then [DONE]', async () => {
    const { events } = await (await ask('3 words')).whole()
    expect(events.map(({ event }) => event)).toEqual([
      'status',
      ...['chunk', 'chunk', 'chunk', 'chunk'],
      'complete',
      null,
    ])
    expect(events.at(-1)).toMatchObject({ id: null, data: '[DONE]' })
  })

  it('begins with a status that names it', async () => {
    const stream = await (await ask('1 word')).whole()
    expect(stream.dataOf('status')).toEqual([
      { status: 'started', stream_id: stream.id, thread_id: stream.headers.get('x-thread-id') },
    ])
  })

  it('has chunks with content, a number and, in the last, why it ended', async () => {
    const chunks = (await (await ask('3 words')).whole()).dataOf('chunk')
    expect(chunks).toEqual([
      { content: 'I', chunk_index: 0, finish_reason: null },
      { content: ' am', chunk_index: 1, finish_reason: null },
      { content: ' the', chunk_index: 2, finish_reason: null },
      { content: '', chunk_index: 3, finish_reason: 'stop' },
    ])
  })

  it('ends with the totals, counted in code points', async () => {
    const stream = await (await ask('😀😀 40 words')).whole()
    expect(stream.content).toContain('😀😀')
    expect(stream.dataOf('complete')).toEqual([
      {
        thread_id: stream.headers.get('x-thread-id'),
        chunk_count: stream.named('chunk').length,
        total_length: [...stream.content].length,
        duration_ms: expect.any(Number),
      },
    ])
  })

  it('numbers every event of its log from 1 on', async () => {
    const stream = await (await ask('3 words')).whole()
    expect([...stream.named('chunk'), ...stream.named('complete')].map(({ id }) => id)).toEqual([
      ...['1', '2', '3', '4', '5'],
    ])
    expect(stream.named('status')[0]?.id).toBeNull()
  })

  it('is always the same to the same question', async () => {
    const [one, two] = await Promise.all([
      (await ask('20 words on water')).whole(),
      (await ask('20 words on water')).whole(),
    ])
    expect(one?.content).toBe(two?.content)
    expect(one?.content).not.toBe('')
  })

  it('comes at the rate of GENERATION_DEMO_TOKENS_PER_SECOND', async () => {
    const chunks = (await (await ask('31 words')).whole()).named('chunk')
    const tookMs = (chunks.at(-1)?.atMs ?? 0) - (chunks[0]?.atMs ?? 0)
    // 30 gaps of 20 ms; how much later than that, is the machine's affair.
    expect(tookMs).toBeGreaterThan(450)
  })

  it('keeps the thread that X-Thread-ID names', async () => {
    const stream = await (await ask('1 word', { 'x-thread-id': 'thread/7' })).whole()
    expect(stream.headers.get('x-thread-id')).toBe('thread/7')
    expect([stream.dataOf('status')[0]?.thread_id, stream.dataOf('complete')[0]?.thread_id]).toEqual([
      'thread/7',
      'thread/7',
    ])
  })

  it('is a thread of its own without that header', async () => {
    const ids = await Promise.all(
      [1, 2].map(async () => (await (await ask('1 word')).whole()).headers.get('x-thread-id')),
    )
    expect(new Set(ids).size).toBe(2)
  })

  it('is an operation whose trace is the one of its request', async () => {
    const traceparent = '00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01'
    await (await native(server, 'trace', 'marker=trace tokens=1', { headers: { traceparent } })).whole()
    expect((await fleet.asked('trace')).traceparent).toContain('0af7651916cd43dd8448eb211c80319c')
  })

  it('sends its head at once though the upstream has not answered', async () => {
    const stream = await native(server, 'slow-head', 'marker=slow-head headers=60000')
    expect(stream.headMs).toBeLessThan(atOnceMs)
    expect([stream.status, stream.layer]).toEqual([200, '1-Direct'])
    await stream.seen('its status', ({ dataOf }) => dataOf.call(stream, 'status').length === 1)
    stream.leave()
  })

  it('brings each token while the upstream has not ended', async () => {
    const stream = await native(server, 'tokens', 'marker=tokens tokens=2 end=hang')
    await stream.seen('both tokens', ({ content }) => content === ' tokens#1 tokens#2')
    expect((await fleet.asked('tokens')).outcome).toBe('open')
    fleet.upstream.release('tokens')
    await stream.whole()
    expect(stream.dataOf('complete')).toMatchObject([{ chunk_count: 3, total_length: 18 }])
  })

  it('beats with a colon and one newline while the upstream is silent', async () => {
    const stream = await native(server, 'beats', 'marker=beats tokens=1 end=hang')
    await stream.seen('two heartbeats', ({ raw }) => raw.endsWith('\n\n:\n:\n'))
    fleet.upstream.release('beats')
    await stream.whole()
    expect(blocksWithoutData(stream.raw)).toEqual([])
    expect(stream.content).toBe(' beats#1')
  })

  it('reports an error after the first token as an event, then sends [DONE]', async () => {
    const stream = await (await native(server, 'fault', 'marker=fault tokens=2 end=error')).whole()
    expect(stream.content).toBe(' fault#1 fault#2')
    expect(stream.dataOf('error')).toEqual([
      { message: 'scripted error', code: expect.any(String), retryable: expect.any(Boolean) },
    ])
    expect(stream.named('complete')).toEqual([])
    expect(stream.events.at(-1)).toMatchObject({ event: null, id: null, data: '[DONE]' })
  })
})

describe.concurrent('a native stream that is queued', () => {
  const waiting = async (user: string) => {
    const held = await occupy(fleet, server, user)
    const stream = await native(server, user, `marker=${user} tokens=2`)
    return { held, stream }
  }
  const positions = (stream: SseStream) => stream.dataOf('queued').map(({ position }) => position)

  it('sends its head at once, naming the layer', async () => {
    const { held, stream } = await waiting('head')
    expect(stream.headMs).toBeLessThan(atOnceMs)
    expect(Object.fromEntries(stream.headers)).toMatchObject({
      'content-type': 'text/event-stream; charset=utf-8',
      'cache-control': 'no-cache, no-transform',
      'x-accel-buffering': 'no',
      'x-resilience-layer': '3-Queue-Failover',
      'x-stream-id': expect.stringMatching(uuid),
      'x-thread-id': expect.stringMatching(uuid),
    })
    expect(fleet.timesAsked('head')).toBe(0)
    held.release()
    await stream.whole()
  })

  it('reports that it waits, its position and the expected wait', async () => {
    const { held, stream } = await waiting('position')
    await stream.seen('its position', (seen) => seen.named('queued').length > 0)
    expect(stream.dataOf('status')).toMatchObject([{ status: 'queued', stream_id: stream.id }])
    const [queued] = stream.dataOf('queued')
    expect(Object.keys(queued ?? {}).sort()).toEqual(['eta_seconds', 'position'])
    expect(queued?.eta_seconds).toBeGreaterThanOrEqual(0)
    held.release()
    await stream.whole()
  })

  it('reports each change of its position, and nothing twice', async () => {
    const { held, stream: next } = await waiting('places')
    const after = await native(server, 'places', 'marker=places-2 tokens=1')
    await after.seen('its position', (seen) => positions(seen).length > 0)
    const [first = 0] = positions(after)
    await next.seen('its position', (seen) => positions(seen).length > 0)
    expect(first).toBe(Number(positions(next)[0]) + 1)
    // The one before it gives up its place in the queue.
    next.leave()
    await open(server, `/api/v1/streams/${next.id}/cancel`, { method: 'POST', headers: as('places') })
    const cancelledMs = monotonicMs()
    await after.seen('a better position', (seen) => positions(seen).length > 1)
    expect(monotonicMs() - cancelledMs).toBeLessThan(2_000)
    held.release()
    await after.whole()
    expect(positions(after)).toEqual([...new Set(positions(after))].sort((a, b) => Number(b) - Number(a)))
  })

  it('beats with a colon and one newline', async () => {
    const { held, stream } = await waiting('patient')
    await stream.seen('a heartbeat', ({ raw }) => raw.endsWith('\n\n:\n'))
    held.release()
    await stream.whole()
    expect(blocksWithoutData(stream.raw)).toEqual([])
  })

  it('then continues like an uninterrupted one', async () => {
    const { held, stream } = await waiting('turn')
    await stream.seen('its position', (seen) => seen.named('queued').length > 0)
    held.release()
    await stream.whole()
    const direct = await (await native(server, 'turn-direct', 'marker=turn tokens=2')).whole()
    expect([direct.layer, stream.layer]).toEqual(['1-Direct', '3-Queue-Failover'])
    expect(stream.named('chunk').map(({ id, data }) => [id, data])).toEqual(
      direct.named('chunk').map(({ id, data }) => [id, data]),
    )
    expect(stream.events.at(-1)?.data).toBe('[DONE]')
  })

  it('is an operation that everybody can look up who owns it', async () => {
    const { held, stream } = await waiting('owner')
    expect((await get(server, `/api/v1/operations/${stream.id}`, as('owner'))).body).toMatchObject({
      id: stream.id,
      status: 'pending',
    })
    held.release()
    await stream.whole()
  })
})
