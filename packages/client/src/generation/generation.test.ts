import { describe, expect, it } from 'vitest'
import { clientOn } from '../client.js'
import { systemClock } from '../clock.js'

const event = (name: string, data: object, id?: number): string =>
  `${id === undefined ? '' : `id: ${id}\n`}event: ${name}\ndata: ${JSON.stringify(data)}\n\n`
const chunk = (index: number): string =>
  event('chunk', { content: `<${index}>`, chunk_index: index, finish_reason: null }, index + 1)
const completeOf = (chunk_count: number): string =>
  event('complete', { thread_id: 't', chunk_count, total_length: 9, duration_ms: 1 }, 9)
const complete = completeOf(3)
const failed = (code: string, retryable: boolean): string => event('error', { message: 'the message', code, retryable })

/** Each connection brings the next of these, and ends; null: 204. */
function streaming(...connections: (string | null)[]) {
  return lasting(0, ...connections)
}

/** Each connection lasts this long, by the clock. */
function lasting(ms: number, ...connections: (string | null)[]) {
  let now = 0
  const asked: { method: string; url: string; lastEventId: string | undefined }[] = []
  const client = clientOn(
    {
      baseUrl: 'http://spillway.test',
      throttle: false,
      retry: { attempts: 4 },
      fetch: async (url, init) => {
        const headers = init?.headers as Record<string, string>
        asked.push({ method: init?.method ?? '', url: String(url), lastEventId: headers['last-event-id'] })
        const text = connections[asked.length - 1]
        if (text === null) return new Response(null, { status: 204 })
        const body = new ReadableStream(
          {
            pull: (to) => {
              now += ms
              to.enqueue(new TextEncoder().encode(text ?? ''))
              to.close()
            },
          },
          { highWaterMark: 0 },
        )
        return new Response(body, {
          headers: { 'content-type': 'text/event-stream; charset=utf-8', 'x-stream-id': 'id' },
        })
      },
    },
    { ...systemClock, now: () => now, sleep: async () => undefined },
  )
  return { generation: client.generate({ query: 'q', model: 'm' }), client, asked }
}

describe('a generation', () => {
  it('is resumed behind the last chunk when its answer ends before it does', async () => {
    const { generation, asked } = streaming(chunk(0), chunk(1) + chunk(2) + complete)
    expect(await generation.text()).toBe('<0><1><2>')
    expect(asked).toEqual([
      { method: 'POST', url: 'http://spillway.test/api/v1/stream', lastEventId: undefined },
      { method: 'GET', url: 'http://spillway.test/api/v1/streams/id', lastEventId: '1' },
    ])
  })

  it('is resumed where a chunk is missing', async () => {
    const { generation, asked } = streaming(chunk(0) + chunk(2), chunk(1) + chunk(2) + complete)
    expect(await generation.text()).toBe('<0><1><2>')
    expect(asked[1]?.lastEventId).toBe('1')
  })

  it('has no chunk twice', async () => {
    const { generation } = streaming(chunk(0) + chunk(1), chunk(0) + chunk(1) + chunk(2) + complete)
    expect(await generation.text()).toBe('<0><1><2>')
  })

  it.each(['draining', 'stream_log_unavailable'])('continues elsewhere after %s', async (code) => {
    const { generation } = streaming(chunk(0) + failed(code, true), chunk(1) + completeOf(2))
    expect(await generation.text()).toBe('<0><1>')
  })

  it('ends with the error that it receives', async () => {
    const { generation, asked } = streaming(chunk(0) + failed('stream_interrupted', true))
    await expect(generation.text()).rejects.toMatchObject({ code: 'stream_interrupted', retryable: true })
    expect(asked).toHaveLength(1)
  })

  it('fails when connection after connection brings nothing', async () => {
    const { generation, asked } = streaming(chunk(0))
    await expect(generation.text()).rejects.toMatchObject({ code: 'unreachable' })
    expect(asked).toHaveLength(4)
  })

  it('that ends with a chunk missing is resumed for it', async () => {
    const { generation, asked } = streaming(chunk(0) + chunk(1) + complete, chunk(2) + complete)
    expect(await generation.text()).toBe('<0><1><2>')
    expect(asked[1]?.lastEventId).toBe('2')
    expect(generation.complete).toMatchObject({ chunk_count: 3 })
  })

  it('of which a chunk stays missing fails, and is not reported as complete', async () => {
    const { generation, asked } = streaming(chunk(0) + complete, complete, complete, complete)
    await expect(generation.text()).rejects.toMatchObject({ code: 'unreachable' })
    expect(asked).toHaveLength(4)
    expect(generation.complete).toBeNull()
  })

  it('of which a chunk is missing where nothing is left is unexpected', async () => {
    const { generation } = streaming(chunk(0) + complete, null)
    await expect(generation.text()).rejects.toMatchObject({ code: 'unexpected', status: 204 })
  })

  it.each([
    ['its place and an error', event('queued', { position: 1, eta_seconds: 1 }) + failed('draining', true)],
    ['its status', event('status', { stream_id: 'id' })],
    ['a gap', event('status', { stream_id: 'id' }) + chunk(5)],
  ])('fails when connection after connection brings nothing but %s', async (_, connection) => {
    const { generation, asked } = streaming(...new Array<string>(20).fill(connection))
    await expect(generation.text()).rejects.toMatchObject({ code: 'unreachable' })
    expect(asked).toHaveLength(4)
  })

  it('waits on, however often a connection is cut that was up for long', async () => {
    const waiting = event('queued', { position: 1, eta_seconds: 1 })
    const { generation, asked } = lasting(60_000, ...new Array<string>(20).fill(waiting), chunk(0) + completeOf(1))
    expect(await generation.text()).toBe('<0>')
    expect(asked).toHaveLength(21)
  })

  it('that is no stream is unexpected', async () => {
    const client = clientOn({ baseUrl: 'http://spillway.test', fetch: async () => Response.json({}) }, systemClock)
    const text = client.generate({ query: 'q', model: 'm' }).text()
    await expect(text).rejects.toMatchObject({ code: 'unexpected', status: 200 })
  })

  it('with an event that is no JSON is unexpected', async () => {
    const { generation } = streaming('event: chunk\ndata: {\n\n')
    await expect(generation.text()).rejects.toMatchObject({ code: 'unexpected' })
  })

  it('of which nothing is left, resumed, is empty', async () => {
    const fetch = async () => new Response(null, { status: 204 })
    const client = clientOn({ baseUrl: 'http://spillway.test', fetch }, systemClock)
    expect(await client.resume('id', { after: '9' }).text()).toBe('')
  })

  it('cancelled before it is read is never asked for', async () => {
    const { generation, asked } = streaming(complete)
    await generation.cancel()
    await expect(generation.text()).rejects.toMatchObject({ code: 'generation_cancelled', attempts: 0 })
    expect(asked).toHaveLength(0)
  })
})
