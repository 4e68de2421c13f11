import { describe, expect, it } from 'vitest'
import { Turns } from './turns.js'

function turnsOf(limitMs: number) {
  let now = 0
  let end: (() => void) | undefined
  const turns = new Turns(
    limitMs,
    () => now,
    (atEnd) => {
      end = atEnd
    },
  )
  /** A turn with requests at its beginning and its end. */
  const turn = (ms: number): boolean => {
    turns.note()
    now += ms
    turns.note()
    end?.()
    return turns.isLate
  }
  return { turns, turn }
}

describe('turns', () => {
  it('take one long turn for a hiccup and two for a backlog', () => {
    const { turn } = turnsOf(60)
    expect(turn(100)).toBe(false)
    expect(turn(10)).toBe(false)
    expect(turn(100)).toBe(false)
    expect(turn(61)).toBe(true)
  })

  it('are in time again after a turn of less than half the limit, not before', () => {
    const { turn } = turnsOf(60)
    turn(100)
    turn(100)
    expect(turn(40)).toBe(true)
    expect(turn(29)).toBe(false)
    expect(turn(100)).toBe(false)
  })

  it('at the limit are not long', () => {
    const { turn } = turnsOf(60)
    expect([turn(60), turn(60), turn(60)]).toEqual([false, false, false])
  })

  it('do not forget a backlog when nobody asks in between', () => {
    const { turns, turn } = turnsOf(60)
    turn(100)
    turn(100)
    expect(turns.isLate).toBe(true)
  })
})
