import { afterEach, beforeEach, describe, expect, it, vi } from 'vitest'
import type { Ticket } from '../store/port.js'
import { Waiters } from './waiters.js'

const ticket = (id: string): Ticket => ({
  id,
  type: 't',
  queue: 'q',
  partition: 'Default',
  priority: 5,
  identity: 'ann',
  status: 'completed',
  createdAt: new Date(0),
  startedAt: null,
  finishedAt: new Date(0),
  attempts: 1,
  maxAttempts: 4,
  error: null,
  result: null,
  position: null,
  trace: '',
})

/** A store where the test finishes operations. */
function storeOf(done: Set<string>) {
  return vi.fn(async (ids: readonly string[]) => ids.filter((id) => done.has(id)).map(ticket))
}

describe('Waiters', () => {
  beforeEach(() => void vi.useFakeTimers())
  afterEach(() => void vi.useRealTimers())

  it('gives null when the time is up, and holds nothing any more', async () => {
    const waiters = new Waiters(storeOf(new Set()))
    const waiting = waiters.wait('a', 1_000)
    expect(waiters.size).toBe(1)
    await vi.advanceTimersByTimeAsync(999)
    expect(waiters.size).toBe(1)
    await vi.advanceTimersByTimeAsync(1)
    expect(await waiting).toBeNull()
    expect(waiters.size).toBe(0)
    await vi.advanceTimersByTimeAsync(1_000)
    expect(vi.getTimerCount()).toBe(0)
  })

  it('finds what another process finished, with one query for all', async () => {
    const done = new Set<string>()
    const finished = storeOf(done)
    const waiters = new Waiters(finished)
    const both = Promise.all([waiters.wait('a', 60_000), waiters.wait('a', 60_000), waiters.wait('b', 60_000)])
    await vi.advanceTimersByTimeAsync(60)
    expect(finished.mock.calls).toEqual([[['a', 'b']]])
    done.add('a').add('b')
    await vi.advanceTimersByTimeAsync(600)
    expect((await both).map((t) => t?.id)).toEqual(['a', 'a', 'b'])
  })

  it('asks more and more slowly, at least twice a second', async () => {
    const finished = storeOf(new Set())
    const waiters = new Waiters(finished)
    const waiting = waiters.wait('a', 60_000)
    await vi.advanceTimersByTimeAsync(10_000)
    const calls = finished.mock.calls.length
    expect(calls).toBeGreaterThan(20)
    expect(calls).toBeLessThan(30)
    await vi.advanceTimersByTimeAsync(50_000)
    await waiting
  })

  it('looks at once when it was settled here', async () => {
    const done = new Set<string>()
    const finished = storeOf(done)
    const waiters = new Waiters(finished)
    const waiting = waiters.wait('a', 60_000)
    await vi.advanceTimersByTimeAsync(5_000)
    const before = finished.mock.calls.length
    done.add('a')
    waiters.hint('someone else')
    await vi.advanceTimersByTimeAsync(1)
    expect(finished.mock.calls.length).toBe(before)
    waiters.hint('a')
    await vi.advanceTimersByTimeAsync(1)
    expect((await waiting)?.id).toBe('a')
  })

  it('ends with the caller', async () => {
    const waiters = new Waiters(storeOf(new Set()))
    const controller = new AbortController()
    const waiting = waiters.wait('a', 60_000, controller.signal)
    controller.abort()
    expect(await waiting).toBeNull()
    expect(await waiters.wait('a', 60_000, controller.signal)).toBeNull()
    expect(waiters.size).toBe(0)
  })

  it('does not end before its time because the store is away', async () => {
    const done = new Set<string>()
    let away = true
    const waiters = new Waiters(async (ids) => {
      if (away) throw new Error('away')
      return ids.filter((id) => done.has(id)).map(ticket)
    })
    const waiting = waiters.wait('a', 10_000)
    await vi.advanceTimersByTimeAsync(2_000)
    expect(waiters.size).toBe(1)
    away = false
    done.add('a')
    await vi.advanceTimersByTimeAsync(1_000)
    expect((await waiting)?.id).toBe('a')
  })

  it('lets everybody go when it closes', async () => {
    const waiters = new Waiters(storeOf(new Set()))
    const both = Promise.all([waiters.wait('a', 60_000), waiters.wait('b', 60_000)])
    waiters.close()
    expect(await both).toEqual([null, null])
    expect(vi.getTimerCount()).toBe(0)
  })
})
