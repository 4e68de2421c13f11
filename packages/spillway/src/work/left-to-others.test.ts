import { describe, expect, it } from 'vitest'
import { LeaveOperation } from '../core/outcome.js'
import { Elsewhere } from './left-to-others.js'

function bench() {
  let nowMs = 0
  const by: Record<string, string> = {}
  const warned: object[] = []
  let isAway = false
  let asked = 0
  const elsewhere = new Elsewhere({
    store: {
      announced: async () => {
        asked++
        if (isAway) throw new Error('away')
        return { nowMs, by: { ...by } }
      },
    },
    log: { warn: (fields) => void warned.push(fields) },
    now: () => nowMs,
  })
  elsewhere.define('t', () => 'mine')
  const left = (key = 'k', wanted = 'theirs') =>
    new LeaveOperation('nobody may', { key, may: (announced) => announced === wanted })
  return {
    elsewhere,
    warned,
    asked: () => asked,
    away: (is: boolean) => {
      isAway = is
    },
    announce: (label: string, text: string) => {
      by[label] = text
    },
    retire: (label: string) => {
      delete by[label]
    },
    /** Lets time pass, with a heartbeat each second. */
    pass: async (seconds: number) => {
      for (let n = 0; n < seconds; n++) {
        nowMs += 1_000
        await elsewhere.observe().catch(() => undefined)
      }
    },
    jump: (seconds: number) => {
      nowMs += seconds * 1_000
    },
    place: (waitedMs = 3_600_000, of = left()) => elsewhere.place({ type: 't', waitedMs }, of),
  }
}
const parked = { kind: 'released', leave: { to: null, delayMs: expect.any(Number) } }
const failed = { kind: 'failed', error: 'nobody may' }

describe('Elsewhere', () => {
  it('leaves an operation to a process that announced that it may', async () => {
    const b = bench()
    b.announce('t a', 'other')
    b.announce('t b', 'theirs')
    b.announce('u b', 'theirs')
    expect(await b.place()).toEqual({ kind: 'released', leave: { to: 't b', delayMs: expect.any(Number) } })
    expect(b.warned).toHaveLength(0)
  })

  it('never leaves it to its own label, whatever was announced there', async () => {
    const b = bench()
    b.announce(b.elsewhere.labelOf('t'), 'theirs')
    expect(await b.place()).toEqual(parked)
  })

  it('fails it when none may for a minute, and says so once before', async () => {
    const b = bench()
    expect(await b.place()).toEqual(parked)
    await b.pass(59)
    expect(await b.place()).toEqual(parked)
    await b.pass(1)
    expect(await b.place()).toEqual(failed)
    expect(b.warned).toEqual([{ type: 't', needs: 'k', seconds: 60 }])
  })

  it('gives one that was accepted just now its minute', async () => {
    const b = bench()
    await b.place()
    await b.pass(100)
    expect(await b.place(59_000)).toEqual(parked)
    expect(await b.place(60_000)).toEqual(failed)
  })

  it('begins the minute again when somebody came and went', async () => {
    const b = bench()
    await b.place()
    await b.pass(50)
    b.announce('t b', 'theirs')
    await b.pass(1)
    b.retire('t b')
    await b.pass(30)
    expect(await b.place()).toEqual(parked)
    await b.pass(60)
    expect(await b.place()).toEqual(failed)
  })

  it('begins it again when it could not look: frozen, or the store away', async () => {
    const b = bench()
    await b.place()
    b.jump(70)
    expect(await b.place()).toEqual(parked)
    b.away(true)
    await b.pass(70)
    expect(await b.place()).toEqual(parked)
    b.away(false)
    expect(await b.place()).toEqual(parked)
    await b.pass(60)
    expect(await b.place()).toEqual(failed)
  })

  it('counts by key, and drops the oldest beyond a bound', async () => {
    const b = bench()
    const need = (key: string) =>
      b.place(3_600_000, new LeaveOperation('nobody may', { key, may: (text) => text === 'x' }))
    await need('first')
    for (let n = 0; n < 1_000; n++) {
      if (n === 500) await b.pass(1)
      await need(`${n}`)
    }
    await b.pass(60)
    expect(await need('999')).toEqual(failed)
    expect(await need('first')).toEqual(parked)
  })

  it('queries the store at most twice a second, and never without need', async () => {
    const b = bench()
    await b.pass(10)
    expect(b.asked()).toBe(0)
    await Promise.all(Array.from({ length: 100 }, () => b.place()))
    expect(b.asked()).toBe(1)
  })
})
