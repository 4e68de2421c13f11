/** NATS servers with JetStream for a section, found and started as the tests do it; each in a temporary folder. */
import { mkdtemp, readFile, rm } from 'node:fs/promises'
import { tmpdir } from 'node:os'
import path from 'node:path'
import { setTimeout as delay } from 'node:timers/promises'
import { startNats } from '../packages/spillway/test/setup/nats.js'

export interface BenchNats {
  readonly url: string
  readonly pid: number
  stop(): Promise<void>
}

const pidTimeoutMs = 5_000
const pidPollMs = 10

export async function startBenchNats(): Promise<BenchNats> {
  const folder = await mkdtemp(path.join(tmpdir(), 'spillway-bench-nats-'))
  const forget = (): Promise<void> => rm(folder, { recursive: true, force: true })
  try {
    const pidFile = path.join(folder, 'pid')
    const server = await startNats({ settings: [`pid_file: ${JSON.stringify(pidFile)}`] })
    const stop = async (): Promise<void> => {
      await server.stop()
      await forget()
    }
    try {
      return { url: server.url, pid: await pidOf(pidFile), stop }
    } catch (fault) {
      await stop()
      throw fault
    }
  } catch (fault) {
    await forget()
    throw fault
  }
}

/** It greets before it has written who it is. */
async function pidOf(file: string): Promise<number> {
  for (const until = performance.now() + pidTimeoutMs; performance.now() < until; await delay(pidPollMs)) {
    const pid = Number(await readFile(file, 'utf8').catch(() => ''))
    if (pid > 0) return pid
  }
  throw new Error(`nats-server did not write its process id within ${pidTimeoutMs} ms`)
}
