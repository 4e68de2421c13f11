import { describe, expect, it } from 'vitest'
import { createMetrics } from '../../prometheus/metrics.js'
import { createGenerationMetrics, poolStateOf } from './metrics.js'

function generation() {
  const base = createMetrics({ runtime: false })
  return { metrics: createGenerationMetrics(base.registry), lines: async () => (await base.scrape()).split('\n') }
}

describe('createGenerationMetrics', () => {
  it.each([
    'sse_active_connections 0',
    'sse_pool_state 0',
    'sse_queue_depth 0',
    'sse_failovers_total{reason="user_limit"} 0',
    'sse_failovers_total{reason="pool_full"} 0',
    'sse_failovers_total{reason="no_slot"} 0',
    'sse_failovers_total{reason="upstream_retry"} 0',
    'sse_chunks_streamed_total 0',
    'sse_first_token_seconds_count 0',
    'sse_resumes_total 0',
    'sse_slow_reader_closed_total 0',
    'generation_ended_total{end="done"} 0',
    'generation_ended_total{end="error"} 0',
    'generation_ended_total{end="cancelled"} 0',
  ])('shows %s before the first stream', async (line) => {
    expect(await generation().lines()).toContain(line)
  })

  it('counts failovers by their reason', async () => {
    const { metrics, lines } = generation()
    metrics.failedOver('pool_full')
    metrics.failedOver('pool_full')
    expect(await lines()).toEqual(
      expect.arrayContaining([
        'sse_failovers_total{reason="pool_full"} 2',
        'sse_failovers_total{reason="user_limit"} 0',
      ]),
    )
  })

  it('counts ends by how they came', async () => {
    const { metrics, lines } = generation()
    metrics.ended('cancelled')
    expect(await lines()).toEqual(
      expect.arrayContaining(['generation_ended_total{end="cancelled"} 1', 'generation_ended_total{end="done"} 0']),
    )
  })

  it('puts the first token into its bucket', async () => {
    const { metrics, lines } = generation()
    metrics.firstToken.observe(0.2)
    expect(await lines()).toEqual(
      expect.arrayContaining([
        'sse_first_token_seconds_bucket{le="0.1"} 0',
        'sse_first_token_seconds_bucket{le="0.25"} 1',
        'sse_first_token_seconds_sum 0.2',
      ]),
    )
  })
})

describe('poolStateOf', () => {
  it.each([
    [0, 0],
    [69, 0],
    [70, 1],
    [89, 1],
    [90, 2],
    [99, 2],
    [100, 3],
    [101, 3],
  ])('%i of 100 places are state %i', (held, state) => {
    expect(poolStateOf(held, 100)).toBe(state)
  })

  it('is exhausted, not healthy, when the one place of a small pool is taken', () => {
    expect(poolStateOf(1, 1)).toBe(3)
  })
})
