import { describe, expect, it } from 'vitest'
import { clientOn } from '../client.js'
import { systemClock } from '../clock.js'

const event = (name: string, data: object, id?: number): string =>
  `${id === undefined ? '' : `id: ${id}\n`}event: ${name}\ndata: ${JSON.stringify(data)}\n\n`
const chunk = (index: number): string =>
  event('chunk', { content: `<${index}>`, chunk_index: index, finish_reason: null }, index + 1)
const complete = event('complete', { thread_id: 't', chunk_count: 3, total_length: 9, duration_ms: 1 }, 9)
const failed = (code: string, retryable: boolean): string => event('error', { message: 'told', code, retryable })

/** Each connection brings the next of these, and ends. */
function streaming(...connections: string[]) {
  const asked: { method: string; url: string; lastEventId: string | undefined }[] = []
  const client = clientOn(
    {
      baseUrl: 'http://spillway.test',
      throttle: false,
      retry: { attempts: 4 },
      fetch: async (url, init) => {
        const headers = init?.headers as Record<string, string>
        asked.push({ method: init?.method ?? '', url: String(url), lastEventId: headers['last-event-id'] })
        return new Response(connections[asked.length - 1] ?? '', {
          headers: { 'content-type': 'text/event-stream; charset=utf-8', 'x-stream-id': 'id' },
        })
      },
    },
    { ...systemClock, sleep: async () => undefined },
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

  it.each(['draining', 'stream_log_unavailable'])('goes on elsewhere after %s', async (code) => {
    const { generation } = streaming(chunk(0) + failed(code, true), chunk(1) + complete)
    expect(await generation.text()).toBe('<0><1>')
  })

  it('ends with the error that it is told', async () => {
    const { generation, asked } = streaming(chunk(0) + failed('stream_interrupted', true))
    await expect(generation.text()).rejects.toMatchObject({ code: 'stream_interrupted', retryable: true })
    expect(asked).toHaveLength(1)
  })

  it('is given up when connection after connection brings nothing', async () => {
    const { generation, asked } = streaming(chunk(0))
    await expect(generation.text()).rejects.toMatchObject({ code: 'unreachable' })
    expect(asked).toHaveLength(4)
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
