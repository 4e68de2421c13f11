/**
 * The benchmark in its shortest form, from installing the peers to the figures: `idle` looks at a real server for ten
 * seconds. Then the types of bench/, which only its own dependencies know.
 */
import { spawnSync } from 'node:child_process'
import { mkdtempSync, readdirSync, readFileSync, rmSync } from 'node:fs'
import { tmpdir } from 'node:os'
import path from 'node:path'
import { root } from './build.mjs'

function must(command, args) {
  const { status, error } = spawnSync(command, args, { cwd: root, stdio: 'inherit' })
  if (error !== undefined) throw error
  if (status !== 0) throw new Error(`${args.join(' ')} ended with ${status}`)
}

const out = mkdtempSync(path.join(tmpdir(), 'spillway-bench-test-'))
try {
  must(process.execPath, ['scripts/bench.mjs', '--quick', '--only', 'idle', '--out', out])
  const written = readdirSync(out).find((name) => name.endsWith('.json'))
  const report = JSON.parse(readFileSync(path.join(out, written ?? 'missing'), 'utf8'))
  if (JSON.stringify(report).includes('"figures":[]')) throw new Error('the report has no figures')
  must(process.execPath, [path.join(root, 'node_modules/typescript/bin/tsc'), '-p', 'bench/tsconfig.json'])
} finally {
  rmSync(out, { recursive: true, force: true })
}
