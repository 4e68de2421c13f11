/** A Chromium of a test's own. The program: the one that SPILLWAY_TEST_CHROMIUM names, else one on PATH. */
import { existsSync } from 'node:fs'
import { delimiter, join } from 'node:path'
import { type Browser, chromium } from 'playwright-core'

const programNames = ['chromium', 'chromium-browser', 'google-chrome']

/** Null where there is none; not in CI, where that is a failure. */
export function findChromium(): string | null {
  const given = process.env.SPILLWAY_TEST_CHROMIUM
  if (given) return given
  const folders = (process.env.PATH ?? '').split(delimiter).filter((folder) => folder !== '')
  const found = programNames
    .flatMap((name) => folders.map((folder) => join(folder, name)))
    .find((path) => existsSync(path))
  if (found === undefined && process.env.CI) throw new Error('There is no Chromium for the tests of the browser build.')
  return found ?? null
}

/** In a container there are no namespaces for its sandbox, and often too little shared memory. What it opens is ours. */
export function launchChromium(executablePath: string): Promise<Browser> {
  return chromium.launch({ executablePath, args: ['--no-sandbox', '--disable-dev-shm-usage'] })
}
