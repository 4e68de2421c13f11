import { describe, expect, it } from 'vitest'
import { countResults, isFiltered } from './test-count.mjs'

const file = (status, ...statuses) => ({ status, assertionResults: statuses.map((one) => ({ status: one })) })

describe('the count at the end of npm test', () => {
  it('adds up passed, failed and skipped tests over all files', () => {
    const report = { testResults: [file('failed', 'passed', 'failed'), file('passed', 'passed', 'skipped', 'todo')] }
    expect(countResults(report, 1)).toEqual({ passed: 2, failed: 1, skipped: 2 })
  })

  it('counts a file that could not be loaded as one failure', () => {
    const report = { testResults: [file('passed', 'passed'), file('failed')] }
    expect(countResults(report, 1)).toEqual({ passed: 1, failed: 1, skipped: 0 })
  })

  it('counts a failing hook of a file whose tests passed', () => {
    expect(countResults({ testResults: [file('failed', 'passed')] }, 1)).toEqual({ passed: 1, failed: 1, skipped: 0 })
  })

  it('never says 0 failed when vitest itself failed', () => {
    expect(countResults({ testResults: [file('passed', 'passed')] }, 1)).toEqual({ passed: 1, failed: 1, skipped: 0 })
    expect(countResults(undefined, 1)).toEqual({ passed: 0, failed: 1, skipped: 0 })
  })

  it('knows a filtered run from one with mere options', () => {
    expect(isFiltered(['packages/spillway/src/gates'])).toBe(true)
    expect(isFiltered(['-t', 'rate'])).toBe(true)
    expect(isFiltered(['--testNamePattern=rate'])).toBe(true)
    expect(isFiltered(['--coverage', '--bail=1'])).toBe(false)
    expect(isFiltered([])).toBe(false)
  })
})
