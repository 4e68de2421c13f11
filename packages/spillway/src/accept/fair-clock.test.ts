import { describe, expect, it } from 'vitest'
import { FairClock } from './fair-clock.js'

const item = (identity: string, priority = 5) => ({ identity, priority, stamp: 0, lead: 0 })

describe('FairClock', () => {
  it('stretches the stamps of an identity with many items, and no others', () => {
    const items = [item('ann'), item('ann'), item('ann'), item('bob')]
    new FairClock().stamp(items)
    expect(items.map((i) => i.stamp)).toEqual([0, 1_000, 2_000, 0])
    expect(items.map((i) => i.lead)).toEqual([0, 1_000, 2_000, 0])
  })

  it("continues from the identity's last stamp", () => {
    const clock = new FairClock()
    clock.learn(item('ann'), 5_000)
    const later = [item('ann'), item('ann'), item('bob')]
    clock.stamp(later)
    expect(later.map((i) => i.stamp)).toEqual([6_000, 7_000, 0])
  })

  it('is not set back by an older answer', () => {
    const clock = new FairClock()
    clock.learn(item('ann'), 5_000)
    clock.learn(item('ann'), 1_000)
    const later = [item('ann')]
    clock.stamp(later)
    expect(later[0]?.stamp).toBe(6_000)
  })

  it('counts each priority apart', () => {
    const clock = new FairClock()
    clock.learn(item('ann', 10), 900_000)
    const urgent = [item('ann', 1)]
    clock.stamp(urgent)
    expect(urgent[0]?.stamp).toBe(0)
  })

  it('remembers a bounded number of identities, the latest ones', () => {
    const clock = new FairClock()
    for (let i = 0; i < 20_000; i++) clock.learn(item(`id-${i}`), 1_000)
    clock.learn(item('id-0'), 2_000)
    clock.learn(item('one more'), 1_000)
    const items = [item('id-0'), item('id-1'), item('one more')]
    clock.stamp(items)
    expect(items.map((i) => i.stamp)).toEqual([3_000, 0, 2_000])
  })
})
