/** A queue that is broken on purpose is caught; the same run with nothing broken is clean. Real processes, some seconds each. */
import { rm } from 'node:fs/promises'
import { describe, expect, it } from 'vitest'
import { breakages } from './breakage.js'
import { timing } from './checker/finding.js'
import { runDirected, scenarios } from './directed.js'

const seed = 5
const quiet = (): void => undefined

describe.each(breakages)('%s off', (scenario) => {
  it('is caught', { timeout: 240_000 }, async () => {
    const { verdict, folder } = await runDirected({ scenario, broken: true, seed, say: quiet })
    await rm(folder, { recursive: true, force: true })
    expect(verdict.findings.map((finding) => finding.rule)).toContain(scenarios[scenario].rule)
  })

  it('is why: without it the run is clean', { timeout: 240_000 }, async () => {
    const { verdict, folder } = await runDirected({ scenario, broken: false, seed, say: quiet })
    await rm(folder, { recursive: true, force: true })
    // How fast it recovers is no matter here, where other tests take the machine's time.
    expect(verdict.findings.filter((finding) => !timing.has(finding.rule))).toEqual([])
    expect(verdict.counts.accepted).toBeGreaterThan(0)
  })
})
