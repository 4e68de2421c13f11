/**
 * What the README shows is run: the server by `npm start`, every other `sh` block by a shell, and where an answer stands
 * below a block, it is compared with the real one ("…" stands for any text; members that are left out are not looked at).
 */
import { spawn } from 'node:child_process'
import { mkdtemp, readFile, rm, symlink, writeFile } from 'node:fs/promises'
import { tmpdir } from 'node:os'
import { join } from 'node:path'
import { fileURLToPath } from 'node:url'
import { freePort } from '@spillway/embedded-postgres/internal'
import { afterAll, beforeAll, describe, expect, it } from 'vitest'
import { program, until } from '../server-process.js'

const root = fileURLToPath(new URL('../../../../', import.meta.url))
const readme = await readFile(join(root, 'README.md'), 'utf8')
const blocks = [...readme.matchAll(/^```(\w+)\n([\s\S]*?)^```$/gm)].map(([, language = '', text = '']) => ({
  language,
  text: text.trim(),
}))
const commands = blocks.flatMap((block, i) => {
  if (block.language !== 'sh') return []
  const answer = blocks[i + 1]?.language === 'json' ? blocks[i + 1]?.text : undefined
  return [{ text: block.text, answer }]
})
/** Run by other means: the first below, the second by running this test. */
const installs = ['npm ci && npm start', 'npm ci && npm test']
const { PATH = '', HOME = '/' } = process.env

interface Process {
  readonly said: () => string
  readonly ended: Promise<number | null>
  signal(signal: NodeJS.Signals): void
}

/** In a process group of its own, as a shell starts a command: a signal reaches all of it. */
function run(command: string, args: readonly string[], env: Record<string, string>, cwd: string): Process {
  const child = spawn(command, args, {
    cwd,
    env: { PATH, HOME, ...env },
    detached: true,
    stdio: ['ignore', 'pipe', 'pipe'],
  })
  let said = ''
  for (const stream of [child.stdout, child.stderr]) {
    stream.setEncoding('utf8').on('data', (text: string) => {
      said += text
    })
  }
  const ended = new Promise<number | null>((resolve, reject) => {
    child.once('error', reject)
    child.once('close', resolve)
  })
  return { said: () => said, ended, signal: (signal) => void process.kill(-(child.pid ?? 0), signal) }
}

function matching(expected: unknown): unknown {
  if (expected === '…') return expect.any(String)
  if (typeof expected !== 'object' || expected === null) return expected
  return expect.objectContaining(
    Object.fromEntries(Object.entries(expected).map(([name, value]) => [name, matching(value)])),
  )
}

let dir: string
beforeAll(async () => {
  dir = await mkdtemp(join(tmpdir(), 'spillway-readme-'))
})
afterAll(() => rm(dir, { recursive: true, force: true }))

describe('README', () => {
  let server: Process
  let origin: string

  beforeAll(async () => {
    const env = { SPILLWAY_PORT: '0', SPILLWAY_DATA_DIR: join(dir, 'data') }
    server = run('npm', ['start'], env, root)
    origin = await until('the server listens', () => /listens on (http:\S+)/.exec(server.said())?.[1], 60_000)
  })
  afterAll(async () => {
    server.signal('SIGINT')
    expect(await server.ended).toBe(0)
  })

  it('shows what a server says at its start', () => {
    expect(commands[0]?.text).toBe(installs[0])
    expect(server.said()).toContain('curl -X POST')
  })

  it.each(commands.filter(({ text }) => !installs.includes(text)))(
    'can be followed: $text',
    async ({ text, answer }) => {
      const here = text
        .replaceAll('http://127.0.0.1:7745', origin)
        .replaceAll('npx spillway', `'${process.execPath}' '${program}'`)
      // The port of `doctor`: one that nobody listens on.
      const env = { SPILLWAY_URL: origin, SPILLWAY_PORT: String(await freePort()) }
      const shell = run('bash', ['--norc', '-euo', 'pipefail', '-c', here], env, dir)
      expect(await shell.ended, shell.said()).toBe(0)
      if (answer !== undefined) expect(JSON.parse(shell.said())).toEqual(matching(JSON.parse(answer)))
    },
  )

  it('compares an answer where it shows one', () => {
    expect(commands.filter(({ answer }) => answer !== undefined).length).toBeGreaterThanOrEqual(3)
  })
})

describe('the library in the README', () => {
  it('serves its route', async () => {
    const [snippet = ''] = blocks.filter(({ language }) => language === 'js').map(({ text }) => text)
    const port = await freePort()
    await symlink(join(root, 'node_modules'), join(dir, 'node_modules'))
    await writeFile(join(dir, 'shop.mjs'), snippet.replace('port: 3000', `port: ${port}`))
    const shop = run(process.execPath, ['shop.mjs'], {}, dir)
    try {
      const order = () =>
        fetch(`http://127.0.0.1:${port}/orders`, {
          method: 'POST',
          headers: { 'content-type': 'application/json', 'x-customer': 'ann' },
          body: JSON.stringify({ customer: 'ann', item: 'tea' }),
        }).catch(() => undefined)
      const answer = await until('the shop answers', order, 20_000)
      expect(answer.status).toBe(201)
      expect(answer.headers.get('ratelimit')).toMatch(/^"orders.place";r=99;t=\d+$/)
      const body = (await answer.json()) as { operationId: string }
      expect(body).toMatchObject({ status: 'executed', result: { shipped: 'tea', as: body.operationId } })
    } finally {
      shop.signal('SIGTERM')
      expect(await shop.ended, shop.said()).toBe(0)
    }
  })
})
