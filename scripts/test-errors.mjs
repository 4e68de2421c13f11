/** A reporter of vitest that writes down how many errors belong to no test: its JSON report does not tell. */
import { writeFileSync } from 'node:fs'

export default class TestErrors {
  onTestRunEnd(_modules, strayErrors) {
    const file = process.env.SPILLWAY_TEST_ERRORS
    if (file) writeFileSync(file, String(strayErrors.length))
  }
}
