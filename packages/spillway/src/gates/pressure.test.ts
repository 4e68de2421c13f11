import { describe, expect, it } from 'vitest'
import { bindingFor, who } from '../../test/pipeline-gate-binding.js'
import type { PressureLevel } from './gate.js'
import { pressure } from './pressure.js'

describe('pressure', () => {
  it.each<[PressureLevel, 'warning' | 'active' | undefined, boolean]>([
    ['inactive', undefined, false],
    ['warning', undefined, false],
    ['active', undefined, true],
    ['inactive', 'warning', false],
    ['warning', 'warning', true],
    ['active', 'warning', true],
  ])('at %s with refuseAt %s: refuses %s', (level, refuseAt, refuses) => {
    const gate = pressure(refuseAt === undefined ? {} : { refuseAt })
    const refusal = gate.bind(bindingFor({ pressureLevel: () => level })).early?.(who)
    expect(refusal !== null).toBe(refuses)
  })

  it('opens again as soon as the level falls', () => {
    let level: PressureLevel = 'active'
    const bound = pressure({ retryAfterSeconds: 9 }).bind(bindingFor({ pressureLevel: () => level }))
    expect(bound.early?.(who)).toMatchObject({ code: 'overloaded', retryAfterMs: 9_000 })
    level = 'inactive'
    expect(bound.early?.(who)).toBeNull()
  })
})
