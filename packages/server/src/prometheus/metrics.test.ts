import { describe, expect, it } from 'vitest'
import { createMetrics } from './metrics.js'

const bare = () => createMetrics({ runtime: false })
const linesOf = async (metrics: ReturnType<typeof bare>) => (await metrics.scrape()).split('\n')

describe('createMetrics', () => {
  it('counts by label set', async () => {
    const metrics = bare()
    metrics.admissions.labels('/orders', 'execute', 'none').inc()
    metrics.admissions.labels('/orders', 'execute', 'none').inc(2)
    metrics.admissions.labels('/orders', 'refuse', 'rate').inc()
    const lines = await linesOf(metrics)
    expect(lines).toContain('spillway_admissions_total{route="/orders",verdict="execute",reason="none"} 3')
    expect(lines).toContain('spillway_admissions_total{route="/orders",verdict="refuse",reason="rate"} 1')
  })

  it('gives the same child for the same labels', () => {
    const metrics = bare()
    expect(metrics.attempt('a', 'failed')).toBe(metrics.operationAttempts.labels('a', 'failed'))
    expect(metrics.attempt('a', 'failed')).not.toBe(metrics.attempt('a', 'retried'))
  })

  it('makes cumulative buckets with sum and count; a bound belongs to its bucket', async () => {
    const metrics = bare()
    for (const size of [1, 2, 2, 5_000]) metrics.flushBatchSize.observe(size)
    const lines = await linesOf(metrics)
    expect(lines).toContain('spillway_flush_batch_size_bucket{le="1"} 1')
    expect(lines).toContain('spillway_flush_batch_size_bucket{le="2"} 3')
    expect(lines).toContain('spillway_flush_batch_size_bucket{le="1024"} 3')
    expect(lines).toContain('spillway_flush_batch_size_bucket{le="+Inf"} 4')
    expect(lines).toContain('spillway_flush_batch_size_sum 5005')
    expect(lines).toContain('spillway_flush_batch_size_count 4')
  })

  it('bounds its label sets and counts the rest as other', async () => {
    const metrics = bare()
    for (let index = 0; index < 700; index++) metrics.admissions.labels(`/r${index}`, 'execute', 'none').inc()
    const series = (await linesOf(metrics)).filter((line) => line.startsWith('spillway_admissions_total{'))
    expect(series).toHaveLength(501)
    expect(series).toContain('spillway_admissions_total{route="other",verdict="other",reason="other"} 200')
  })

  it('replaces the sampled gauges', async () => {
    const metrics = bare()
    metrics.setOperations([
      { type: 'a', status: 'pending', count: 3 },
      { type: 'b', status: 'pending', count: 1 },
    ])
    metrics.setOperations([{ type: 'a', status: 'pending', count: 2 }])
    metrics.setStorePool({ busy: 1, idle: 2, waiting: 3, max: 10 })
    metrics.deadLetters.set(4)
    const lines = await linesOf(metrics)
    expect(lines.filter((line) => line.startsWith('spillway_operations{'))).toEqual([
      'spillway_operations{type="a",status="pending"} 2',
    ])
    expect(lines).toContain('spillway_store_pool{state="waiting"} 3')
    expect(lines).toContain('spillway_dead_letters 4')
  })

  it('escapes label values', async () => {
    const metrics = bare()
    metrics.httpRequests.labels('/a"b\\c\n', 'GET', '200').inc()
    expect(await metrics.scrape()).toContain('route="/a\\"b\\\\c\\n"')
  })

  it('has every core metric and those of the runtime, with names that promtool accepts', async () => {
    const metrics = createMetrics()
    metrics.readBuffers({ held: () => 0 })
    const types = new Map<string, string>()
    for (const line of await linesOf(metrics)) {
      const [, name, type] = /^# TYPE (\S+) (\S+)$/u.exec(line) ?? []
      if (name !== undefined && type !== undefined) {
        expect(types.has(name), name).toBe(false)
        types.set(name, type)
      }
    }
    for (const name of [
      'admissions_total',
      'admission_duration_seconds',
      'operations',
      'operation_wait_seconds',
      'operation_run_seconds',
      'operation_attempts_total',
      'dead_letters',
      'flush_batch_size',
      'flush_duration_seconds',
      'store_pool',
      'lane_oldest_seconds',
      'buffer_bytes',
      'buffer_refusals_total',
      'unread_answers_closed_total',
    ]) {
      expect([...types.keys()]).toContain(`spillway_${name}`)
    }
    expect(types.has('process_cpu_seconds_total')).toBe(true)
    expect(types.has('nodejs_eventloop_lag_seconds')).toBe(true)
    for (const [name, type] of types) expect(name.endsWith('_total'), name).toBe(type === 'counter')
  })

  it('shares nothing between two registries', async () => {
    const [first, second] = [bare(), bare()]
    first.httpRequests.labels('/', 'GET', '200').inc()
    expect(await second.scrape()).not.toContain('spillway_http_requests_total{')
  })
})
