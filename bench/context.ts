/** What a section is given: programs, the real server, and a place to say what it does. */
import { existsSync } from 'node:fs'
import { createRequire } from 'node:module'
import path from 'node:path'
import { fileURLToPath, pathToFileURL } from 'node:url'
import type { Children } from './children.js'
import type { LoadGenerator } from './load/index.js'
import { findPeerNode } from './peer-node.js'
import type { BenchContext, BenchPostgres, BenchProcess } from './section.js'

const benchDir = path.dirname(fileURLToPath(import.meta.url))
const spillwayProgram = path.join(benchDir, '../packages/server/dist/cli/main.js')
/** Compiles a program when it is loaded; costs nothing once it runs. */
const loader = pathToFileURL(createRequire(import.meta.url).resolve('tsx')).href
const readyTimeoutMs = 30_000
const readyPollMs = 25

export interface ContextOptions {
  readonly quick: boolean
  readonly postgres: BenchPostgres
  readonly children: Children
  readonly load: LoadGenerator
  say(text: string): void
}

export function createContext({ quick, postgres, children, load, say }: ContextOptions): BenchContext {
  let serversStarted = 0
  return {
    quick,
    postgres,
    load,
    say,
    start(program, options = {}) {
      const file = path.join(benchDir, program)
      if (!existsSync(file)) throw new Error(`there is no program bench/${program}`)
      return children.start({
        command: options.peer === true ? findPeerNode().path : process.execPath,
        args: ['--import', loader, file],
        env: environment(options.env),
        cwd: benchDir,
        name: program,
      })
    },
    async serve(env) {
      serversStarted += 1
      const databaseUrl = env.DATABASE_URL ?? (await postgres.createDatabase(`serve_${serversStarted}`))
      const child = children.start({
        command: process.execPath,
        args: [spillwayProgram, 'serve'],
        env: environment({ SPILLWAY_PORT: '0', DATABASE_URL: databaseUrl, ...env }),
        cwd: benchDir,
        name: 'spillway serve',
      })
      const [, origin = ''] = await child.errorLine(/listens on (http:\/\/\S+)/)
      await untilReady(origin, child)
      return Object.assign(child, { origin })
    },
  }
}

/** Nothing of the caller's leaks in: an unknown SPILLWAY_ name would stop the start, NODE_OPTIONS would tilt a figure. */
function environment(env: Readonly<Record<string, string>> = {}): Record<string, string> {
  const { PATH = '', HOME = '', TMPDIR } = process.env
  return { PATH, HOME, ...(TMPDIR !== undefined && { TMPDIR }), NODE_ENV: 'production', ...env }
}

async function untilReady(origin: string, child: BenchProcess & { readonly ended: Promise<unknown> }): Promise<void> {
  const deadline = performance.now() + readyTimeoutMs
  let isGone = false
  void child.ended.then(() => {
    isGone = true
  })
  for (;;) {
    const answer = await fetch(`${origin}/health/ready`).catch(() => null)
    await answer?.body?.cancel()
    if (answer?.status === 200) return
    if (isGone) throw new Error(`spillway serve ended before it was ready\n${child.stdout().slice(-2_000)}`)
    if (performance.now() > deadline) {
      throw new Error(`spillway serve was not ready within ${readyTimeoutMs} ms\n${child.stdout().slice(-2_000)}`)
    }
    await new Promise((resolve) => setTimeout(resolve, readyPollMs))
  }
}
