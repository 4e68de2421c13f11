import { describe, expect, it } from 'vitest'
import { Lateness } from './lateness.js'

function latenessOf() {
  const lateness = new Lateness()
  let now = 0
  /** One request per millisecond, for this long; returns how many of them were refused. */
  const during = (ms: number, isOver: (at: number) => boolean): number => {
    let refused = 0
    for (let at = 0; at < ms; at++) if (lateness.refuses(isOver(at), now++)) refused++
    return refused
  }
  return { during }
}

const over = (): boolean => true
const within = (): boolean => false

describe('lateness', () => {
  it('lets a burst pass', () => {
    const { during } = latenessOf()
    expect(during(100, over)).toBe(0)
    expect(during(1, within)).toBe(0)
    expect(during(100, over)).toBe(0)
  })

  it('refuses while the wait stays too long', () => {
    const { during } = latenessOf()
    expect(during(1_000, over)).toBe(900)
  })

  it('once strict refuses requests that waited too long, and no others', () => {
    const { during } = latenessOf()
    during(200, over)
    expect(during(400, (at) => at % 2 === 0)).toBe(200)
  })

  it('is calm again when no request has waited too long for half a second', () => {
    const { during } = latenessOf()
    during(200, over)
    during(500, within)
    expect(during(1, over)).toBe(1)
    during(502, within)
    expect(during(100, over)).toBe(0)
  })

  it('does not count a wait from before a pause', () => {
    const { during } = latenessOf()
    during(99, over)
    during(1, within)
    expect(during(99, over)).toBe(0)
  })
})
