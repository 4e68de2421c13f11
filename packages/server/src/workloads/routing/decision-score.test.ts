import type { Policy, PolicyProvider } from '@spillway/protocol/wire'
import fc from 'fast-check'
import { describe, expect, it } from 'vitest'
import { bestScored, drawn, markOf, type PreparedProvider, preparedProviders, winner } from './decision-score.js'

const provider = (id: string, changes: Partial<PolicyProvider> = {}): PolicyProvider => ({
  ...{ provider_id: id, weight: 1, priority: 50, expected_latency_ms: 100, expected_cost: 1, enabled: true },
  ...changes,
})
const prepared = (providers: PolicyProvider[], score = { latency_weight: 0.5, cost_weight: 0.5 }) =>
  preparedProviders({ policy_id: 'p', strategy: 'weighted', providers, score } satisfies Policy)
const scores = (...given: Parameters<typeof prepared>) => prepared(...given).map(({ score }) => score)
const idOf = (found: PreparedProvider | null) => found?.id
const keys = (count: number) => Array.from({ length: count }, (_, n) => markOf(`key ${n}`))

describe('a draw', () => {
  it('is the same in every version: keys keep their providers over an upgrade', () => {
    expect(drawn(markOf('user-1'), markOf('openai'))).toBe(0.8159717518818017)
  })

  it('is above 0 and below 1, whatever is hashed', () => {
    const bits = fc.oneof(fc.constantFrom(0, 1, 0xffffffff, 0x80000000), fc.nat(0xffffffff))
    const mark = fc.record({ high: bits, low: bits })
    fc.assert(
      fc.property(mark, mark, (key, own) => {
        const u = drawn(key, own)
        expect(u).toBeGreaterThan(0)
        expect(u).toBeLessThan(1)
      }),
    )
  })
})

describe('the winner of a key', () => {
  it('is each provider by the share of its weight', () => {
    const providers = prepared([provider('a', { weight: 6 }), provider('b', { weight: 3 }), provider('c')])
    const counts = new Map<string, number>()
    for (const key of keys(20_000)) {
      const id = idOf(winner(key, providers)) ?? ''
      counts.set(id, (counts.get(id) ?? 0) + 1)
    }
    // Keys and ids are fixed, so this cannot fail by chance; the bounds are four standard deviations.
    expect(Math.abs((counts.get('a') ?? 0) - 12_000)).toBeLessThan(280)
    expect(Math.abs((counts.get('b') ?? 0) - 6_000)).toBeLessThan(260)
    expect(Math.abs((counts.get('c') ?? 0) - 2_000)).toBeLessThan(170)
  })

  it('stays for all keys except those of a removed provider', () => {
    const providers = prepared(['a', 'b', 'c', 'd'].map((id, i) => provider(id, { weight: i + 1 })))
    const left = providers.filter(({ id }) => id !== 'b')
    const before = keys(2_000).map((key) => ({ key, id: idOf(winner(key, providers)) }))
    const moved = before.filter(({ key, id }) => idOf(winner(key, left)) !== id)
    expect(moved.length).toBeGreaterThan(0)
    expect(moved).toEqual(before.filter(({ id }) => id === 'b'))
  })

  it('does not depend on the order in which the providers are named', () => {
    const providers = prepared(['a', 'b', 'c'].map((id) => provider(id)))
    const turned = [...providers].reverse()
    for (const key of keys(200)) expect(winner(key, turned)).toBe(winner(key, providers))
  })

  it('is null without a caller', () => {
    expect(winner(markOf('k'), [])).toBeNull()
  })
})

describe('a score', () => {
  it('weighs latency and cost against the largest of the policy', () => {
    const providers = [
      provider('fast', { expected_latency_ms: 100, expected_cost: 4 }),
      provider('cheap', { expected_latency_ms: 400, expected_cost: 1 }),
    ]
    expect(scores(providers)).toEqual([1 - (0.25 + 1) / 2, 1 - (1 + 0.25) / 2])
    expect(scores(providers, { latency_weight: 3, cost_weight: 1 })).toEqual([1 - (0.75 + 1) / 4, 1 - (3 + 0.25) / 4])
    expect(scores(providers, { latency_weight: 0, cost_weight: 2 })).toEqual([0, 0.75])
  })

  it('is between 0 and 1, whatever the numbers are', () => {
    const amount = fc.double({ min: 0, noNaN: true, noDefaultInfinity: true })
    const one = fc.record({ latency: amount, cost: amount })
    const weights = fc.record({ latency_weight: amount, cost_weight: amount })
    fc.assert(
      fc.property(fc.array(one, { minLength: 1, maxLength: 5 }), weights, (given, score) => {
        const providers = given.map(({ latency, cost }, i) =>
          provider(`${i}`, { expected_latency_ms: latency, expected_cost: cost }),
        )
        for (const found of scores(providers, score)) {
          expect(found).toBeGreaterThanOrEqual(0)
          expect(found).toBeLessThanOrEqual(1)
        }
      }),
    )
  })

  it('is highest for the best; of equal ones the lower priority wins, then the id', () => {
    const best = (...providers: PolicyProvider[]) => idOf(bestScored(prepared(providers)))
    expect(best(provider('slow', { expected_latency_ms: 200 }), provider('z'))).toBe('z')
    expect(best(provider('a'), provider('b', { priority: 10 }))).toBe('b')
    expect(best(provider('b'), provider('a'))).toBe('a')
  })
})

describe('the task types of a provider', () => {
  const takes = (types: string[] | undefined, type: string) =>
    prepared([provider('a', types && { task_types: types })])[0]?.takes(type)

  it.each([
    [undefined, 'anything', true],
    [['chat'], 'chat', true],
    [['chat'], 'chat.short', false],
    [['chat.*'], 'chat.short', true],
    [['chat.*'], 'chat', false],
    [['embed', 'chat.*'], 'embed', true],
    [['*'], 'anything', true],
    [['Chat'], 'chat', false],
  ])('%j and %s: %s', (types, type, expected) => {
    expect(takes(types, type)).toBe(expected)
  })
})
