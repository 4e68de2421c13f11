/** What an Idempotency-Key keeps of a generation: an answer, and never a refusal; and how long one may take. */
import { afterAll, beforeAll, describe, expect, it } from 'vitest'
import { monotonicMs } from '../../../spillway/test/setup/scripted-upstream.js'
import { as, chat, chatBody, type Fleet, native, occupy, resume, startFleet } from '../generation-server.js'
import { post, type ServerProcess, until } from '../server-process.js'

const waitSeconds = 1
const leaseSeconds = 2

let fleet: Fleet
/** With one place for each user, and little patience. */
let server: ServerProcess

beforeAll(async () => {
  fleet = await startFleet()
  server = await fleet.start({
    CONNECTION_POOL_MAX_PER_USER: '1',
    QUEUE_FAILOVER_TIMEOUT_SECONDS: String(waitSeconds),
    STREAM_FIRST_TOKEN_SECONDS: '2',
  })
})

afterAll(() => fleet.close())

const key = (value: string) => ({ headers: { 'idempotency-key': value } })
const whole = (at: ServerProcess, user: string, script: string, headers: Record<string, string> = {}) =>
  post(at, '/v1/chat/completions', chatBody(script, { stream: false }), { ...as(user), ...headers })

describe.concurrent('the key of a request that timed out in the queue', () => {
  it('is free, where nothing is streamed', async () => {
    const held = await occupy(fleet, server, 'vain')
    const ask = () => whole(server, 'vain', 'marker=vain tokens=2', { 'idempotency-key': 'k' })
    const first = await ask()
    expect([first.status, first.body.error]).toMatchObject([503, { code: 'queue_timeout' }])
    held.release()
    const again = await ask()
    expect([again.status, again.headers.get('idempotent-replayed')]).toEqual([200, null])
    expect(fleet.timesAsked('vain')).toBe(1)
  })

  it.each(Object.entries({ native, openai: chat }))('is free after an error in the stream: %s', async (form, ask) => {
    const user = `vain-${form}`
    const held = await occupy(fleet, server, user)
    const first = await (await ask(server, user, `marker=${user} tokens=2`, key('k'))).whole()
    expect(first.error).toMatchObject({ code: 'queue_timeout' })
    held.release()
    const again = await (await ask(server, user, `marker=${user} tokens=2`, key('k'))).whole()
    expect([again.content, again.headers.get('idempotent-replayed')]).toEqual([` ${user}#1 ${user}#2`, null])
    expect(again.id).not.toBe(first.id)
  })

  it('returns the reason to every request that waited with it', async () => {
    const held = await occupy(fleet, server, 'both')
    const ask = () => whole(server, 'both', 'marker=both tokens=2', { 'idempotency-key': 'k' })
    const answers = await Promise.all([ask(), ask()])
    const outcomes = answers.map(({ status, body }) => [status, body.error])
    expect(outcomes).toMatchObject([
      [503, { code: 'queue_timeout' }],
      [503, { code: 'queue_timeout' }],
    ])
    expect(answers.every(({ headers }) => Number(headers.get('retry-after')) >= 1)).toBe(true)
    held.release()
  })
})

describe.concurrent('the key of what the upstream had no capacity for', () => {
  const script = (marker: string) => `marker=${marker} tokens=1 status=429 retry_after=40 times=1`

  it('is free, where nothing is streamed', async () => {
    const ask = () => whole(server, 'busy', script('busy'), { 'idempotency-key': 'k' })
    const [first, again] = [await ask(), await ask()]
    expect([first.status, again.status]).toEqual([503, 200])
    expect(again.headers.get('idempotent-replayed')).toBeNull()
  })

  it('is free for one of several that come at once, and the others read with it', async () => {
    const ask = () => chat(server, 'busy-stream', script('busy-stream'), key('k'))
    expect((await ask()).status).toBe(503)
    const again = await Promise.all([ask(), ask(), ask()])
    await Promise.all(again.map((stream) => stream.whole()))
    expect(again.map(({ content }) => content)).toEqual(Array(3).fill(' busy-stream#1'))
    expect(new Set(again.map(({ id }) => id)).size).toBe(1)
    expect(fleet.timesAsked('busy-stream')).toBe(2)
  })
})

describe.concurrent('the key of a client that left', () => {
  it('is free when there was no token yet', async () => {
    const first = await chat(server, 'left', 'marker=left tokens=0 end=hang times=1', key('k'))
    await fleet.asked('left')
    first.leave()
    await fleet.abortedMs('left')
    const ask = () => chat(server, 'left', 'marker=left tokens=0 end=hang times=1', key('k'))
    const again = await until('the first is over', async () => {
      const stream = await ask()
      if (stream.id !== first.id) return stream
      stream.leave()
      return undefined
    })
    expect((await again.whole()).error).toBeUndefined()
  })
})

describe.concurrent('the key of what ended for good', () => {
  it('replays the refusal of the upstream, with its status', async () => {
    const ask = () => chat(server, 'refused', 'marker=refused status=400', key('k'))
    const [first, again] = [await ask(), await ask()]
    expect([first.status, again.status]).toEqual([400, 400])
    await Promise.all([first.whole(), again.whole()])
    expect(fleet.timesAsked('refused')).toBe(1)
  })

  it('replays the chunks before an error', async () => {
    const ask = async () => (await chat(server, 'cut', 'marker=cut tokens=2 end=cut', key('k'))).whole()
    const [first, again] = [await ask(), await ask()]
    expect([again.id, again.raw]).toEqual([first.id, first.raw])
    expect(fleet.timesAsked('cut')).toBe(1)
  })
})

describe('the key of what a lost process had not begun to answer', () => {
  it('is free when it may not be run again', async () => {
    const env = { QUEUE_FAILOVER_MAX_RETRIES: '0', SPILLWAY_LEASE_SECONDS: String(leaseSeconds) }
    const [lost, other] = await fleet.startPair(env)
    const script = 'marker=lost tokens=1 headers=60000 times=1'
    const first = native(lost, 'lost', script, key('k')).catch(() => undefined)
    await fleet.asked('lost')
    await lost.kill()
    await first
    const again = await until('the key is free', async () => {
      const stream = await native(other, 'lost', script, key('k'))
      if (stream.headers.get('idempotent-replayed') === null) return stream
      stream.leave()
      return undefined
    })
    again.leave()
  })
})

describe('a replayed answer', () => {
  it('has the thread and the layer of its first answer', async () => {
    const ask = async () => (await native(server, 'thread', 'marker=thread tokens=1', key('k'))).whole()
    const [first, again] = [await ask(), await ask()]
    const resumed = await (await resume(server, 'thread', first.id)).whole()
    const [{ thread_id: thread } = {}] = first.dataOf('complete')
    for (const stream of [first, again, resumed]) {
      expect([stream.layer, stream.headers.get('x-thread-id')]).toEqual(['1-Direct', thread])
    }
    expect([first, again].map((stream) => stream.dataOf('status')[0]?.thread_id)).toEqual([thread, thread])
  })

  it('has the layer of one that was queued', async () => {
    const held = await occupy(fleet, server, 'layer')
    const first = await native(server, 'layer', 'marker=layer tokens=1', key('k'))
    held.release()
    await first.whole()
    const again = await (await native(server, 'layer', 'marker=layer tokens=1', key('k'))).whole()
    expect([first.layer, again.layer]).toEqual(['3-Queue-Failover', '3-Queue-Failover'])
  })
})

describe('time', () => {
  it('in the queue is over when it is over', async () => {
    const held = await occupy(fleet, server, 'punctual')
    const lateMs: number[] = []
    // The second begins when the first has its answer, whenever that is.
    for (const marker of ['punctual-1', 'punctual-2']) {
      const askedMs = monotonicMs()
      const stream = await (await chat(server, 'punctual', `marker=${marker}`)).whole()
      expect(stream.error).toMatchObject({ code: 'queue_timeout' })
      lateMs.push(monotonicMs() - askedMs - waitSeconds * 1_000)
    }
    expect(Math.max(...lateMs)).toBeLessThan(500)
    held.release()
  })

  it('of the caller ends an answer that is not streamed, and the upstream hears of it', async () => {
    const headers = { 'x-stainless-timeout': '0.5', 'idempotency-key': 'k' }
    const script = 'marker=impatient tokens=1 end=hang times=1'
    const askedMs = monotonicMs()
    const answer = await whole(server, 'impatient', script, headers)
    expect([answer.status, answer.body.error]).toMatchObject([504, { code: 'upstream_timeout' }])
    expect((await fleet.abortedMs('impatient')) - askedMs).toBeLessThan(1_500)
    const patient = { ...headers, 'x-stainless-timeout': '10' }
    expect((await whole(server, 'impatient', script, patient)).status).toBe(200)
  })

  it('for the first token is for all tries together', async () => {
    const askedMs = monotonicMs()
    const answer = await whole(server, 'tries', 'marker=tries status=429 retry_after=1')
    expect(answer.status).toBe(503)
    expect(monotonicMs() - askedMs).toBeLessThan(2_000)
    expect(fleet.timesAsked('tries')).toBe(2)
  })
})
