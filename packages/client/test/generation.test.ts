import { afterAll, afterEach, beforeAll, describe, expect, it } from 'vitest'
import { type Client, createClient, type GeneratedChunk, type Waiting } from '../src/index.js'
import { type FaultProxy, refusal, startFaultProxy } from './fault-proxy.js'
import { type RunningServer, runningServer } from './running-server.js'
import { type ScriptedModel, startScriptedModel, tokensOf } from './scripted-model.js'

let server: RunningServer
let model: ScriptedModel
let proxy: FaultProxy

beforeAll(async () => {
  model = await startScriptedModel()
  server = await runningServer({ GENERATION_UPSTREAM_URL: model.url, CONNECTION_POOL_MAX_PER_USER: '1' })
  proxy = await startFaultProxy(server.origin)
})
afterAll(async () => {
  await proxy?.close()
  await server?.stop()
  await model?.close()
})
afterEach(() => proxy.forget())

let users = 0
/** Each of its own: they do not wait for each other. */
const newClient = (): Client => createClient({ baseUrl: proxy.origin, identity: `user-${++users}` })
const ask = (script: string) => ({ query: script, model: 'm' })
const resumes = () => proxy.seen.filter(({ path }) => path.startsWith('/api/v1/streams/'))

describe('a generation', () => {
  it('is read chunk by chunk', async () => {
    const generation = newClient().generate(ask('tokens=5'))
    expect(generation.streamId).toBeNull()
    const chunks: GeneratedChunk[] = []
    for await (const chunk of generation) chunks.push(chunk)
    expect(chunks.map(({ content }) => content).join('')).toBe(tokensOf(5))
    expect(chunks.map(({ index }) => index)).toEqual(chunks.map((_, i) => i))
    expect(chunks.at(-1)?.finishReason).toBe('stop')
    expect(generation).toMatchObject({ streamId: expect.any(String), complete: { chunk_count: chunks.length } })
  })

  it('is read as one text', async () => {
    expect(await newClient().generate(ask('tokens=3')).text()).toBe(tokensOf(3))
  })

  it('is read once', async () => {
    const generation = newClient().generate(ask('tokens=1'))
    await generation.text()
    await expect(generation.text()).rejects.toThrow(TypeError)
  })

  it('continues without a gap or a repeat, however often its connection is dropped', async () => {
    const { asked } = model.counts
    proxy.plan('/api/v1/stream', { kind: 'cut', behind: '"content":"4 "' })
    proxy.plan('/api/v1/streams/', { kind: 'cut', behind: '"content":"9 "' }, { kind: 'drop', when: 'before' })
    proxy.plan('/api/v1/streams/', { kind: 'cut', behind: '"content":"15 "' })
    const indexes: number[] = []
    let text = ''
    for await (const { content, index } of newClient().generate(ask('tokens=25 every=10'))) {
      text += content
      indexes.push(index)
    }
    expect(text).toBe(tokensOf(25))
    expect(indexes).toEqual(indexes.map((_, i) => i))
    expect(resumes().length).toBeGreaterThanOrEqual(3)
    expect(model.counts.asked - asked).toBe(1)
  })

  it('continues when its connection is silent', async () => {
    proxy.plan('/api/v1/stream', { kind: 'stall', behind: '"content":"3 "' })
    expect(await newClient().generate(ask('tokens=10'), { silentMs: 800 }).text()).toBe(tokensOf(10))
    expect(resumes().length).toBeGreaterThanOrEqual(1)
  })

  it('whose first answer is lost attaches to the same stream', async () => {
    const { asked } = model.counts
    proxy.plan('/api/v1/stream', { kind: 'drop', when: 'after' })
    expect(await newClient().generate(ask('tokens=5')).text()).toBe(tokensOf(5))
    expect(proxy.seen.map(({ method }) => method)).toEqual(['POST', 'POST'])
    expect(model.counts.asked - asked).toBe(1)
  })

  it('that was refused is requested again', async () => {
    proxy.plan('/api/v1/stream', refusal(503, '0'))
    expect(await newClient().generate(ask('tokens=2')).text()).toBe(tokensOf(2))
  })

  it('that breaks off at its source ends with a typed error after the received chunks', async () => {
    let text = ''
    const read = async () => {
      for await (const { content } of newClient().generate(ask('tokens=4 end=cut'))) text += content
    }
    await expect(read()).rejects.toMatchObject({ name: 'SpillwayError', code: expect.any(String), status: 200 })
    expect(text).toBe(tokensOf(4))
  })

  it('that waits reports its position', async () => {
    const client = newClient()
    const first = client.generate(ask('tokens=1 end=hang'))
    const held = first[Symbol.asyncIterator]()
    await held.next()
    const second = client.generate(ask('tokens=1 end=hang'))
    const heldToo = second[Symbol.asyncIterator]()
    await heldToo.next()
    const places: Waiting[] = []
    const third = client.generate(ask('tokens=2'), {
      onQueued: (waiting) => {
        places.push(waiting)
        // Both permits of this user are held until onQueued is called.
        if (places.length === 1) void Promise.all([first.cancel(), second.cancel()])
      },
    })
    expect(await third.text()).toBe(tokensOf(2))
    expect(places[0]).toEqual({ id: third.streamId, position: expect.any(Number), etaSeconds: expect.any(Number) })
    await expect(held.next()).rejects.toMatchObject({ code: 'generation_cancelled', retryable: false })
    await expect(heldToo.next()).rejects.toMatchObject({ code: 'generation_cancelled' })
  })

  it('can be left, and resumed behind the last chunk', async () => {
    const client = newClient()
    const generation = client.generate(ask('tokens=20 every=5'))
    let text = ''
    let after = ''
    for await (const { content, id, index } of generation) {
      text += content
      after = id
      if (index === 7) break
    }
    const { streamId } = generation
    if (streamId === null) throw new Error('it has no id')
    expect(text + (await client.resume(streamId, { after }).text())).toBe(tokensOf(20))
  })

  it('ends with the reason of its signal', async () => {
    const left = new AbortController()
    const read = async () => {
      for await (const _ of newClient().generate(ask('tokens=2 end=hang'), { signal: left.signal })) {
        left.abort(new Error('enough'))
      }
    }
    await expect(read()).rejects.toThrow('enough')
  })
})

it('an operation with output is followed to its end, over a dropped connection', async () => {
  const client = newClient()
  const generation = client.generate(ask('tokens=12'))
  await generation.text()
  proxy.plan('/stream', { kind: 'cut', behind: '"content":"6 "' })
  const seen: string[] = []
  const ids: (string | null)[] = []
  for await (const event of client.operations.follow(generation.streamId ?? '')) {
    if (event.type === 'status') continue
    ids.push(event.id)
    seen.push(event.type === 'chunk' ? (event.data as { content: string }).content : event.type)
  }
  expect(seen.join('')).toBe(`${tokensOf(12)}complete`)
  expect(new Set(ids).size).toBe(ids.length)
})
