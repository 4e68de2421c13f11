import { execFile } from 'node:child_process'
import { mkdtemp, readFile, rm } from 'node:fs/promises'
import { tmpdir } from 'node:os'
import { join } from 'node:path'
import { fileURLToPath } from 'node:url'
import { promisify } from 'node:util'

const entry = fileURLToPath(new URL('../dist/index.js', import.meta.url))
/** Comes with vitest, which bundles with it. Its program, as the package is no dependency of anything here. */
const bundler = fileURLToPath(new URL('../../../node_modules/rolldown/bin/cli.mjs', import.meta.url))

/** The whole client as one minified module, as a page would have it that uses all of it. */
export async function bundledClient(): Promise<string> {
  const folder = await mkdtemp(join(tmpdir(), 'spillway-bundle-'))
  try {
    const file = join(folder, 'client.js')
    const form = ['--format', 'esm', '--platform', 'browser', '--minify']
    await promisify(execFile)(process.execPath, [bundler, entry, ...form, '--file', file])
    return await readFile(file, 'utf8')
  } finally {
    await rm(folder, { recursive: true, force: true })
  }
}
