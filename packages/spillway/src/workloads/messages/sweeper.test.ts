import { describe, expect, it } from 'vitest'
import { Sweeper, type SweepStore } from './sweeper.js'

type Step = Awaited<ReturnType<SweepStore['step']>>
const step = (changes: Partial<Step>): Step => ({ removed: 0, givenUp: 0, traces: 0, last: null, ...changes })

/** A sweeper whose time passes when the test says so. */
function clocked(steps: (Step | Error)[], options: { isReady?: boolean; isAlone?: boolean; stepMs?: number } = {}) {
  const { isReady = true, isAlone = true, stepMs = 0 } = options
  let now = 0
  let due: { ms: number; call: () => void } | null = null
  const asked: (string | null)[] = []
  const logged: { level: string; fields: Record<string, unknown> }[] = []
  const at = (level: string) => (fields: object) => {
    logged.push({ level, fields: { ...fields } })
  }
  const sweeper = new Sweeper({
    store: {
      alone: async (work) => (isAlone ? work() : null),
      step: async (_, after) => {
        asked.push(after)
        now += stepMs
        const next = steps.shift() ?? step({})
        if (next instanceof Error) throw next
        return next
      },
    },
    isReady: () => isReady,
    log: { debug: at('debug'), info: at('info'), warn: at('warn'), error: at('error') },
    everyMs: 100,
    most: 10,
    now: () => now,
    after: (ms, call) => {
      due = { ms, call }
      return () => {
        due = null
      }
    },
  })
  return {
    sweeper,
    asked,
    logged,
    due: () => due?.ms ?? null,
    /** Lets the time come, and waits until the next is set. */
    round: async () => {
      const { call } = due ?? { call: () => undefined }
      due = null
      call()
      for (let turns = 0; due === null && turns < 100; turns++) await Promise.resolve()
    },
  }
}

describe('the sweeper', () => {
  it('goes through the partitions to the last, and begins anew', async () => {
    const { sweeper, asked, round } = clocked([step({ last: 'p1' }), step({ last: 'p2' }), step({}), step({})])
    sweeper.start()
    await round()
    expect(asked).toEqual([null, 'p1', 'p2'])
    await round()
    expect(asked).toEqual([null, 'p1', 'p2', null])
  })

  it('stays where there may be more', async () => {
    const { sweeper, asked, round } = clocked([
      step({ last: 'p1' }),
      step({ removed: 10, last: 'p2' }),
      step({ last: 'p2' }),
    ])
    sweeper.start()
    await round()
    expect(asked).toEqual([null, 'p1', 'p1', 'p2'])
  })

  it('tells once what a round removed, and nothing when that is nothing', async () => {
    const { sweeper, logged, round } = clocked([step({ removed: 4, last: 'p' }), step({ givenUp: 2, traces: 1 })])
    sweeper.start()
    await round()
    expect(logged).toEqual([{ level: 'info', fields: { removed: 4, givenUp: 2, traces: 1 } }])
    await round()
    expect(logged).toHaveLength(1)
  })

  it('leaves it to another that is at it', async () => {
    const { sweeper, asked, round, due } = clocked([], { isAlone: false })
    sweeper.start()
    await round()
    expect(asked).toEqual([])
    expect(due()).toBe(100)
  })

  it('does not touch a store that is not there', async () => {
    const { sweeper, asked, round, due } = clocked([], { isReady: false })
    sweeper.start()
    await round()
    expect(asked).toEqual([])
    expect(due()).toBe(100)
  })

  it('goes on after a fault, from where it was', async () => {
    const { sweeper, asked, logged, round } = clocked([step({ last: 'p1' }), new Error('away'), step({})])
    sweeper.start()
    await round()
    expect(logged).toMatchObject([{ level: 'warn' }])
    await round()
    expect(asked).toEqual([null, 'p1', 'p1'])
  })

  it('rests nine times as long as it took', async () => {
    const { sweeper, round, due } = clocked([], { stepMs: 50 })
    sweeper.start()
    expect(due()).toBe(100)
    await round()
    expect(due()).toBe(450)
  })

  it('ends a round after twenty seconds, and goes on from there', async () => {
    const steps = Array.from({ length: 8 }, (_, n) => step({ last: `p${n}` }))
    const { sweeper, asked, round } = clocked(steps, { stepMs: 5_000 })
    sweeper.start()
    await round()
    expect(asked).toEqual([null, 'p0', 'p1', 'p2'])
    await round()
    expect(asked.slice(4)).toEqual(['p3', 'p4', 'p5', 'p6'])
  })

  it('stops, and sets no further time', async () => {
    const { sweeper, due } = clocked([])
    sweeper.start()
    await sweeper.stop()
    expect(due()).toBeNull()
  })
})
