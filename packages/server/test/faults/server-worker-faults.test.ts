/** `spillway worker` listens nowhere: with the database away, nothing but itself keeps it alive. */
import { spawn } from 'node:child_process'
import { chmod, mkdtemp, readdir, readFile, rm } from 'node:fs/promises'
import { tmpdir } from 'node:os'
import { join } from 'node:path'
import { type EmbeddedServer, startEmbedded } from '@spillway/embedded-postgres'
import { afterAll, afterEach, beforeAll, describe, expect, it } from 'vitest'
import { addressOf, type HalfOpenProxy, startHalfOpenProxy, through } from '../../../spillway/test/half-open-proxy.js'
import {
  type Ended,
  type Env,
  endAll,
  finishes,
  program,
  type ServerProcess,
  startServer,
  startTarget,
  submit,
  type Target,
  until,
  untilReady,
} from '../server-process.js'

interface Worker {
  /** Waits for a log line after the last one that was waited for. Fails when the worker ended, which it never should. */
  says(message: string): Promise<void>
  /** SIGTERM, and the end that follows in time. */
  stop(): Promise<Ended>
}

/** A few timeouts of the store, and a busy machine's. */
const stopMsMax = 20_000
const silent = { info: () => undefined, warn: () => undefined, error: () => undefined }
const workers = new Set<() => Promise<void>>()

async function startWorker(env: Env): Promise<Worker> {
  const { PATH = '', HOME = '/' } = process.env
  const child = spawn(process.execPath, [program, 'worker'], {
    env: { PATH, HOME, ...env },
    stdio: ['ignore', 'pipe', 'pipe'],
  })
  const written = { stdout: '', stderr: '' }
  for (const name of ['stdout', 'stderr'] as const) {
    child[name].setEncoding('utf8').on('data', (chunk: string) => {
      written[name] += chunk
    })
  }
  let ended: Ended | undefined
  const end = new Promise<Ended>((resolve, reject) => {
    child.once('error', reject)
    child.once('close', (code, signal) => {
      ended = { code, signal }
      resolve(ended)
    })
  })
  workers.add(async () => {
    child.kill('SIGKILL')
    await end
  })
  let from = 0
  const wait = (stream: keyof typeof written, text: string): Promise<number> =>
    until(`the worker says "${text}"`, () => {
      const at = written[stream].indexOf(text, stream === 'stdout' ? from : 0)
      if (at >= 0) return at + text.length
      if (ended === undefined) return undefined
      throw new Error(`The worker ended with ${ended.code ?? ended.signal}.\n${written.stderr}\n${written.stdout}`)
    })
  await wait('stderr', 'listens nowhere')
  return {
    says: async (message) => {
      from = await wait('stdout', message)
    },
    stop: () => {
      child.kill('SIGTERM')
      return until('the worker ends', () => ended, stopMsMax)
    },
  }
}

describe('a worker whose database goes away', () => {
  let dir: string
  let own: EmbeddedServer
  let proxy: HalfOpenProxy
  let target: Target
  let gateway: ServerProcess
  const start = () =>
    startEmbedded({
      dataDir: join(dir, 'data'),
      log: silent,
      settings: { min_wal_size: '80MB', shared_buffers: '16MB' },
    })
  const env = (url: string): Env => ({ DATABASE_URL: url, SPILLWAY_FORWARD_ALLOW: target.origin })

  beforeAll(async () => {
    dir = await mkdtemp(join(tmpdir(), 'spillway-worker-'))
    await chmod(dir, 0o755)
    own = await start()
    proxy = await startHalfOpenProxy(addressOf(own.url))
    target = await startTarget()
    // It runs nothing that was asked for as a ticket: what runs then, the worker has run.
    gateway = await startServer({
      ...env(through(proxy, own.url)),
      SPILLWAY_PORT: '0',
      SPILLWAY_ROLES: 'gateway',
      SPILLWAY_PRESSURE_LOOP_DELAY_MS: '60000',
    })
  })

  afterEach(async () => {
    for (const kill of workers) await kill()
    workers.clear()
  })

  afterAll(async () => {
    await endAll()
    await proxy.close()
    await target.close()
    await own.stop()
    await rm(dir, { recursive: true, force: true })
  })

  async function expectWork(path: string): Promise<void> {
    await untilReady(gateway)
    const order = { queue: path }
    const { status, body } = await submit(gateway, `${target.origin}/${path}`, order, { prefer: 'respond-async' })
    expect(status).toBe(202)
    expect((await finishes(gateway, body.operationId)).status).toBe('completed')
    expect(target.calls.filter((call) => call.path === `/${path}`)).toHaveLength(1)
  }

  it('stays alive while PostgreSQL is stopped, and works when it is started again', async () => {
    const worker = await startWorker(env(through(proxy, own.url)))
    await expectWork('before-the-stop')
    await own.stop()
    try {
      await worker.says('database not reachable')
    } finally {
      own = await start()
      proxy.target = addressOf(own.url)
    }
    await worker.says('database reachable again')
    await expectWork('after-the-start')
    expect(await worker.stop()).toEqual({ code: 0, signal: null })
  }, 60_000)

  it('stays alive while it cannot be reached, at its start and later', async () => {
    const mine = await startHalfOpenProxy(addressOf(own.url))
    try {
      await mine.refuse()
      const worker = await startWorker(env(through(mine, own.url)))
      await worker.says('database not reachable')
      await mine.pass()
      await worker.says('database connected')
      await expectWork('reachable-later')
      await mine.refuse()
      await worker.says('database not reachable')
      await mine.pass()
      await worker.says('database reachable again')
      await expectWork('reachable-again')
    } finally {
      await mine.close()
    }
  }, 60_000)

  it('stops in time though PostgreSQL, still connected, says nothing', async () => {
    const worker = await startWorker(env(own.url))
    await expectWork('before-the-freeze')
    const pids = await postgresProcesses(own.pid)
    expect(pids.length).toBeGreaterThan(5)
    for (const pid of pids) process.kill(pid, 'SIGSTOP')
    try {
      expect(await worker.stop()).toEqual({ code: 0, signal: null })
    } finally {
      for (const pid of pids) process.kill(pid, 'SIGCONT')
    }
  }, 60_000)
})

/** The postmaster and its backends. */
async function postgresProcesses(postmaster: number): Promise<number[]> {
  const found = [postmaster]
  for (const name of await readdir('/proc')) {
    if (!/^\d+$/.test(name)) continue
    const stat = await readFile(`/proc/${name}/stat`, 'utf8').catch(() => '')
    if (Number(stat.slice(stat.lastIndexOf(')') + 2).split(' ')[1]) === postmaster) found.push(Number(name))
  }
  return found
}
