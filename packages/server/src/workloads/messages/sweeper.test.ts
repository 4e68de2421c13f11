import { describe, expect, it } from 'vitest'
import { messageSweep, type Step } from './sweeper.js'

const step = (of: Partial<Step>): Step => ({ removed: 0, givenUp: 0, traces: 0, last: null, ...of })

function sweeping(steps: Step[], isNeeded = true) {
  const asked: (string | null)[] = []
  const batch = messageSweep(
    {
      isNeeded: async () => isNeeded,
      step: async (_, after) => {
        asked.push(after)
        return steps.shift() ?? step({})
      },
    },
    10,
  )
  return { asked, batch }
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

  it('leaves those alone who keep everything', async () => {
    const { asked, batch } = sweeping([], false)
    expect(await batch()).toEqual({ removed: {}, isFull: false })
    expect(asked).toEqual([])
  })
})
