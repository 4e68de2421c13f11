/**
 * `npm start`: brings the build up to date, then becomes `spillway serve`. The server runs in this very process, so
 * that its exit code, its terminal and its signals need no forwarding.
 */
import path from 'node:path'
import { pathToFileURL } from 'node:url'
import { build, root } from './build.mjs'

/**
 * Ctrl-C reaches this process twice: from the terminal, which signals the whole foreground group, and from npm, which
 * passes its own SIGINT on. The second one must not look like an impatient "stop at once". A person cannot press it
 * again this fast; npm's copy follows within milliseconds.
 */
const sameSignalWithinMs = 250

function ignoreRepeatedSignals() {
  const emit = process.emit
  const lastAt = new Map()
  process.emit = function emitOnce(event, ...args) {
    if (event === 'SIGINT' || event === 'SIGTERM') {
      const now = performance.now()
      const previous = lastAt.get(event) ?? Number.NEGATIVE_INFINITY
      lastAt.set(event, now)
      if (now - previous < sameSignalWithinMs) return true
    }
    return emit.call(this, event, ...args)
  }
}

const code = await build({ explain: true })
if (code !== 0) process.exit(code)

// Before the server subscribes: Node binds process.emit when the first listener for a signal is added.
ignoreRepeatedSignals()
const main = path.join(root, 'packages/server/dist/cli/main.js')
process.argv.splice(1, process.argv.length - 1, main, 'serve', ...process.argv.slice(2))
await import(pathToFileURL(main).href)
