import { afterEach, beforeEach, describe, expect, it, vi } from 'vitest'
import { deadline } from './deadline.js'

beforeEach(() => {
  vi.useFakeTimers()
})
afterEach(() => {
  vi.useRealTimers()
})

describe('a deadline', () => {
  it('fires when its time is over, not before', () => {
    const { signal } = deadline(500, new AbortController().signal)
    vi.advanceTimersByTime(499)
    expect(signal.aborted).toBe(false)
    vi.advanceTimersByTime(1)
    expect(signal.aborted).toBe(true)
  })

  it('fires when the client leaves, or has left', () => {
    const gone = new AbortController()
    const { signal } = deadline(500, gone.signal)
    gone.abort()
    expect([signal.aborted, deadline(500, gone.signal).signal.aborted]).toEqual([true, true])
  })

  it('that is cleared leaves no timer and no listener', () => {
    const gone = new AbortController()
    const { signal, clear } = deadline(500, gone.signal)
    clear()
    expect(vi.getTimerCount()).toBe(0)
    gone.abort()
    expect(signal.aborted).toBe(false)
  })
})
