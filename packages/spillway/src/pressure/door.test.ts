import { describe, expect, it } from 'vitest'
import { Door } from './door.js'

function doorOf() {
  let now = 0
  let later: (() => void)[] = []
  const looked: string[] = []
  const door = new Door(
    () => now,
    (go) => later.push(go),
  )
  return {
    door,
    looked,
    wait: (ms: number) => {
      now += ms
    },
    pass: (name: string, ms = 0.2) =>
      door.pass(() => {
        looked.push(`${name} after ${door.waitedMs.toFixed(1)}`)
        now += ms
      }),
    /** The end of a turn: calls the deferred callbacks, which may defer more to the next. */
    turn: (): number => {
      const due = later
      later = []
      for (const go of due) go()
      return due.length
    },
  }
}

describe('the door', () => {
  it('lets requests through at once while there is time', () => {
    const { pass, looked, turn } = doorOf()
    pass('a')
    pass('b')
    expect(looked).toEqual(['a after 0.0', 'b after 0.0'])
    turn()
    pass('c')
    expect(looked).toHaveLength(3)
  })

  it('has the rest of a long turn wait for the next ones, a slice each, in order', () => {
    const { pass, looked, turn } = doorOf()
    for (const name of ['a', 'b', 'c', 'd', 'e', 'f', 'g', 'h']) pass(name)
    expect(looked).toEqual(['a after 0.0', 'b after 0.0', 'c after 0.0'])
    turn()
    expect(looked).toHaveLength(3)
    turn()
    expect(looked.slice(3)).toEqual(['d after 0.0', 'e after 0.2', 'f after 0.4'])
    turn()
    expect(looked.slice(6)).toEqual(['g after 0.6', 'h after 0.8'])
  })

  it('forgets callers that left at once, and keeps the order of the others', () => {
    const { door, pass, looked, turn } = doorOf()
    pass('a', 1)
    const gone = new Set<string>()
    for (const name of ['b', 'c', 'd']) {
      door.pass(
        () => looked.push(name),
        () => gone.has(name),
      )
    }
    turn()
    gone.add('b').add('d')
    door.forgetGone()
    pass('e')
    turn()
    turn()
    expect(looked).toEqual(['a after 0.0', 'c', 'e after 0.0'])
  })

  it('lets no request overtake waiting ones', () => {
    const { pass, looked, turn } = doorOf()
    pass('a', 1)
    pass('b')
    turn()
    pass('c')
    expect(looked).toEqual(['a after 0.0'])
    turn()
    turn()
    expect(looked.map((one) => one[0])).toEqual(['a', 'b', 'c'])
  })

  it('looks at one in each turn however long reading from sockets took', () => {
    const { pass, looked, turn, wait } = doorOf()
    pass('a', 1)
    for (let i = 0; i < 4; i++) pass(`${i}`, 1)
    for (let i = 0; i < 4; i++) {
      turn()
      pass('x', 1)
      wait(5)
    }
    turn()
    expect(looked.map((one) => one[0])).toEqual(['a', '0', '1', '2', '3'])
  })

  it('is idle without requests', () => {
    const { pass, turn } = doorOf()
    for (let i = 0; i < 20; i++) pass('a')
    let turns = 0
    while (turn() > 0) turns++
    expect(turns).toBeGreaterThan(2)
    expect(turn()).toBe(0)
  })

  it('keeps the order of many, and drops the examined ones', () => {
    const { pass, looked, turn } = doorOf()
    for (let i = 0; i < 5_000; i++) pass(String(i), 0.1)
    for (let i = 0; i < 100; i++) {
      turn()
      pass('more', 0.1)
    }
    while (turn() > 0);
    const numbered = looked.map((one) => Number(one.split(' ')[0])).filter(Number.isFinite)
    expect(numbered).toEqual(Array.from({ length: 5_000 }, (_, i) => i))
  })
})
