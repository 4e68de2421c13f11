/** From vitest's JSON report to the three numbers that `npm test` ends with. */

/** Options of vitest that narrow the run down to some tests; a bare word is a file filter. */
const filterOptions = ['-t', '--testNamePattern', '--project', '--dir', '--changed', '--shard', '--related']

export function isFiltered(args) {
  return args.some((arg) => !arg.startsWith('-') || filterOptions.includes(arg.split('=', 1)[0]))
}

/**
 * A file that could not be loaded has no failed test, and an unhandled error or a missed coverage threshold has no
 * file: each counts as one failure, so that "0 failed" never stands under a red run.
 */
export function countResults(report, exitCode) {
  if (!report) return { passed: 0, failed: 1, skipped: 0 }
  let passed = 0
  let failed = 0
  let skipped = 0
  for (const file of report.testResults) {
    let failedHere = 0
    for (const { status } of file.assertionResults) {
      if (status === 'passed') passed += 1
      else if (status === 'failed') failedHere += 1
      else skipped += 1
    }
    if (file.status === 'failed' && failedHere === 0) failedHere = 1
    failed += failedHere
  }
  if (exitCode !== 0 && failed === 0) failed = 1
  return { passed, failed, skipped }
}

/** Files with a failed test, or that could not be loaded. */
export function failedFiles(report) {
  return report.testResults.filter(({ status }) => status === 'failed').map(({ name }) => name)
}

/** The names of the failed tests, with their file. */
export function failedTests(report, root) {
  return report.testResults.flatMap(({ name, assertionResults }) =>
    assertionResults
      .filter(({ status }) => status === 'failed')
      .map(({ fullName }) => `${name.startsWith(root) ? name.slice(root.length + 1) : name}: ${fullName}`),
  )
}

/** The report with the files of a later one in their places. */
export function withFilesOf(report, later) {
  const again = new Map(later.testResults.map((file) => [file.name, file]))
  return { ...report, testResults: report.testResults.map((file) => again.get(file.name) ?? file) }
}
