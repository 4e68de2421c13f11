/**
 * `npm test`: builds, runs vitest, then what cannot run beside it (the packed tarball, the examples), and ends with
 * one plain line, `N passed, N failed`. Arguments go to vitest; with a file or name filter only vitest runs.
 */
import { spawn } from 'node:child_process'
import { existsSync, mkdtempSync, readdirSync, readFileSync, rmSync } from 'node:fs'
import { tmpdir } from 'node:os'
import path from 'node:path'
import { build, root } from './build.mjs'
import { countResults, failedFiles, failedTests, isFiltered, withFilesOf } from './test-count.mjs'

/** More than this many files are no accident. */
const filesAgain = 4

function run(command, args, env = {}) {
  return new Promise((resolve, reject) => {
    const child = spawn(command, args, { cwd: root, stdio: 'inherit', env: { ...process.env, ...env } })
    child.once('error', reject)
    child.once('exit', (code) => resolve(code ?? 1))
  })
}

/** What vitest reports (nothing, if it broke), its exit code, and how many errors belong to no test. */
async function runVitest(args) {
  const dir = mkdtempSync(path.join(tmpdir(), 'spillway-test-'))
  const file = path.join(dir, 'results.json')
  const errors = path.join(dir, 'errors')
  try {
    const vitest = path.join(root, 'node_modules/vitest/vitest.mjs')
    const reporters = ['default', 'json', path.join(root, 'scripts/test-errors.mjs')].map((it) => `--reporter=${it}`)
    const exitCode = await run(process.execPath, [vitest, 'run', ...reporters, `--outputFile.json=${file}`, ...args], {
      SPILLWAY_TEST_ERRORS: errors,
    })
    const report = existsSync(file) ? JSON.parse(readFileSync(file, 'utf8')) : undefined
    return { report, exitCode, strayErrors: existsSync(errors) ? Number(readFileSync(errors, 'utf8')) : 1 }
  } finally {
    rmSync(dir, { recursive: true, force: true })
  }
}

/**
 * Many tests kill processes and time them, on a machine that two of them share. A file that fails there is run once
 * more with the machine to itself: what is broken fails again. Which ones needed it is said at the end.
 */
async function runTests(args) {
  const first = await runVitest(args)
  const failing = first.report ? failedFiles(first.report) : []
  if (args.length > 0 || failing.length === 0 || failing.length > filesAgain || first.strayErrors > 0) {
    return { ...countResults(first.report, first.exitCode), again: [] }
  }
  console.log(`\n${failing.length} of the files failed. Once more, each with the machine to itself:`)
  const second = await runVitest(['--maxWorkers=1', ...failing.map((file) => path.relative(root, file))])
  if (!second.report) return { ...countResults(first.report, first.exitCode), again: [] }
  const failedAgain = new Set(failedTests(second.report, root))
  return {
    ...countResults(withFilesOf(first.report, second.report), second.exitCode),
    again: failedTests(first.report, root).filter((name) => !failedAgain.has(name)),
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
  if ((await build({ explain: true })) !== 0) return { passed: 0, failed: 1, skipped: 0, again: [] }
  const totals = await runTests(args)
  if (isFiltered(args)) return totals
  for (const { name, command, args: rest } of singleTests()) {
    console.log(`\n${name}`)
    const ok = (await run(command, rest)) === 0
    console.log(`${ok ? 'passed' : 'FAILED'}: ${name}`)
    totals[ok ? 'passed' : 'failed'] += 1
  }
  return totals
}

const { passed, failed, skipped, again } = await runAll(process.argv.slice(2))
if (again.length > 0) console.log(['\nfailed beside others, passed alone:', ...again].join('\n- '))
console.log(`\n${passed} passed, ${failed} failed${skipped > 0 ? `, ${skipped} skipped` : ''}`)
process.exitCode = failed > 0 || passed === 0 ? 1 : 0
