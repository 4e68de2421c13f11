import { spawn } from 'node:child_process'
import { once } from 'node:events'
import { mkdtemp, rm } from 'node:fs/promises'
import { tmpdir } from 'node:os'
import { join } from 'node:path'
import { fileURLToPath } from 'node:url'

const program = fileURLToPath(new URL('../../spillway/dist/cli/main.js', import.meta.url))

/** The built server as a process of its own, with its embedded store in a folder that goes with it. */
export async function runningServer(): Promise<{ origin: string; stop(): Promise<void> }> {
  const dataDir = await mkdtemp(join(tmpdir(), 'spillway-client-'))
  const { PATH = '', HOME = '/' } = process.env
  const server = spawn(process.execPath, [program, 'serve'], {
    env: { PATH, HOME, SPILLWAY_PORT: '0', SPILLWAY_DATA_DIR: dataDir, SPILLWAY_LOG_LEVEL: 'warn' },
    stdio: ['ignore', 'inherit', 'pipe'],
  })
  const ended = once(server, 'close')
  let told = ''
  const origin = await new Promise<string>((resolve, reject) => {
    server.stderr.setEncoding('utf8').on('data', (text: string) => {
      told += text
      const found = /listens on (http:\S+)/.exec(told)?.[1]
      if (found !== undefined) resolve(found)
    })
    server.once('close', () => reject(new Error(`the server ended before it listened:\n${told}`)))
  })
  return {
    origin,
    stop: async () => {
      server.kill('SIGTERM')
      await ended
      await rm(dataDir, { recursive: true, force: true })
    },
  }
}
