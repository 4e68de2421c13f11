import { type ChildProcess, spawn } from 'node:child_process'
import { randomBytes } from 'node:crypto'
import { once } from 'node:events'
import { createRequire } from 'node:module'
import { setTimeout as delay } from 'node:timers/promises'
import { fileURLToPath } from 'node:url'
import { inject } from 'vitest'

export interface RunningServer {
  readonly origin: string
  stop(): Promise<void>
}

const program = fileURLToPath(new URL('../../server/dist/cli/main.js', import.meta.url))
/** The driver is the server's: the client, and its tests, depend on nothing. */
const serversModule = createRequire(program)
/** A machine that is busy with other tests is neither to refuse nor to queue. */
const calm = {
  SPILLWAY_PRESSURE_LOOP_DELAY_MS: '60000',
  SPILLWAY_ACCEPT_WAIT_BUDGET_MS: '60000',
  SPILLWAY_BUSY_QUEUE_ABOVE: '1',
  SPILLWAY_STORE_TIMEOUT_MS: '20000',
}

const living = new Set<ChildProcess>()
process.once('exit', () => {
  for (const child of living) child.kill('SIGKILL')
})

interface Connection {
  connect(): Promise<void>
  query(statement: string): Promise<unknown>
  end(): Promise<void>
}

async function administer(statement: string): Promise<void> {
  const { Client } = serversModule('pg') as { Client: new (options: { connectionString: string }) => Connection }
  const connection = new Client({ connectionString: inject('databaseUrl') })
  await connection.connect()
  await connection.query(statement).finally(() => connection.end())
}

/** A migrated database without a row. */
export async function freshDatabase(): Promise<{ url: string; drop(): Promise<void> }> {
  const name = `client_${process.pid}_${randomBytes(6).toString('hex')}`
  await administer(`CREATE DATABASE ${name} TEMPLATE ${inject('templateDatabase')} ENCODING 'UTF8' LOCALE 'C'`)
  const { href } = Object.assign(new URL(inject('databaseUrl')), { pathname: `/${name}` })
  return { url: href, drop: () => administer(`DROP DATABASE IF EXISTS ${name} WITH (FORCE)`) }
}

/** The built server as a process of its own, with a database that goes with it. */
export async function runningServer(env: Record<string, string> = {}): Promise<RunningServer> {
  const database = await freshDatabase()
  const { PATH = '', HOME = '/' } = process.env
  const own = { PATH, HOME, SPILLWAY_PORT: '0', SPILLWAY_LOG_LEVEL: 'warn', DATABASE_URL: database.url }
  const server = spawn(process.execPath, [program, 'serve'], {
    env: { ...own, ...calm, ...env },
    stdio: ['ignore', 'inherit', 'pipe'],
  })
  living.add(server)
  const ended = once(server, 'close').then(() => living.delete(server))
  let stderr = ''
  const origin = await new Promise<string>((resolve, reject) => {
    server.stderr.setEncoding('utf8').on('data', (text: string) => {
      stderr += text
      const found = /listens on (http:\S+)/.exec(stderr)?.[1]
      if (found !== undefined) resolve(found)
    })
    server.once('close', () => reject(new Error(`the server ended before it listened:\n${stderr}`)))
  })
  await ready(origin)
  return {
    origin,
    stop: async () => {
      // Its data goes with it: there is nothing to wait for.
      server.kill('SIGKILL')
      await ended
      await database.drop()
    },
  }
}

async function ready(origin: string): Promise<void> {
  for (const deadline = performance.now() + 30_000; ; ) {
    const answer = await fetch(`${origin}/health/ready`)
    if (answer.ok) return
    if (performance.now() > deadline) throw new Error(`the server is not ready: ${await answer.text()}`)
    await delay(20)
  }
}
