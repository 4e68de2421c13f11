import { routingLimits } from '@spillway/protocol/wire'
import { describe, expect, it } from 'vitest'
import { checkPolicy } from './policies.js'

const provider = { provider_id: 'a', expected_latency_ms: 10, expected_cost: 0.1 }
const given = { policy_id: 'p', providers: [provider] }
const faults = (value: unknown) => {
  const checked = checkPolicy(value)
  return checked.ok ? [] : checked.errors.map(({ path }) => path)
}

describe('a policy', () => {
  it('gets its defaults', () => {
    expect(checkPolicy(given)).toEqual({
      ok: true,
      policy: {
        policy_id: 'p',
        strategy: 'weighted',
        providers: [{ ...provider, weight: 1, priority: 50, enabled: true }],
        score: { latency_weight: 0.5, cost_weight: 0.5 },
      },
    })
  })

  it('keeps its values, and is the same when it is checked again', () => {
    const full = {
      ...{ policy_id: 'p', tenant_id: 't', description: 'd', strategy: 'best_score' },
      providers: [
        { ...provider, weight: 2.5, priority: 0, enabled: false, task_types: ['chat.*', 'embed'] },
        { ...provider, provider_id: 'b', weight: 0, priority: 100, enabled: true },
      ],
      ...{ sticky: { by: 'metadata.user id' }, fallback: ['b', 'a'], score: { latency_weight: 1, cost_weight: 0 } },
    }
    const checked = checkPolicy(full)
    expect(checked).toEqual({ ok: true, policy: full })
    expect(checkPolicy(checked.ok && checked.policy)).toEqual(checked)
  })

  it('may consist of fallbacks alone', () => {
    expect(faults({ ...given, providers: [{ ...provider, weight: 0 }], fallback: ['a'] })).toEqual([])
  })

  it.each([
    ['no providers', { ...given, providers: [] }, ['/providers']],
    [
      'too many providers',
      { ...given, providers: Array.from({ length: 101 }, (_, n) => ({ ...provider, provider_id: `${n}` })) },
      ['/providers'],
    ],
    ['an unknown member', { ...given, weights: {} }, ['/weights']],
    ['no id', { providers: [provider] }, ['/policy_id']],
    ['a blank tenant', { ...given, tenant_id: ' ' }, ['/tenant_id']],
    ['an unknown strategy', { ...given, strategy: 'random' }, ['/strategy']],
    ['a weight below 0', { ...given, providers: [{ ...provider, weight: -1 }] }, ['/providers/0/weight']],
    ['a weight above a million', { ...given, providers: [{ ...provider, weight: 1e6 + 1 }] }, ['/providers/0/weight']],
    ['a priority above 100', { ...given, providers: [{ ...provider, priority: 101 }] }, ['/providers/0/priority']],
    [
      'a negative latency',
      { ...given, providers: [{ ...provider, expected_latency_ms: -1 }] },
      ['/providers/0/expected_latency_ms'],
    ],
    ['a sticky key of its own invention', { ...given, sticky: { by: 'user' } }, ['/sticky/by']],
    ['a sticky key without a name', { ...given, sticky: { by: 'metadata.' } }, ['/sticky/by']],
    ['two providers of one id', { ...given, providers: [provider, provider] }, ['/providers/1/provider_id']],
    ['a fallback that names nobody', { ...given, fallback: ['b'] }, ['/fallback/0']],
    ['one fallback twice', { ...given, fallback: ['a', 'a'] }, ['/fallback/1']],
    ['nobody to choose', { ...given, providers: [{ ...provider, weight: 0 }] }, ['/providers']],
    [
      'a star within a task type',
      { ...given, providers: [{ ...provider, task_types: ['ok.*', 'a*b'] }] },
      ['/providers/0/task_types/1'],
    ],
  ])('is refused with %s', (_, value, paths) => {
    expect(faults(value)).toEqual(paths)
  })

  it('is refused when it is too large', () => {
    const types = Array.from({ length: 100 }, (_, n) => `${n}`.padStart(255, 'x'))
    const providers = ['a', 'b', 'c'].map((provider_id) => ({ ...provider, provider_id, task_types: types }))
    expect(faults({ ...given, providers })).toEqual([''])
    expect(faults({ ...given, providers: providers.slice(1) })).toEqual([])
    expect(routingLimits.policyBytes).toBe(65_536)
  })
})
