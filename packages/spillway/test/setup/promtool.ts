/**
 * Prometheus's own checker. In this order: the program that SPILLWAY_TEST_PROMTOOL names; one on PATH; the one of Debian's
 * package, unpacked into a cache folder (without root, and once for all tests).
 */
import { execFile } from 'node:child_process'
import { existsSync } from 'node:fs'
import { chmod, mkdir, mkdtemp, readdir, rename, rm } from 'node:fs/promises'
import { delimiter, join } from 'node:path'
import { fileURLToPath } from 'node:url'
import { promisify } from 'node:util'

const run = promisify(execFile)

const programName = 'promtool'
const cacheFolder = fileURLToPath(new URL('../../../../node_modules/.cache/spillway-promtool', import.meta.url))
const outputBytesMax = 16 * 1024 * 1024

/** Runs it in a folder, on `input`; `output` is all that it said. That it found faults is an outcome, not an error. */
export type Promtool = (
  args: readonly string[],
  cwd: string,
  input?: string,
) => Promise<{ ok: boolean; output: string }>

type Found = { promtool: Promtool } | { missing: string }

/** Makes the body of a test that needs it: without it, the test is skipped and says why. */
export function promtoolTests(found: Found) {
  return (test: (promtool: Promtool) => Promise<void>) =>
    async ({ skip }: { skip: (why: string) => void }): Promise<void> => {
      if ('promtool' in found) await test(found.promtool)
      else skip(found.missing)
    }
}

/** The program, or why there is none. Where the tests must not be skipped (CI), there being none is a failure. */
export async function findPromtool(): Promise<Found> {
  const given = process.env.SPILLWAY_TEST_PROMTOOL
  if (given) return { promtool: promtoolAt(given) }
  const folders = (process.env.PATH ?? '').split(delimiter).filter((folder) => folder !== '')
  const installed = folders.map((folder) => join(folder, programName)).find((path) => existsSync(path))
  if (installed !== undefined) return { promtool: promtoolAt(installed) }
  try {
    return { promtool: promtoolAt(await unpackDebian()) }
  } catch (error) {
    const missing = `no ${programName}: none is installed, and Debian's could not be had (${String(error)})`
    if (process.env.CI) throw new Error(missing, { cause: error })
    console.warn(missing)
    return { missing }
  }
}

function promtoolAt(program: string): Promtool {
  return (args, cwd, input = '') =>
    new Promise((resolve, reject) => {
      const { stdin } = execFile(program, [...args], { cwd, maxBuffer: outputBytesMax }, (error, stdout, stderr) => {
        // Without an exit code it did not run, or not to its end.
        if (error !== null && typeof error.code !== 'number') reject(error)
        else resolve({ ok: error === null, output: stdout + stderr })
      })
      // What is not read is no fault: most of its checks read files.
      stdin?.on('error', () => undefined).end(input)
    })
}

/** Several test workers may come here at once: each unpacks for itself, and gives the whole file its name. */
async function unpackDebian(): Promise<string> {
  const program = join(cacheFolder, programName)
  if (existsSync(program)) return program
  await mkdir(cacheFolder, { recursive: true })
  const fresh = await mkdtemp(join(cacheFolder, 'unpacking-'))
  try {
    await run('apt-get', ['download', 'prometheus'], { cwd: fresh })
    for (const file of await readdir(fresh)) await run('dpkg', ['-x', file, '.'], { cwd: fresh })
    const unpacked = join(fresh, 'usr', 'bin', programName)
    await chmod(unpacked, 0o755)
    await rename(unpacked, program)
  } finally {
    await rm(fresh, { recursive: true, force: true })
  }
  return program
}
