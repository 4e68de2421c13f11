/**
 * What vitest says in `npm test`: a line of progress now and then, each failure when it happens and again at the end. The counts
 * go to the file that SPILLWAY_TEST_COUNTS names; see test-count.mjs.
 */
import { writeFileSync } from 'node:fs'
import { MinimalReporter } from 'vitest/node'
import { addModule, noCounts, progressLine } from './test-count.mjs'

const lineEveryMs = 10_000

export default class TestReporter extends MinimalReporter {
  #counts = noCounts()
  #files = 0
  #filesDone = 0
  #startedAt = performance.now()
  #saidAt = performance.now()

  onTestRunStart(specifications) {
    super.onTestRunStart(specifications)
    this.#files = specifications.length
    this.#say()
  }

  onTestModuleEnd(module) {
    super.onTestModuleEnd(module)
    this.#filesDone += 1
    const results = [...module.children.allTests()].map((test) => ({
      name: test.fullName,
      state: test.result().state,
      note: test.result().note,
    }))
    for (const { name, note } of addModule(this.#counts, module.state(), results)) {
      this.log(`skipped: ${name}${note ? ` (${note})` : ''}`)
    }
    if (performance.now() - this.#saidAt >= lineEveryMs || this.#filesDone === this.#files) this.#say()
  }

  onTestRunEnd(modules, strayErrors, reason) {
    super.onTestRunEnd(modules, strayErrors, reason)
    this.#counts.failed += strayErrors.length
    const file = process.env.SPILLWAY_TEST_COUNTS
    if (file) writeFileSync(file, JSON.stringify(this.#counts))
  }

  #say() {
    this.#saidAt = performance.now()
    const seconds = (performance.now() - this.#startedAt) / 1_000
    this.log(progressLine(seconds, this.#filesDone, this.#files, this.#counts))
  }
}
