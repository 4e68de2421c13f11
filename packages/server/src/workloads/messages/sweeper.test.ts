import type { Intake } from 'spillway/workload'
import { describe, expect, it } from 'vitest'
import { messageSweep } from './sweeper.js'

const step = (of: { removed?: number; last?: string }) => ({ removed: 0, given_up: 0, traces: 0, last: null, ...of })

function sweeping(steps: ReturnType<typeof step>[], isNeeded = true) {
  const asked: unknown[] = []
  const query = async (_: string, [, after]: readonly unknown[] = []) => {
    asked.push(after)
    return { rows: [steps.shift() ?? step({})] }
  }
  const intake = {
    read: async () => ({ rows: [{ needed: isNeeded }] }),
    transaction: async (work: (tx: { query: typeof query }) => unknown) => work({ query }),
  }
  return { asked, batch: messageSweep(intake as unknown as Intake, '"spillway"', 10) }
}

describe('the sweep of messages', () => {
  it('goes from the first partition to the last, and begins again', async () => {
    const { asked, batch } = sweeping([step({ last: 'p1' }), step({ last: 'p2' }), step({}), step({})])
    const going: (boolean | undefined)[] = []
    for (let n = 0; n < 4; n++) going.push((await batch()).goesOn)
    expect(asked).toEqual([null, 'p1', 'p2', null])
    expect(going).toEqual([true, true, false, false])
  })

  it('stays where it took all that it may', async () => {
    const { asked, batch } = sweeping([step({ last: 'p1' }), step({ removed: 10, last: 'p2' }), step({ removed: 3 })])
    expect(await batch()).toMatchObject({ isFull: false, goesOn: true })
    expect(await batch()).toMatchObject({ isFull: true, goesOn: true, removed: { mq_messages: 10 } })
    expect(await batch()).toMatchObject({ isFull: false, goesOn: false, removed: { mq_messages: 3 } })
    expect(asked).toEqual([null, 'p1', 'p1'])
  })

  it('does not touch queues that keep everything', async () => {
    const { asked, batch } = sweeping([], false)
    expect(await batch()).toEqual({ removed: {}, isFull: false })
    expect(asked).toEqual([])
  })
})
