import type { OperationView } from '@spillway/protocol/wire'
import { describe, expect, it } from 'vitest'
import { type Client, clientOn } from '../client.js'
import type { Clock } from '../clock.js'
import { createClient } from '../index.js'

/** A server that gives the answers in turn and repeats the last. */
function answering(...answers: (() => Response)[]) {
  const asked: string[] = []
  const { operations } = createClient({
    baseUrl: 'http://spillway.test/prefix/',
    throttle: false,
    fetch: async (url) => {
      asked.push(String(url))
      const answer = answers[Math.min(asked.length, answers.length) - 1]
      if (answer === undefined) throw new TypeError('fetch failed')
      return answer()
    },
  })
  return { operations, asked }
}

const json =
  (body: unknown, status = 200, headers: Record<string, string> = {}) =>
  () =>
    new Response(JSON.stringify(body), { status, headers })
const finished = { status: 'completed', processed_at: '2026-01-01T00:00:00.000Z' } as OperationView
const pending = { status: 'pending', processed_at: null } as OperationView
const overloaded = (retryAfter: string) =>
  json({ code: 'overloaded', title: 'Overloaded', detail: 'later' }, 503, { 'retry-after': retryAfter })

describe('waiting', () => {
  it('asks again until it is finished, through refusals', async () => {
    const { operations, asked } = answering(json(pending), overloaded('0'), json(finished))
    expect(await operations.wait('x', { timeoutMs: 5_000 })).toEqual(finished)
    expect(asked).toHaveLength(3)
    expect(asked[0]).toMatch(/\?wait=[45]\.\d{3}$/)
  })

  it('answers with the known state when the time is over', async () => {
    const { operations } = answering(json(pending))
    expect(await operations.wait('x', { timeoutMs: 0 })).toEqual(pending)
  })

  it('answers with the known state when a refusal lasts longer', async () => {
    const { operations } = answering(json(pending), overloaded('20'))
    expect(await operations.wait('x', { timeoutMs: 5_000 })).toEqual(pending)
  })

  it('does not sleep past its deadline', async () => {
    const { operations, asked } = answering(overloaded('2'))
    await expect(operations.wait('x', { timeoutMs: 1_000 })).rejects.toMatchObject({ code: 'overloaded' })
    expect(asked).toHaveLength(1)
  })

  it('does not repeat what will not get better', async () => {
    const { operations, asked } = answering(json({ code: 'not_found', title: 'Not Found', detail: 'no' }, 404))
    await expect(operations.wait('x')).rejects.toMatchObject({ code: 'not_found' })
    expect(asked).toHaveLength(1)
  })

  it('ends with its signal', async () => {
    const { operations } = answering(overloaded('25'))
    const stop = new AbortController()
    const waiting = operations.wait('x', { signal: stop.signal })
    queueMicrotask(() => stop.abort(new Error('enough')))
    await expect(waiting).rejects.toThrow('enough')
  })
})

/** Each answer takes this long, and no other time passes; `null`: never answers, until the client leaves. */
function taking(...answers: ([ms: number, answer: () => Response] | null)[]) {
  const asked: URL[] = []
  const clock: Clock & { ms: number; pauses: number[] } = {
    ms: 0,
    pauses: [],
    now: () => clock.ms,
    wallMs: () => clock.ms,
    random: () => 0.5,
    sleep: async (ms) => {
      clock.pauses.push(ms)
      clock.ms += ms
    },
  }
  const fetch = async (url: string | URL | Request, init?: RequestInit) => {
    asked.push(new URL(String(url)))
    const [ms, answer] = answers[Math.min(asked.length, answers.length) - 1] ?? [0, null]
    clock.ms += ms
    if (answer !== null) return answer()
    return new Promise<never>((_, reject) => init?.signal?.addEventListener('abort', () => reject(new Error('left'))))
  }
  const options = { baseUrl: 'http://spillway.test', queuedOperationBehavior: 'poll', fetch } as const
  return { client: clientOn(options, clock), asked, clock }
}

const lane = { queue: 'q', partition: 'p', queuePosition: 0, reason: 'requested' }
const queued = {
  ...{ status: 'queued', operationId: 'one', queuePosition: 0, estimatedWaitSeconds: 1 },
  operations: [
    { ...lane, operationId: 'one' },
    { ...lane, operationId: 'two' },
  ],
  results: [],
}
const ticket = json(queued, 202)
const polls: [string, (client: Client, deadlineMs: number) => Promise<unknown>][] = [
  ['submit', ({ operations }, deadlineMs) => operations.submit(order, { deadlineMs })],
  ['push', ({ push }, deadlineMs) => push('q', [1, 2], { deadlineMs })],
  ['decide', ({ routing }, deadlineMs) => routing.decide({ tenant_id: 't', task: { type: 'x' } }, { deadlineMs })],
]
const order = { type: 't', queue: 'q', payload: null }

describe.each(polls)('a polled %s', (_, call) => {
  it('has one deadline for all of it', async () => {
    const { client, asked, clock } = taking([1_500, ticket], [300, json(pending)], [500, json(pending)])
    expect(await call(client, 2_000)).toMatchObject({ status: 'queued', operationId: 'one' })
    expect(clock.ms).toBeLessThanOrEqual(2_300)
    expect(Number(asked[1]?.searchParams.get('wait'))).toBeLessThanOrEqual(0.25)
  })

  it('that took all of its time to be queued is not waited for', async () => {
    const { client, asked } = taking([2_000, ticket])
    expect(await call(client, 2_000)).toMatchObject({ operationId: 'one' })
    expect(asked).toHaveLength(1)
  })

  it('keeps its ticket when no server answers', async () => {
    const { client } = taking([0, ticket], null)
    expect(await call(client, 100)).toMatchObject({ operationId: 'one' })
  })

  it('keeps its ticket when waiting is refused', async () => {
    const { client } = taking([0, ticket], [0, () => new Response('<html>', { status: 404 })])
    expect(await call(client, 2_000)).toMatchObject({ operationId: 'one' })
  })
})

it('a push with a lane that is not finished in time keeps its tickets', async () => {
  const { client } = taking([0, ticket], [1_000, json({ ...finished, id: 'one' })], [999, json(pending)])
  expect(await client.push('q', [1, 2], { deadlineMs: 2_000 })).toMatchObject({ status: 'queued', operationId: 'one' })
})

it('waiting ends at its limit without an answer', async () => {
  const { client } = taking(null)
  const began = performance.now()
  await expect(client.operations.wait('x', { timeoutMs: 50 })).rejects.toMatchObject({ code: 'unreachable' })
  expect(performance.now() - began).toBeLessThan(5_000)
})

it('a server that holds nothing back is not asked in a hot loop', async () => {
  const { client, asked, clock } = taking([1, json(pending)])
  expect(await client.operations.wait('x', { timeoutMs: 10_000 })).toEqual(pending)
  expect(asked.length).toBeLessThan(30)
  expect(clock.pauses.slice(0, 5)).toEqual([150, 250, 450, 550, 550])
})

it.each([Number.NaN, -1])('a time of %d is none to wait for', async (timeoutMs) => {
  const { client, asked } = taking([0, json(finished)])
  await expect(client.operations.wait('x', { timeoutMs })).rejects.toThrow(TypeError)
  expect(asked).toEqual([])
})

it('an id cannot leave its path', async () => {
  const { operations, asked } = answering(json(finished))
  await operations.get('../../admin')
  expect(asked[0]).toBe('http://spillway.test/prefix/api/v1/operations/..%2F..%2Fadmin')
})
