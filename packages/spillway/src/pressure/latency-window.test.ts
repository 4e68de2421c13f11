import { describe, expect, it } from 'vitest'
import { LatencyWindow } from './latency-window.js'

function windowOf(windowMs = 5_000) {
  let now = 0
  let drawn = 0
  const window = new LatencyWindow(
    windowMs,
    () => now,
    () => (drawn++ % 97) / 97,
  )
  return {
    window,
    wait: (ms: number) => {
      now += ms
    },
  }
}

describe('the latency window', () => {
  it('reports the percentiles of what ended', () => {
    const { window } = windowOf()
    for (let ms = 100; ms >= 1; ms--) window.add(ms)
    expect(window.percentiles()).toEqual({ p50: 50, p95: 95, p99: 99, count: 100 })
  })

  it('reports a single value', () => {
    const { window } = windowOf()
    window.add(7)
    expect(window.percentiles()).toMatchObject({ p50: 7, p95: 7, p99: 7 })
  })

  it('forgets what ended longer ago than the window', () => {
    const { window, wait } = windowOf()
    window.add(9_000)
    wait(3_000)
    window.add(10)
    expect(window.percentiles().p95).toBe(9_000)
    wait(2_000)
    expect(window.percentiles()).toMatchObject({ p95: 10, count: 1 })
    wait(5_000)
    expect(window.percentiles()).toEqual({ p50: 0, p95: 0, p99: 0, count: 0 })
  })

  it('is bounded, and its sample is even', () => {
    const { window } = windowOf()
    for (let i = 0; i < 100_000; i++) window.add(i % 1_000)
    const { p50, p95, count } = window.percentiles()
    expect(count).toBe(100_000)
    expect(Math.abs(p50 - 500)).toBeLessThan(100)
    expect(Math.abs(p95 - 950)).toBeLessThan(50)
  })
})
