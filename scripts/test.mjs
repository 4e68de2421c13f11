/**
 * `npm test`: builds, runs vitest, then what cannot run beside it (the packed tarball, the examples), and ends with
 * one plain line, `N passed, N failed`. Arguments go to vitest; with a file or name filter only vitest runs.
 */
import { spawn } from 'node:child_process'
import { existsSync, mkdtempSync, readdirSync, readFileSync, rmSync } from 'node:fs'
import { tmpdir } from 'node:os'
import path from 'node:path'
import { build, root } from './build.mjs'
import { countResults, isFiltered } from './test-count.mjs'

function run(command, args) {
  return new Promise((resolve, reject) => {
    const child = spawn(command, args, { cwd: root, stdio: 'inherit' })
    child.once('error', reject)
    child.once('exit', (code) => resolve(code ?? 1))
  })
}

async function runVitest(args) {
  const dir = mkdtempSync(path.join(tmpdir(), 'spillway-test-'))
  const file = path.join(dir, 'results.json')
  try {
    const vitest = path.join(root, 'node_modules/vitest/vitest.mjs')
    const reporters = ['--reporter=default', '--reporter=json', `--outputFile.json=${file}`]
    const exitCode = await run(process.execPath, [vitest, 'run', ...reporters, ...args])
    const report = existsSync(file) ? JSON.parse(readFileSync(file, 'utf8')) : undefined
    return countResults(report, exitCode)
  } finally {
    rmSync(dir, { recursive: true, force: true })
  }
}

/** Each is one test: it passes when its command exits with 0. */
function singleTests() {
  const tests = [
    { name: 'packed tarball', command: process.execPath, args: ['scripts/test-pack.mjs'] },
    { name: 'a short chaos run', command: process.execPath, args: ['scripts/chaos.mjs', '--quick', '--seed', '1'] },
    { name: 'a short benchmark', command: process.execPath, args: ['scripts/test-bench.mjs'] },
  ]
  for (const entry of existsSync(path.join(root, 'examples')) ? readdirSync(path.join(root, 'examples')) : []) {
    const manifest = path.join(root, 'examples', entry, 'package.json')
    if (!existsSync(manifest) || !JSON.parse(readFileSync(manifest, 'utf8')).scripts?.test) continue
    tests.push({ name: `examples/${entry}`, command: 'npm', args: ['test', '-w', `examples/${entry}`] })
  }
  return tests
}

async function runAll(args) {
  if ((await build({ explain: true })) !== 0) return { passed: 0, failed: 1, skipped: 0 }
  const totals = await runVitest(args)
  if (isFiltered(args)) return totals
  for (const { name, command, args: rest } of singleTests()) {
    console.log(`\n${name}`)
    const ok = (await run(command, rest)) === 0
    console.log(`${ok ? 'passed' : 'FAILED'}: ${name}`)
    totals[ok ? 'passed' : 'failed'] += 1
  }
  return totals
}

const { passed, failed, skipped } = await runAll(process.argv.slice(2))
console.log(`\n${passed} passed, ${failed} failed${skipped > 0 ? `, ${skipped} skipped` : ''}`)
process.exitCode = failed > 0 || passed === 0 ? 1 : 0
