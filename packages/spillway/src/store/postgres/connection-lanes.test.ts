import { afterEach, beforeEach, describe, expect, test, vi } from 'vitest'
import { ConnectionLanes } from './pools.js'

beforeEach(() => void vi.useFakeTimers())
afterEach(() => void vi.useRealTimers())

const lanesOf = (total: number) =>
  new ConnectionLanes(() => total, {
    settle: { least: 1, most: 2, waitMs: 100 },
    accept: { least: 1, most: 3, waitMs: 100 },
    handlers: { least: 1, waitMs: 1_000 },
  })

describe('ConnectionLanes', () => {
  test('a lane uses what is free beyond the minimums of the others', () => {
    const lanes = lanesOf(6)
    for (let i = 0; i < 4; i++) expect(lanes.enter('handlers')).toBeNull()
    lanes.enter('handlers')?.catch(() => undefined)
    expect([lanes.used('handlers'), lanes.waiting('handlers')]).toEqual([4, 1])
    expect(lanes.enter('settle')).toBeNull()
    expect(lanes.enter('accept')).toBeNull()
    lanes.enter('accept')?.catch(() => undefined)
    expect([lanes.used('accept'), lanes.waiting('accept')]).toEqual([1, 1])
    lanes.close()
  })

  test('a lane keeps to its own maximum', () => {
    const lanes = lanesOf(10)
    expect([lanes.enter('settle'), lanes.enter('settle')]).toEqual([null, null])
    lanes.enter('settle')?.catch(() => undefined)
    expect(lanes.waiting('settle')).toBe(1)
    lanes.close()
  })

  test('the longest waiting one is next, of those that may start', async () => {
    const lanes = lanesOf(3)
    for (const name of ['settle', 'accept', 'handlers'] as const) expect(lanes.enter(name)).toBeNull()
    const started: string[] = []
    const waits = (['handlers', 'accept', 'settle', 'accept'] as const).map((name) =>
      lanes.enter(name)?.then(() => started.push(name)),
    )
    // Its own minimum is free again; the handlers that wait longer may not use it.
    lanes.leave('accept')
    await vi.advanceTimersByTimeAsync(0)
    expect(started).toEqual(['accept'])
    lanes.leave('handlers')
    lanes.leave('settle')
    lanes.leave('accept')
    await Promise.all(waits)
    expect(started).toEqual(['accept', 'handlers', 'settle', 'accept'])
  })

  test('a wait ends with a fault when its time is over', async () => {
    const lanes = lanesOf(3)
    expect(lanes.enter('accept')).toBeNull()
    const late = expect(lanes.enter('accept')).rejects.toMatchObject({ code: 'unavailable' })
    await vi.advanceTimersByTimeAsync(100)
    await late
    expect(lanes.waiting('accept')).toBe(0)
    lanes.leave('accept')
    expect(lanes.enter('accept')).toBeNull()
  })
})
