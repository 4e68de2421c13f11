/**
 * `npm run check`: everything but the tests. One line for each step, in a fixed order; the output of a failed step is
 * below its line. Exits with 1 if any failed.
 */
import { spawn } from 'node:child_process'
import { existsSync, readFileSync } from 'node:fs'
import path from 'node:path'
import { root } from './build.mjs'

const bin = (file) => path.join(root, 'node_modules', file)
const script = (name) => [path.join(root, 'scripts', name)]
const tsc = bin('typescript/bin/tsc')

/** Those that are built; from the build's own list, as dist is missing in a fresh clone. */
const packages = JSON.parse(readFileSync(path.join(root, 'tsconfig.json'), 'utf8')).references.map(
  ({ path: dir }) => dir,
)

/** `afterBuild`: reads dist, or shares the compiler's output with the build. The others start at once. */
const steps = [
  { name: 'format and lint', args: [bin('@biomejs/biome/bin/biome'), 'ci', '--colors=off', '.'] },
  { name: 'types', args: [tsc, '-b'], build: true },
  { name: 'types of tests', args: [tsc, '-p', 'tsconfig.test.json'], afterBuild: true },
  // Only where `npm run bench` has installed its peers, whose types it needs; the tests install them and check it always.
  ...(existsSync(path.join(root, 'bench/node_modules'))
    ? [{ name: 'types of bench', args: [tsc, '-p', 'bench/tsconfig.json'], afterBuild: true }]
    : []),
  { name: 'SQL modules', args: [...script('generate-sql.mjs'), '--check'] },
  { name: 'room imports', args: script('check-rooms.mjs') },
  { name: 'file rules', args: script('check-files.mjs') },
  { name: 'codes and docs', args: script('check-codes.mjs') },
  { name: 'settings and docs', args: [...script('generate-docs.mjs'), '--check'], afterBuild: true },
  { name: 'public names', args: script('check-public-names.mjs'), afterBuild: true },
  { name: 'walk of a request', args: script('walk.mjs'), afterBuild: true },
  { name: 'dead code', args: [bin('knip/bin/knip.js'), '--no-progress'] },
  ...packages.map((dir) => ({
    name: `exports of ${dir}`,
    // --pack false: packing would run prepack, which rebuilds under the feet of the steps beside this one.
    args: [bin('publint/src/cli.js'), 'run', dir, '--strict', '--pack', 'false'],
    afterBuild: true,
  })),
]

/** Most steps are one busy process; more at once would only make each slower. */
const concurrencyMax = 3

function run({ name, args }) {
  const startedAt = performance.now()
  return new Promise((resolve, reject) => {
    let output = ''
    const child = spawn(process.execPath, args, {
      cwd: root,
      stdio: ['ignore', 'pipe', 'pipe'],
      env: { ...process.env, NO_COLOR: '1' },
    })
    for (const stream of [child.stdout, child.stderr]) {
      stream.setEncoding('utf8').on('data', (text) => {
        output += text
      })
    }
    child.once('error', reject)
    child.once('close', (code) => {
      resolve({ name, ok: code === 0, output, seconds: (performance.now() - startedAt) / 1_000 })
    })
  })
}

function limited(max) {
  let running = 0
  const waiting = []
  return async (task) => {
    if (running >= max) await new Promise((resolve) => waiting.push(resolve))
    running += 1
    try {
      return await task()
    } finally {
      running -= 1
      waiting.shift()?.()
    }
  }
}

const slot = limited(concurrencyMax)
const built = slot(() => run(steps.find((step) => step.build)))
const results = steps.map((step) => {
  if (step.build) return built
  return step.afterBuild ? built.then(() => slot(() => run(step))) : slot(() => run(step))
})

let failed = 0
for (const result of results) {
  const { name, ok, output, seconds } = await result
  console.log(`${ok ? 'ok    ' : 'FAILED'} ${name} (${seconds.toFixed(1)} s)`)
  if (ok) continue
  failed += 1
  console.log(output.trimEnd().replace(/^/gm, '    '))
}
console.log(failed === 0 ? `all ${results.length} checks passed` : `${failed} of ${results.length} checks failed`)
process.exitCode = failed === 0 ? 0 : 1
