import { describe, expect, it } from 'vitest'
import { addModule, lastLine, noCounts, progressLine, resultOf } from './test-count.mjs'

const passed = { name: 'a', state: 'passed' }
const failed = { name: 'b', state: 'failed' }
const skipped = { name: 'c', state: 'skipped', note: 'no browser' }

describe('counts', () => {
  it('add the tests of a file, and name those that were skipped', () => {
    const counts = noCounts()
    expect(addModule(counts, 'failed', [passed, passed, failed, skipped])).toEqual([skipped])
    addModule(counts, 'passed', [passed])
    expect(counts).toEqual({ passed: 3, failed: 1, skipped: 1 })
  })

  it('of a file that could not be loaded, or whose hooks failed, are one failure', () => {
    const counts = noCounts()
    addModule(counts, 'failed', [])
    addModule(counts, 'failed', [passed])
    expect(counts).toEqual({ passed: 1, failed: 2, skipped: 0 })
  })

  it('never end with "0 failed" under a red run', () => {
    expect(resultOf({ passed: 3, failed: 0, skipped: 0 }, 1).failed).toBe(1)
    expect(resultOf(undefined, 0).failed).toBe(1)
    expect(resultOf({ passed: 3, failed: 0, skipped: 0 }, 0).failed).toBe(0)
  })
})

it('the last line names what was skipped only if something was', () => {
  expect(lastLine({ passed: 3, failed: 1, skipped: 0 })).toBe('3 passed, 1 failed')
  expect(lastLine({ passed: 3, failed: 1, skipped: 2 })).toBe('3 passed, 1 failed, 2 skipped')
})

it('the line of progress says how long it may take', () => {
  const counts = { passed: 30, failed: 1, skipped: 0 }
  expect(progressLine(65, 10, 20, counts)).toBe('[1:05, about 1:05 left] 10 of 20 files, 30 tests passed, 1 failed')
  expect(progressLine(0, 0, 20, noCounts())).toBe('[0:00] 0 of 20 files, 0 tests passed, 0 failed')
})
