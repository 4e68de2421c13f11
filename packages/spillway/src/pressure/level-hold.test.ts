import { describe, expect, it } from 'vitest'
import type { PressureLevel } from '../gates/gate.js'
import { LevelHold } from './level-hold.js'

const at = (level: PressureLevel) => ({ enter: level, stay: level })

describe('LevelHold', () => {
  it('enters a level at once, also past the one between', () => {
    const hold = new LevelHold(3_000)
    expect(hold.level).toBe('inactive')
    expect(hold.observe(at('active'), 0)).toBe('active')
    expect(hold.level).toBe('active')
  })

  it('leaves it only after the signals stayed low for the full hold time', () => {
    const hold = new LevelHold(3_000)
    hold.observe(at('active'), 0)
    expect(hold.observe(at('inactive'), 1_000)).toBe('active')
    expect(hold.observe(at('inactive'), 3_999)).toBe('active')
    expect(hold.observe(at('inactive'), 4_000)).toBe('inactive')
  })

  it('starts to count again when the signals rise again', () => {
    const hold = new LevelHold(3_000)
    hold.observe(at('active'), 0)
    hold.observe(at('inactive'), 1_000)
    hold.observe(at('active'), 2_000)
    expect(hold.observe(at('inactive'), 3_000)).toBe('active')
    expect(hold.observe(at('inactive'), 5_999)).toBe('active')
    expect(hold.observe(at('inactive'), 6_000)).toBe('inactive')
  })

  it('holds while the signals are between half of the bound and the bound', () => {
    const hold = new LevelHold(1_000)
    hold.observe(at('active'), 0)
    for (let now = 0; now < 10_000; now += 100) {
      expect(hold.observe({ enter: 'warning', stay: 'active' }, now)).toBe('active')
    }
  })

  it('goes straight to where the signals are', () => {
    const hold = new LevelHold(1_000)
    hold.observe(at('active'), 0)
    hold.observe(at('warning'), 100)
    expect(hold.observe(at('warning'), 1_100)).toBe('warning')
    hold.observe(at('inactive'), 1_200)
    expect(hold.observe(at('inactive'), 2_200)).toBe('inactive')
  })
})
