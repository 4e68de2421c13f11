/** A Chromium of a test's own. The program: the one that SPILLWAY_TEST_CHROMIUM names, else one on PATH. */
import { existsSync } from 'node:fs'
import { delimiter, join } from 'node:path'
import { type Browser, chromium } from 'playwright-core'

const programNames = ['chromium', 'chromium-browser', 'google-chrome']

/** The program, or why there is none. Where the tests must not be skipped (CI), there being none is a failure. */
export function findChromium(): { program: string } | { missing: string } {
  const given = process.env.SPILLWAY_TEST_CHROMIUM
  if (given) return { program: given }
  const folders = (process.env.PATH ?? '').split(delimiter).filter((folder) => folder !== '')
  const paths = programNames.flatMap((name) => folders.map((folder) => join(folder, name)))
  const program = paths.find((path) => existsSync(path))
  if (program !== undefined) return { program }
  const missing = `no Chromium: none of ${programNames.join(', ')} is on PATH, and SPILLWAY_TEST_CHROMIUM names none`
  if (process.env.CI) throw new Error(missing)
  console.warn(missing)
  return { missing }
}

/** Its profile is a temporary folder, gone when it is closed. `args`: more of them. */
export function launchChromium(args: readonly string[] = []): Promise<Browser> {
  const found = findChromium()
  if ('missing' in found) throw new Error(found.missing)
  // In a container there are no namespaces for its sandbox, and often too little shared memory. What it opens is ours.
  return chromium.launch({
    executablePath: found.program,
    args: ['--no-sandbox', '--disable-dev-shm-usage', ...args],
  })
}
