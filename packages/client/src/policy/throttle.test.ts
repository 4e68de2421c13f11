import { describe, expect, it } from 'vitest'
import { Throttle } from './throttle.js'

function throttle() {
  const time = { ms: 0 }
  const chance = { value: 0.5 }
  return { time, chance, throttle: new Throttle({}, { now: () => time.ms, random: () => chance.value }) }
}

describe('the throttle', () => {
  it('lets everything through while half of it is accepted', () => {
    const { throttle: own, chance } = throttle()
    chance.value = 0
    for (let i = 0; i < 100; i++) {
      expect(own.lets()).toBe(true)
      if (i % 2 === 0) own.accepted()
    }
    expect(own.refusal).toBe(0)
  })

  it('holds back by the formula', () => {
    const { throttle: own, chance } = throttle()
    chance.value = 1
    for (let i = 0; i < 100; i++) own.lets()
    for (let i = 0; i < 10; i++) own.accepted()
    expect(own.refusal).toBeCloseTo((100 - 1 - 2 * 10) / 101)
    chance.value = 0.78
    expect(own.lets()).toBe(false)
    chance.value = 0.79
    expect(own.lets()).toBe(true)
  })

  it('does not take the first refusal for a sign, nor silence for a refusal', () => {
    const { throttle: own, chance } = throttle()
    chance.value = 0
    own.lets()
    expect(own.lets()).toBe(true)
    expect(own.refusal).toBeGreaterThan(0)
    own.unanswered()
    expect(own.refusal).toBe(0)
  })

  it('sends one after some time in any case', () => {
    const { throttle: own, chance, time } = throttle()
    chance.value = 0
    own.lets()
    own.lets()
    time.ms = 4_999
    expect(own.lets()).toBe(false)
    time.ms = 5_000
    expect([own.lets(), own.lets()]).toEqual([true, false])
  })

  it('counts withheld messages, and is never certain', () => {
    const { throttle: own, chance } = throttle()
    chance.value = 0
    own.lets()
    own.lets()
    for (let i = 0; i < 1_000; i++) expect(own.lets()).toBe(false)
    expect(own.refusal).toBeGreaterThan(0.99)
    expect(own.refusal).toBeLessThan(1)
  })

  it('forgets after its window', () => {
    const { throttle: own, time } = throttle()
    for (let i = 0; i < 100; i++) own.lets()
    time.ms = 109_000
    expect(own.refusal).toBeGreaterThan(0.9)
    time.ms = 120_000
    expect(own.refusal).toBe(0)
  })
})
