/**
 * `npm test`: builds, runs the quick storeys (see vitest.config.ts) and ends with one plain line, `N passed, N failed`.
 * `npm run test:all` (`--all`): all storeys, then what cannot run beside them (the packed tarball, chaos, a benchmark, the examples).
 * Other arguments go to vitest: a path filter or `--project` runs just that.
 */
import { spawn } from 'node:child_process'
import { existsSync, mkdtempSync, readdirSync, readFileSync, rmSync } from 'node:fs'
import { tmpdir } from 'node:os'
import path from 'node:path'
import { build, root } from './build.mjs'
import { lastLine, resultOf } from './test-count.mjs'

const quickStoreys = ['unit', 'core', 'smoke']

function run(command, args, env = {}) {
  return new Promise((resolve, reject) => {
    const child = spawn(command, args, { cwd: root, stdio: 'inherit', env: { ...process.env, ...env } })
    child.once('error', reject)
    child.once('exit', (code) => resolve(code ?? 1))
  })
}

async function runVitest(args) {
  const dir = mkdtempSync(path.join(tmpdir(), 'spillway-test-'))
  const counts = path.join(dir, 'counts.json')
  try {
    const vitest = path.join(root, 'node_modules/vitest/vitest.mjs')
    const reporter = `--reporter=${path.join(root, 'scripts/test-reporter.mjs')}`
    const exitCode = await run(process.execPath, [vitest, 'run', reporter, ...args], { SPILLWAY_TEST_COUNTS: counts })
    return resultOf(existsSync(counts) ? JSON.parse(readFileSync(counts, 'utf8')) : undefined, exitCode)
  } finally {
    rmSync(dir, { recursive: true, force: true })
  }
}

/** Each is one test: it passes when its command exits with 0. */
function singleTests() {
  const tests = [
    { name: 'packed tarball', command: process.execPath, args: ['scripts/test-pack.mjs'] },
    { name: 'a short chaos run', command: process.execPath, args: ['scripts/chaos.mjs', '--quick', '--seed', '1'] },
    { name: 'hostile callers', command: process.execPath, args: ['scripts/chaos.mjs', '--hostile', '--quick'] },
    { name: 'a short benchmark', command: process.execPath, args: ['scripts/test-bench.mjs'] },
  ]
  for (const entry of readdirSync(path.join(root, 'examples'))) {
    const manifest = path.join(root, 'examples', entry, 'package.json')
    if (!existsSync(manifest) || !JSON.parse(readFileSync(manifest, 'utf8')).scripts?.test) continue
    tests.push({ name: `examples/${entry}`, command: 'npm', args: ['test', '-w', `examples/${entry}`] })
  }
  return tests
}

async function runAll(args) {
  if ((await build({ explain: true })) !== 0) return { passed: 0, failed: 1, skipped: 0 }
  const isAll = args.includes('--all')
  const given = args.filter((arg) => arg !== '--all')
  const isNarrowed = given.some((arg) => !arg.startsWith('-') || /^(-t|--testNamePattern|--project)\b/.test(arg))
  const storeys = isAll || isNarrowed ? [] : quickStoreys.map((name) => `--project=${name}`)
  const totals = await runVitest([...storeys, ...given])
  if (!isAll || isNarrowed) return totals
  for (const { name, command, args: rest } of singleTests()) {
    console.log(`\n${name}`)
    const ok = (await run(command, rest)) === 0
    console.log(`${ok ? 'passed' : 'FAILED'}: ${name}`)
    totals[ok ? 'passed' : 'failed'] += 1
  }
  return totals
}

const totals = await runAll(process.argv.slice(2))
console.log(`\n${lastLine(totals)}`)
process.exitCode = totals.failed > 0 || totals.passed === 0 ? 1 : 0
