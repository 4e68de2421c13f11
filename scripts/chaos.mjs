/** `npm run chaos`: brings the build up to date, then runs the fault harness. See docs/guides/chaos.md. */
import { spawn } from 'node:child_process'
import path from 'node:path'
import { build, root } from './build.mjs'

const code = await build({ explain: true })
if (code !== 0) process.exit(code)
const child = spawn(process.execPath, ['--import', 'tsx', path.join(root, 'chaos/main.ts'), ...process.argv.slice(2)], {
  cwd: root,
  stdio: 'inherit',
})
// Ctrl-C reaches the whole foreground group, the harness too: it ends what it started, and this one waits for it.
process.on('SIGINT', () => undefined)
process.on('SIGTERM', () => child.kill('SIGINT'))
child.once('error', (fault) => {
  console.error(`chaos: ${fault.message}`)
  process.exitCode = 2
})
child.once('exit', (exit) => {
  process.exitCode = exit ?? 2
})
