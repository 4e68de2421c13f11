import { expect, test } from 'vitest'
import { DrainCount, type Drained, type DrainTask } from './drain-count.js'

const task = (more: Partial<DrainTask> = {}): DrainTask => ({
  url: '',
  stage: 'drain',
  count: 6,
  from: 0,
  lanes: 2,
  settings: {},
  stopAfter: 0,
  ...more,
})

async function drain(numbers: readonly number[], more: Partial<DrainTask> = {}): Promise<Drained> {
  const count = new DrainCount(task(more))
  count.started()
  for (const n of numbers) count.ran(n)
  return count.finish(async () => true)
}

test('all once and each lane in order, the lanes in any', async () => {
  const { count, doubled, missing, strange, disordered, isComplete } = await drain([1, 0, 2, 4, 3, 5])
  expect({ count, doubled, missing, strange, disordered, isComplete }).toEqual({
    count: 6,
    doubled: 0,
    missing: 0,
    strange: 0,
    disordered: 0,
    isComplete: true,
  })
})

test('one that ran twice in another one’s place is doubled, and the other is missing', async () => {
  expect(await drain([0, 1, 2, 3, 2, 5])).toMatchObject({ doubled: 1, missing: 1 })
})

test('a number that was never handed over is strange', async () => {
  expect(await drain([0, 1, 2, 3, 4, 7])).toMatchObject({ strange: 1, missing: 1 })
})

test('two of a lane that changed places are out of order', async () => {
  expect((await drain([0, 1, 4, 2, 3, 5])).disordered).toBeGreaterThan(0)
})

test('a lane that does not begin with its first is out of order', async () => {
  expect((await drain([2, 0, 1, 4, 3, 5])).disordered).toBeGreaterThan(0)
})

test('where the numbers begin later, so do the lanes', async () => {
  expect(await drain([11, 10, 12, 13, 14, 15], { from: 10 })).toMatchObject({ disordered: 0, strange: 0, missing: 0 })
})

test('an early stop judges what ran, from wherever its lanes stand', async () => {
  expect(await drain([2, 4], { stopAfter: 2 })).toMatchObject({ disordered: 0, missing: 0, isComplete: false })
  expect(await drain([2, 0], { stopAfter: 2 })).toMatchObject({ disordered: 1 })
})

test('it is over only when the store has nothing left', async () => {
  const count = new DrainCount(task())
  count.started()
  for (const n of [0, 1, 2, 3, 4, 5]) count.ran(n)
  const answers = [false, false, true]
  const drained = await count.finish(async () => answers.shift() ?? true)
  expect(answers).toEqual([])
  expect(drained.wallSeconds).toBeGreaterThan(0)
})

test('the first tenth is not counted', async () => {
  const numbers = Array.from({ length: 100 }, (_, n) => n)
  expect(await drain(numbers, { count: 100, lanes: 1 })).toMatchObject({ count: 100, steadyCount: 90 })
})
