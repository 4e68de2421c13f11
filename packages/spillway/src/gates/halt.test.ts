import { describe, expect, it } from 'vitest'
import { bindingFor, emptyPulse, who } from '../../test/pipeline-gate-binding.js'
import { halt } from './halt.js'

const halted = (scope: string) => ({ ...emptyPulse, halts: [{ scope, reason: 'drill' }] })

describe('halt', () => {
  it('asks the accepting transaction about its scope', () => {
    expect(halt().bind(bindingFor()).exact?.(who, {})).toEqual({ halt: 'system' })
    expect(halt({ scope: 'petitions' }).bind(bindingFor()).exact?.(who, {})).toEqual({ halt: 'petitions' })
  })

  it('passes early until it knows of a halt, and again once the halt is gone', () => {
    const bound = halt().bind(bindingFor())
    expect(bound.early?.(who)).toBeNull()
    bound.observe?.(halted('system'))
    expect(bound.early?.(who)).toMatchObject({ code: 'halted', retryAfterMs: 3_600_000, gate: 'halt' })
    bound.observe?.(emptyPulse)
    expect(bound.early?.(who)).toBeNull()
  })

  it('does not mind the halt of another scope', () => {
    const bound = halt({ scope: 'petitions' }).bind(bindingFor())
    bound.observe?.(halted('messages'))
    expect(bound.early?.(who)).toBeNull()
  })

  it('refuses early after the store did, in the words of its owner', () => {
    const bound = halt({ retryAfterSeconds: 10, problem: { type: 'urn:halted' } }).bind(bindingFor())
    expect(bound.refused?.(who, null)).toMatchObject({ code: 'halted', type: 'urn:halted', retryAfterMs: 10_000 })
    expect(bound.early?.(who)).not.toBeNull()
  })

  it('keeps apart what each definition knows', () => {
    const gate = halt()
    const one = gate.bind(bindingFor())
    const other = gate.bind(bindingFor())
    one.refused?.(who, null)
    expect(other.early?.(who)).toBeNull()
  })
})
