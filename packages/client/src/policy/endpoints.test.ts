import { describe, expect, it } from 'vitest'
import { Endpoints } from './endpoints.js'

function endpoints(...bases: string[]) {
  const time = { ms: 0 }
  return { time, endpoints: new Endpoints(bases, { now: () => time.ms, random: () => 0 }) }
}

describe('endpoints', () => {
  it('are taken in their order', () => {
    const { endpoints: own } = endpoints('a', 'b')
    expect([own.pick(true).base, own.pick(true).base]).toEqual(['a', 'a'])
  })

  it('that failed are left out, for a time that doubles with each failed trial', () => {
    const { endpoints: own, time } = endpoints('a', 'b')
    own.failed(own.pick(true))
    expect(own.pick(true).base).toBe('b')
    time.ms = 1_000
    const trial = own.pick(true)
    expect(trial.base).toBe('a')
    own.failed(trial)
    time.ms = 2_999
    expect(own.pick(true).base).toBe('b')
    time.ms = 3_000
    expect(own.pick(true).base).toBe('a')
  })

  it('that are out are tried by one request at a time, and never by one that must not fail', () => {
    const { endpoints: own, time } = endpoints('a', 'b')
    own.failed(own.pick(true))
    time.ms = 1_000
    expect(own.pick(false).base).toBe('b')
    const trial = own.pick(true)
    expect([trial.base, own.pick(true).base]).toEqual(['a', 'b'])
    own.left(trial)
    expect(own.pick(true).base).toBe('a')
  })

  it('are back with their first answer', () => {
    const { endpoints: own, time } = endpoints('a', 'b')
    own.failed(own.pick(true))
    time.ms = 1_000
    own.answered(own.pick(true))
    expect([own.pick(false).base, own.pick(false).base]).toEqual(['a', 'a'])
  })

  it('are asked even when all are out, the one that is due first', () => {
    const { endpoints: own, time } = endpoints('a', 'b')
    own.failed(own.pick(true))
    time.ms = 500
    own.failed(own.pick(true))
    expect(own.pick(false).base).toBe('a')
  })

  it('are out once for all requests that fail with them', () => {
    const { endpoints: own, time } = endpoints('a', 'b')
    const sent = [own.pick(true), own.pick(true), own.pick(true)]
    for (const endpoint of sent) own.failed(endpoint)
    time.ms = 1_000
    expect(own.pick(true).base).toBe('a')
  })
})
