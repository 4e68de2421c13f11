import { describe, expect, it } from 'vitest'
import { countResults, failedFiles, failedTests, isFiltered, withFilesOf } from './test-count.mjs'

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

describe('a second run of what failed', () => {
  const test = (status, fullName) => ({ status, fullName })
  const first = {
    testResults: [
      {
        name: '/checkout/a.test.ts',
        status: 'failed',
        assertionResults: [test('failed', 'a one'), test('passed', 'a two')],
      },
      { name: '/checkout/b.test.ts', status: 'passed', assertionResults: [test('passed', 'b one')] },
      { name: '/checkout/c.test.ts', status: 'failed', assertionResults: [] },
    ],
  }

  it('is of the files with a failure, loaded or not', () => {
    expect(failedFiles(first)).toEqual(['/checkout/a.test.ts', '/checkout/c.test.ts'])
    expect(failedTests(first, '/checkout')).toEqual(['a.test.ts: a one'])
  })

  it('counts in the place of the first, for better or worse', () => {
    const better = [test('passed', 'a one'), test('passed', 'a two')]
    const worse = [test('passed', 'a one'), test('failed', 'a two')]
    const again = (assertionResults, status) => ({
      testResults: [
        { name: '/checkout/a.test.ts', status, assertionResults },
        { name: '/checkout/c.test.ts', status: 'passed', assertionResults: [test('passed', 'c one')] },
      ],
    })
    expect(countResults(withFilesOf(first, again(better, 'passed')), 0)).toEqual({ passed: 4, failed: 0, skipped: 0 })
    expect(countResults(withFilesOf(first, again(worse, 'failed')), 1)).toEqual({ passed: 3, failed: 1, skipped: 0 })
  })
})
