import type { OperationView } from '@spillway/protocol/wire'
import { describe, expect, it } from 'vitest'
import { createClient } from '../index.js'

/** A server that gives the answers in turn; the last one again and again. */
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

  it('answers what is known when the time is up', async () => {
    const { operations } = answering(json(pending))
    expect(await operations.wait('x', { timeoutMs: 0 })).toEqual(pending)
  })

  it('answers what is known when a refusal lasts longer', async () => {
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

it('an id cannot leave its path', async () => {
  const { operations, asked } = answering(json(finished))
  await operations.get('../../admin')
  expect(asked[0]).toBe('http://spillway.test/prefix/api/v1/operations/..%2F..%2Fadmin')
})
