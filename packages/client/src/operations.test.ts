import type { OperationView } from '@spillway/protocol/wire'
import { describe, expect, it } from 'vitest'
import { createClient } from './index.js'

/** A server that gives the answers in turn; the last one again and again. */
function answering(...answers: (() => Response)[]) {
  const asked: { url: string; init: RequestInit }[] = []
  const client = createClient({
    baseUrl: 'http://spillway.test/prefix/',
    key: 'k',
    fetch: async (url, init) => {
      asked.push({ url: String(url), init: init ?? {} })
      const answer = answers[Math.min(asked.length, answers.length) - 1]
      if (answer === undefined) throw new TypeError('fetch failed')
      return answer()
    },
  })
  return { client, asked }
}

const json =
  (body: unknown, status = 200, headers: Record<string, string> = {}) =>
  () =>
    new Response(JSON.stringify(body), { status, headers })
const finished = { status: 'completed', processed_at: '2026-01-01T00:00:00.000Z' } as OperationView
const pending = { status: 'pending', processed_at: null } as OperationView
const overloaded = (retryAfter: string) =>
  json({ code: 'overloaded', title: 'Overloaded', detail: 'later' }, 503, { 'retry-after': retryAfter })

describe('requests', () => {
  it('go to the base URL with the key, the preferences and the idempotency key', async () => {
    const { client, asked } = answering(json({ status: 'executed', operationId: 'o', result: 1 }, 201))
    await client.operations.submit(
      { type: 't', queue: 'q', payload: 1 },
      { idempotencyKey: 'once', respondAsync: true, waitSeconds: 1.2 },
    )
    expect(asked[0]?.url).toBe('http://spillway.test/prefix/api/v1/operations')
    expect(asked[0]?.init.headers).toMatchObject({
      authorization: 'Bearer k',
      'idempotency-key': 'once',
      prefer: 'respond-async, wait=2',
    })
  })

  it('cannot leave their path by an id', async () => {
    const { client, asked } = answering(json(finished))
    await client.operations.get('../../admin')
    expect(asked[0]?.url).toBe('http://spillway.test/prefix/api/v1/operations/..%2F..%2Fadmin')
  })

  it('want a URL to go to', () => {
    expect(() => createClient({ baseUrl: 'localhost:7745' })).toThrow(TypeError)
  })
})

describe('faults', () => {
  it('have the code and the time to come back', async () => {
    const { client } = answering(overloaded('3'))
    await expect(client.operations.get('x')).rejects.toMatchObject({
      name: 'SpillwayError',
      code: 'overloaded',
      status: 503,
      retryAfterMs: 3_000,
      problem: { detail: 'later' },
      isTemporary: true,
    })
  })

  it('tell a stranger from a Spillway server', async () => {
    const { client } = answering(() => new Response('<html>', { status: 200 }))
    await expect(client.operations.get('x')).rejects.toMatchObject({ code: 'unexpected', status: 200 })
  })

  it('tell silence', async () => {
    const { client } = answering()
    await expect(client.operations.get('x')).rejects.toMatchObject({ code: 'unreachable', status: null })
  })
})

describe('wait', () => {
  it('asks again until it is finished, through refusals', async () => {
    const { client, asked } = answering(json(pending), overloaded('0'), json(finished))
    expect(await client.operations.wait('x', { timeoutMs: 5_000 })).toEqual(finished)
    expect(asked).toHaveLength(3)
    expect(asked[0]?.url).toMatch(/\?wait=[45]\.\d{3}$/)
  })

  it('answers what is known when the time is up', async () => {
    const { client } = answering(json(pending))
    expect(await client.operations.wait('x', { timeoutMs: 0 })).toEqual(pending)
  })

  it('does not sleep past its deadline', async () => {
    const { client, asked } = answering(overloaded('60'))
    await expect(client.operations.wait('x', { timeoutMs: 1_000 })).rejects.toMatchObject({ code: 'overloaded' })
    expect(asked).toHaveLength(1)
  })

  it('does not repeat what will not get better', async () => {
    const { client, asked } = answering(json({ code: 'not_found', title: 'Not Found', detail: 'no' }, 404))
    await expect(client.operations.wait('x')).rejects.toMatchObject({ code: 'not_found' })
    expect(asked).toHaveLength(1)
  })

  it('ends with its signal, also between two requests', async () => {
    const { client } = answering(overloaded('30'))
    const stop = new AbortController()
    const waiting = client.operations.wait('x', { signal: stop.signal })
    queueMicrotask(() => stop.abort(new Error('enough')))
    await expect(waiting).rejects.toThrow('enough')
  })
})
