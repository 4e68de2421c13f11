import { afterEach, beforeEach, describe, expect, it, vi } from 'vitest'
import { version } from '../version.js'
import { runCli } from './program.js'

let asked: string[]

beforeEach(() => {
  asked = []
  for (const name of Object.keys(process.env)) if (name.startsWith('SPILLWAY_')) vi.stubEnv(name, undefined)
  vi.stubGlobal('fetch', async (url: URL) => {
    asked.push(url.href)
    return new Response(JSON.stringify({ items: [], next_cursor: null }))
  })
})

afterEach(() => {
  vi.restoreAllMocks()
  vi.unstubAllGlobals()
  vi.unstubAllEnvs()
})

async function run(...args: string[]) {
  let out = ''
  let err = ''
  const code = await runCli(args, {
    out: (text) => {
      out += text
    },
    err: (text) => {
      err += text
    },
    interactive: false,
  })
  return { code, out, err }
}

describe('runCli', () => {
  it('prints its version', async () => {
    expect(await run('--version')).toEqual({ code: 0, out: `${version}\n`, err: '' })
    expect(version).toMatch(/^\d+\.\d+\.\d+/u)
  })

  it.each([
    '',
    'serve',
    'worker',
    'migrate',
    'config',
    'doctor',
    'ops',
    'ops list',
    'ops show',
    'ops retry',
    'ops cancel',
    'dead-letters',
    'dead-letters list',
    'dead-letters redrive',
    'dead-letters purge',
  ])('helps with "%s", with an example', async (command) => {
    const { code, out } = await run(...command.split(' ').filter(Boolean), '--help')
    expect(code).toBe(0)
    expect(out).toContain('Examples')
    expect(out).toContain(`Usage: spillway ${command}`)
  })

  it.each([
    ['bogus'],
    ['bogus', '--help'],
    ['--bogus'],
    ['ops'],
    ['ops', 'bogus'],
    ['ops', 'list', '--bogus'],
    ['ops', 'show'],
    ['ops', 'show', 'a', 'b'],
    ['ops', 'list', '--url'],
    ['ops', 'list', '--url', 'ftp://x'],
    ['config', '--queue', 'x'],
    ['dead-letters', 'purge', '--queue', 'x'],
    [],
  ])('does not understand %j: exit 2, no stack', async (...args) => {
    const { code, out, err } = await run(...args)
    expect(code).toBe(2)
    expect(out).toBe('')
    expect(err).not.toBe('')
    expect(err).not.toMatch(/\n\s+at /u)
  })

  it('names the commands of a group', async () => {
    expect((await run('ops')).err).toContain('Usage: spillway ops <list|show|retry|cancel>')
    expect((await run('dead-letters', 'bogus')).err).toContain('Usage: spillway dead-letters <list|show|redrive|purge>')
  })

  it('hands options on as they were typed', async () => {
    await run('ops', 'list', '--queue', '007', '--partition=1e3', '--url', 'http://h:9')
    expect(asked).toEqual(['http://h:9/api/v1/operations?queue=007&partition=1e3'])
  })

  it('takes the address and the key from the environment', async () => {
    vi.stubEnv('SPILLWAY_URL', 'http://elsewhere:1')
    await run('dead-letters', 'list')
    expect(asked).toEqual(['http://elsewhere:1/api/v1/dead-letters'])
  })

  it('lists the settings, and refuses a wrong one by name', async () => {
    const { code, out } = await run('config', '--json')
    expect(code).toBe(0)
    expect(JSON.parse(out)).toContainEqual(expect.objectContaining({ name: 'SPILLWAY_PORT', value: '7745' }))
    vi.stubEnv('SPILLWAY_PORT', 'eighty')
    const refused = await run('config')
    expect(refused.code).toBe(2)
    expect(refused.err).toContain('SPILLWAY_PORT')
  })

  it('shows a stack only when debugging', async () => {
    vi.stubGlobal('fetch', () => Promise.reject(new TypeError('fetch failed')))
    const quiet = await run('ops', 'list')
    expect(quiet.code).toBe(1)
    expect(quiet.err).not.toMatch(/\n\s+at /u)
    vi.stubEnv('SPILLWAY_LOG_LEVEL', 'debug')
    expect((await run('ops', 'list')).err).toMatch(/\n\s+at /u)
  })
})
