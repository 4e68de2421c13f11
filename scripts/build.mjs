/**
 * The one way to build: the SQL modules, then `tsc -b`, which is incremental and costs a fraction of a second when
 * nothing changed.
 */
import { spawn } from 'node:child_process'
import { rmSync } from 'node:fs'
import path from 'node:path'
import { generateSql } from './generate-sql.mjs'

export const root = path.resolve(import.meta.dirname, '..')

/** Longer than an incremental build with nothing to do takes on a slow machine: a wait worth explaining. */
const explainAfterMs = 1_500

/** Resolves to the compiler's exit code; its messages go to this process's stderr, so that stdout stays the caller's. */
export function build({ explain = false } = {}) {
  // Left over by a pack that was killed half-way, this copy would shadow the workspace's own protocol package.
  for (const name of ['client', 'spillway', 'server']) {
    rmSync(path.join(root, 'packages', name, 'node_modules/@spillway'), { recursive: true, force: true })
  }
  generateSql()
  return new Promise((resolve, reject) => {
    const timer = explain ? setTimeout(() => console.error('building…'), explainAfterMs) : undefined
    const compiler = spawn(process.execPath, [path.join(root, 'node_modules/typescript/bin/tsc'), '-b'], {
      cwd: root,
      stdio: ['ignore', 2, 2],
    })
    compiler.once('error', reject)
    compiler.once('exit', (code, signal) => {
      clearTimeout(timer)
      if (signal) console.error(`build ended by ${signal}`)
      resolve(code ?? 1)
    })
  })
}
