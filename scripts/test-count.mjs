/** The three numbers that `npm test` ends with, and its line of progress. */

export const noCounts = () => ({ passed: 0, failed: 0, skipped: 0 })

/** Counts the tests of a file. A file that could not be loaded has no failed test: it counts as one. Answers those that were skipped. */
export function addModule(counts, moduleState, tests) {
  const skipped = []
  let failed = 0
  for (const test of tests) {
    if (test.state === 'passed') counts.passed += 1
    else if (test.state === 'failed') failed += 1
    else skipped.push(test)
  }
  counts.failed += moduleState === 'failed' ? Math.max(failed, 1) : failed
  counts.skipped += skipped.length
  return skipped
}

/** What a run of vitest comes to. Without counts it broke; a failure that belongs to no test counts as one. */
export function resultOf(counts, exitCode) {
  if (counts === undefined) return { passed: 0, failed: 1, skipped: 0 }
  return exitCode !== 0 && counts.failed === 0 ? { ...counts, failed: 1 } : counts
}

export function lastLine({ passed, failed, skipped }) {
  return `${passed} passed, ${failed} failed${skipped > 0 ? `, ${skipped} skipped` : ''}`
}

export function progressLine(seconds, filesDone, files, { passed, failed }) {
  const left =
    filesDone > 0 && filesDone < files ? `, about ${clock((seconds / filesDone) * (files - filesDone))} left` : ''
  return `[${clock(seconds)}${left}] ${filesDone} of ${files} files, ${passed} tests passed, ${failed} failed`
}

const clock = (seconds) => `${Math.floor(seconds / 60)}:${String(Math.floor(seconds % 60)).padStart(2, '0')}`
