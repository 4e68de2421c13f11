/** Every stream metric moves where its decision is taken, and the settings that only a figure shows have an effect. */
import { once } from 'node:events'
import { connect } from 'node:net'
import { afterAll, beforeAll, describe, expect, it } from 'vitest'
import {
  as,
  chat,
  chatBody,
  type Fleet,
  native,
  occupy,
  resume,
  type SseStream,
  startFleet,
} from '../generation-server.js'
import { get, post, type ServerProcess, sample, until } from '../server-process.js'

let fleet: Fleet
/** One place for each user, ten for all, and no patience with a reader that stalls. */
let server: ServerProcess
/** Two generations at a time, one of each user at once; its upstream is tried often and soon; its streams are soon gone. */
let small: ServerProcess

beforeAll(async () => {
  fleet = await startFleet()
  const started = await Promise.all([
    fleet.start({
      CONNECTION_POOL_MAX_PER_USER: '1',
      CONNECTION_POOL_MAX_GLOBAL: '10',
      STREAM_STALL_SECONDS: '1',
    }),
    fleet.start({
      GENERATION_CONCURRENCY: '2',
      CONNECTION_POOL_MAX_PER_USER: '1',
      QUEUE_FAILOVER_MAX_RETRIES: '12',
      QUEUE_FAILOVER_MAX_DELAY_MS: '5',
      STREAM_RETENTION_SECONDS: '1',
    }),
  ])
  server = started[0]
  small = started[1]
})

afterAll(() => fleet.close())

const hasToken = ({ content }: SseStream) => content !== ''

async function value(name: string, labels: Record<string, string> = {}, of = server): Promise<number> {
  const found = sample((await get(of, '/metrics')).text, name, labels)
  if (found === undefined) throw new Error(`there is no ${name} ${JSON.stringify(labels)}`)
  return found
}

const becomes = (name: string, wanted: number, of = server) =>
  until(`${name} is ${wanted}`, async () => (await value(name, {}, of)) === wanted)

/** By how much a counter grows while `act` is done. */
async function growth(name: string, labels: Record<string, string>, act: () => Promise<unknown>, of = server) {
  const before = await value(name, labels, of)
  await act()
  return (await value(name, labels, of)) - before
}

async function holding(of: ServerProcess, user: string): Promise<SseStream> {
  const stream = await native(of, user, `marker=${user} tokens=1 end=hang`)
  await stream.seen('its token', hasToken)
  return stream
}

async function letGo(...streams: readonly [string, SseStream][]): Promise<void> {
  for (const [marker, stream] of streams) {
    fleet.upstream.release(marker)
    await stream.whole()
  }
}

describe('before the first stream', () => {
  it.each([
    ['sse_active_connections', {}],
    ['sse_pool_state', {}],
    ['sse_queue_depth', {}],
    ['sse_failovers_total', { reason: 'user_limit' }],
    ['sse_failovers_total', { reason: 'pool_full' }],
    ['sse_failovers_total', { reason: 'no_slot' }],
    ['sse_failovers_total', { reason: 'upstream_retry' }],
    ['sse_chunks_streamed_total', {}],
    ['sse_first_token_seconds_count', {}],
    ['sse_resumes_total', {}],
    ['sse_slow_reader_closed_total', {}],
  ])('%s %j exists and is 0', async (name, labels) => {
    expect(await value(name, labels)).toBe(0)
  })
})

describe('sse_active_connections', () => {
  it('counts open streams, and no longer those whose clients left', async () => {
    const one = await holding(server, 'open-1')
    const two = await chat(server, 'open-2', 'marker=open-2 tokens=1 end=hang')
    await becomes('sse_active_connections', 2)
    two.leave()
    await becomes('sse_active_connections', 1)
    await letGo(['open-1', one])
    await becomes('sse_active_connections', 0)
  })
})

describe('sse_chunks_streamed_total', () => {
  it('counts every event of the log that went to a client, each time it did', async () => {
    const grown = await growth('sse_chunks_streamed_total', {}, async () => {
      const stream = await (await native(server, 'chunks', 'marker=chunks tokens=3')).whole()
      // Three tokens, the reason of the end, and the end.
      expect(stream.events.filter(({ id }) => id !== null).length).toBe(5)
      await (await resume(server, 'chunks', stream.id, { query: 3 })).whole()
    })
    expect(grown).toBe(7)
  })
})

describe('sse_first_token_seconds', () => {
  it('counts from the request to the first token', async () => {
    const sum = await growth('sse_first_token_seconds_sum', {}, async () => {
      const count = await growth('sse_first_token_seconds_count', {}, async () => {
        await (await native(server, 'first', 'marker=first first=300 tokens=2')).whole()
      })
      expect(count).toBe(1)
    })
    expect(sum).toBeGreaterThanOrEqual(0.29)
  })

  it('counts the wait in the queue too', async () => {
    const held = await occupy(fleet, server, 'queued')
    let waitedMs = 0
    const sum = await growth('sse_first_token_seconds_sum', {}, async () => {
      const stream = await native(server, 'queued', 'marker=queued tokens=1')
      const beganMs = performance.now()
      await becomes('sse_queue_depth', 1)
      waitedMs = performance.now() - beganMs
      held.release()
      await stream.whole()
    })
    expect(sum * 1_000).toBeGreaterThanOrEqual(waitedMs)
  })
})

describe('sse_queue_depth', () => {
  it('counts waiting ones, not running ones', async () => {
    const held = await occupy(fleet, server, 'depth')
    const waiting = [
      await native(server, 'depth', 'marker=depth-1 tokens=1'),
      await chat(server, 'depth', 'marker=depth-2 tokens=1'),
    ]
    await becomes('sse_queue_depth', 2)
    held.release()
    await Promise.all(waiting.map((stream) => stream.whole()))
    await becomes('sse_queue_depth', 0)
  })

  it('no longer counts clients that left', async () => {
    const held = await occupy(fleet, server, 'left')
    const stream = await chat(server, 'left', 'marker=left tokens=1')
    await becomes('sse_queue_depth', 1)
    stream.leave()
    await becomes('sse_queue_depth', 0)
    held.release()
  })
})

describe('sse_failovers_total', () => {
  it('user_limit: its user has as many as it may', async () => {
    const one = await holding(server, 'limit')
    const grown = await growth('sse_failovers_total', { reason: 'user_limit' }, async () => {
      const second = await (await native(server, 'limit', 'tokens=1')).whole()
      expect(second.layer).toBe('3-Queue-Failover')
    })
    expect(grown).toBe(1)
    await letGo(['limit', one])
  })

  it('no_slot: as many run here as GENERATION_CONCURRENCY says', async () => {
    const held = [await holding(small, 'slot-1'), await holding(small, 'slot-2')] as const
    let waiting: SseStream | undefined
    const ask = async (): Promise<void> => {
      waiting = await native(small, 'slot-3', 'marker=slot-3 tokens=1')
    }
    expect(await growth('sse_failovers_total', { reason: 'no_slot' }, ask, small)).toBe(1)
    expect([waiting?.layer, fleet.timesAsked('slot-3')]).toEqual(['3-Queue-Failover', 0])
    await letGo(['slot-1', held[0]], ['slot-2', held[1]])
    expect((await waiting?.whole())?.content).toBe(' slot-3#1')
  })

  it('upstream_retry: each time that the upstream failed before the first token', async () => {
    const reason = { reason: 'upstream_retry' }
    const ask = async () => (await chat(small, 'retry', 'marker=retry tokens=1 status=500 times=2')).whole()
    expect(await growth('sse_failovers_total', reason, ask, small)).toBe(2)
    expect(fleet.timesAsked('retry')).toBe(3)
  })

  it('does not count what began at once', async () => {
    const total = async () =>
      (await Promise.all(['user_limit', 'pool_full', 'no_slot', 'upstream_retry'].map(of))).reduce((a, b) => a + b)
    const of = (reason: string) => value('sse_failovers_total', { reason })
    const before = await total()
    expect((await (await native(server, 'at-once', 'tokens=1')).whole()).layer).toBe('1-Direct')
    expect(await total()).toBe(before)
  })
})

describe('sse_resumes_total', () => {
  it('counts resumes, and not answers that nothing is left', async () => {
    const stream = await (await native(server, 'resumes', 'tokens=1')).whole()
    const grown = await growth('sse_resumes_total', {}, async () => {
      await (await resume(server, 'resumes', stream.id, { query: 1 })).whole()
      expect((await resume(server, 'resumes', stream.id, { query: 99 })).status).toBe(204)
      expect((await resume(server, 'another', stream.id)).status).toBe(404)
    })
    expect(grown).toBe(1)
  })
})

describe('sse_slow_reader_closed_total', () => {
  it('counts a reader that took nothing for STREAM_STALL_SECONDS, whose connection is closed', async () => {
    const body = JSON.stringify({ query: 'script: marker=stalled tokens=250 pad=50000', model: 'demo' })
    const head =
      'POST /api/v1/stream HTTP/1.1\r\nhost: localhost\r\nx-user-id: stalled\r\ncontent-type: application/json\r\n'
    const socket = connect({ port: server.port, host: '127.0.0.1' })
    socket.on('error', () => undefined)
    await once(socket, 'connect')
    const grown = await growth('sse_slow_reader_closed_total', {}, async () => {
      socket.pause()
      socket.write(`${head}content-length: ${body.length}\r\n\r\n${body}`)
      await fleet.asked('stalled')
      await until('it is closed', async () => (await value('sse_slow_reader_closed_total')) > 0)
    })
    expect(grown).toBe(1)
    await becomes('sse_active_connections', 0)
    socket.destroy()
  })
})

describe('generation_ended_total', () => {
  it.each([
    ['done', 'tokens=1'],
    ['error', 'tokens=1 end=cut'],
  ])('%s: so many ended so', async (end, script) => {
    const ask = async () => (await native(small, `ends-${end}`, script)).whole()
    expect(await growth('generation_ended_total', { end }, ask, small)).toBe(1)
  })

  it('cancelled: so many were', async () => {
    const stream = await holding(small, 'ends-cancelled')
    const stop = async (): Promise<void> => {
      await post(small, `/api/v1/streams/${stream.id}/cancel`, undefined, as('ends-cancelled'))
      await stream.whole()
    }
    expect(await growth('generation_ended_total', { end: 'cancelled' }, stop, small)).toBe(1)
  })
})

describe('QUEUE_FAILOVER_MAX_DELAY_MS', () => {
  it('bounds the back-off: a dozen retries are over before the usual ones would have begun in earnest', async () => {
    const began = performance.now()
    const { status } = await post(
      small,
      '/v1/chat/completions',
      chatBody('marker=often status=500', { stream: false }),
      as('often'),
    )
    // Doubling from 100 ms to 5 s, twelve of them take 20 s on average.
    expect([status, fleet.timesAsked('often')]).toEqual([502, 13])
    expect(performance.now() - began).toBeLessThan(10_000)
  })
})

describe('STREAM_RETENTION_SECONDS', () => {
  it('is how long a stream can be read after its end; then it is not there', async () => {
    const stream = await (await native(small, 'expires', 'tokens=1')).whole()
    const answer = await until('it has expired', async () => {
      const asked = await get(small, `/api/v1/streams/${stream.id}`, as('expires'))
      return asked.status !== 200 && asked
    })
    expect([answer.status, answer.body.code]).toEqual([404, 'not_found'])
  })
})

describe('CONNECTION_POOL_MAX_PER_USER', () => {
  it('holds also for operations that waited for a slot', async () => {
    const held = [await holding(small, 'busy-1'), await holding(small, 'busy-2')] as const
    const greedy = [
      await native(small, 'greedy', 'marker=greedy-1 tokens=1 end=hang'),
      await native(small, 'greedy', 'marker=greedy-2 tokens=1 end=hang'),
    ] as const
    await letGo(['busy-1', held[0]], ['busy-2', held[1]])
    await greedy[0].seen('its token', hasToken)
    // There is a slot for somebody else: the second of the same user does not take it.
    await (await native(small, 'modest', 'tokens=1')).whole()
    expect(fleet.timesAsked('greedy-2')).toBe(0)
    fleet.upstream.release('greedy-1')
    await greedy[1].seen('its token', hasToken)
    await letGo(['greedy-2', greedy[1]])
  })
})

describe('sse_pool_state', () => {
  it('goes from 0 to 3 with the places that are taken, and back', async () => {
    await becomes('sse_pool_state', 0)
    const held: [string, SseStream][] = []
    const take = async (upTo: number): Promise<void> => {
      while (held.length < upTo) {
        const user = `pool-${held.length}`
        held.push([user, await holding(server, user)])
      }
    }
    await take(7)
    await becomes('sse_pool_state', 1)
    await take(9)
    await becomes('sse_pool_state', 2)
    await take(10)
    await becomes('sse_pool_state', 3)
    expect(held.map(([, stream]) => stream.layer)).toEqual(Array(10).fill('1-Direct'))
    const reason = { reason: 'pool_full' }
    const ask = async () => (await native(server, 'pool-last', 'tokens=1')).whole()
    expect(await growth('sse_failovers_total', reason, ask)).toBe(1)
    await letGo(...held)
    await becomes('sse_pool_state', 0)
  })
})
