/**
 * How long a start on an existing, migrated PostgreSQL takes: `node scripts/measure-start.mjs [runs]`, after `npm run build`.
 * Each run is a new process on the embedded server, as with `postgres({ url })`. Medians; "own" is the processor time of the
 * process, which a busy machine changes less.
 */
import { execFileSync } from 'node:child_process'
import { chmodSync, mkdtempSync, rmSync } from 'node:fs'
import { tmpdir } from 'node:os'
import path from 'node:path'
import { root } from './build.mjs'

const runs = Number(process.argv[2] ?? 11)
const dist = (name) => JSON.stringify(path.join(root, 'packages', name, 'dist/index.js'))
const { startEmbedded } = await import(JSON.parse(dist('embedded-postgres')))

/** What the program of the user has imported before. */
const kinds = { plain: '', 'with typebox': "await import('typebox')" }
const source = (before) => `
  ${before}
  const began = performance.now(), used = process.cpuUsage()
  const { createIntake, postgres } = await import(${dist('spillway')})
  const imported = performance.now()
  const intake = await createIntake({ store: postgres({ url: process.argv[1] }) })
  const ready = performance.now(), { user, system } = process.cpuUsage(used)
  await intake.close()
  console.log(JSON.stringify({ import: imported - began, createIntake: ready - imported, own: (user + system) / 1_000 }))`

const median = (values) => values.sort((a, b) => a - b)[Math.floor(values.length / 2)]

const dir = mkdtempSync(path.join(tmpdir(), 'spillway-start-'))
chmodSync(dir, 0o755)
const server = await startEmbedded({ dataDir: path.join(dir, 'data') })
try {
  const run = (before) =>
    JSON.parse(
      execFileSync(process.execPath, ['--input-type=module', '-e', source(before), server.url], {
        cwd: root,
        encoding: 'utf8',
      }),
    )
  // The first one migrates.
  run('')
  for (const [kind, before] of Object.entries(kinds)) {
    const measured = Array.from({ length: runs }, () => run(before))
    const figures = Object.keys(measured[0]).map(
      (name) => `${name} ${median(measured.map((one) => one[name])).toFixed(0)} ms`,
    )
    console.log(`${kind}: ${figures.join(', ')}`)
  }
} finally {
  await server.stop()
  rmSync(dir, { recursive: true, force: true, maxRetries: 5, retryDelay: 200 })
}
