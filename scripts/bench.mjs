/**
 * `npm run bench`: brings the build up to date, installs bench/ (the peers) when its lockfile is newer than what is
 * installed, and becomes the benchmark. It runs in this very process, so that its exit code, its terminal and its
 * signals need no forwarding.
 */
import { spawn } from 'node:child_process'
import { existsSync, statSync } from 'node:fs'
import path from 'node:path'
import { pathToFileURL } from 'node:url'
import { build, root } from './build.mjs'

const bench = path.join(root, 'bench')
/** npm writes it last, so its age is that of a finished installation. */
const installedMark = path.join(bench, 'node_modules/.package-lock.json')

function isInstalled() {
  if (!existsSync(installedMark)) return false
  return statSync(installedMark).mtimeMs >= statSync(path.join(bench, 'package-lock.json')).mtimeMs
}

function install() {
  console.error('installing the peers into bench/ (once; about 250 MB)…')
  // No install scripts: none is needed, and a benchmark should not run strangers' code unasked.
  const args = ['ci', '--ignore-scripts', '--loglevel=error']
  return new Promise((resolve, reject) => {
    const npm = spawn('npm', args, { cwd: bench, stdio: ['ignore', 2, 2], shell: process.platform === 'win32' })
    npm.once('error', reject)
    npm.once('exit', (code) => resolve(code ?? 1))
  })
}

async function prepare() {
  const built = await build({ explain: true })
  if (built !== 0) return built
  if (isInstalled()) return 0
  const installed = await install()
  if (installed !== 0) console.error('The peers could not be installed; `npm ci` in bench/ says why.')
  return installed
}

async function start() {
  // From bench/, whose tsx is the one that the programs are run with.
  const { register } = await import(pathToFileURL(path.join(bench, 'node_modules/tsx/dist/esm/api/index.mjs')).href)
  register()
  const { main } = await import(pathToFileURL(path.join(bench, 'run.ts')).href)
  return main(process.argv.slice(2))
}

const prepared = await prepare()
// A section that timed out may still hold timers and sockets: everything else is closed by now.
process.exit(prepared === 0 ? await start() : prepared)
