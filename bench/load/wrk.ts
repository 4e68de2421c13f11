/** wrk: one thread of C and LuaJIT, which leaves the machine to what is measured. */
import { execFile } from 'node:child_process'
import { existsSync } from 'node:fs'
import { mkdir, mkdtemp, readdir, rename, rm } from 'node:fs/promises'
import { homedir } from 'node:os'
import path from 'node:path'
import { fileURLToPath } from 'node:url'
import { promisify } from 'node:util'
import type { Children } from '../children.js'
import { type Counted, type LoadGenerator, toResult } from './load.js'
import { targetOf, uniquePrefix } from './requests.js'

const run = promisify(execFile)
const script = fileURLToPath(new URL('operations.lua', import.meta.url))
const fetchTimeoutMs = 60_000
/** What a Debian without them lacks to run its wrk. */
const debianPackages = ['wrk', 'libluajit-5.1-2', 'libluajit-5.1-common', 'libssl3']

interface Wrk {
  readonly command: string
  readonly env: Readonly<Record<string, string>>
  readonly version: string
}

/** On the PATH, or fetched once into the user's cache from the Debian archive; null where neither works. */
export async function findWrk(say: (text: string) => void): Promise<Wrk | null> {
  const { PATH = '' } = process.env
  const onPath = PATH.split(path.delimiter)
    .map((dir) => path.join(dir, 'wrk'))
    .find((file) => existsSync(file))
  if (onPath !== undefined) return probe(onPath, { PATH })
  const cache = path.join(process.env.XDG_CACHE_HOME ?? path.join(homedir(), '.cache'), 'spillway-bench', 'wrk')
  if (!existsSync(cache) && !(await fetchWrk(cache, say))) return null
  const libraries = (await readdir(path.join(cache, 'usr/lib'))).map((dir) => path.join(cache, 'usr/lib', dir))
  return probe(path.join(cache, 'usr/bin/wrk'), { PATH, LD_LIBRARY_PATH: libraries.join(':') })
}

async function probe(command: string, env: Readonly<Record<string, string>>): Promise<Wrk | null> {
  // wrk --version exits with 1 and prints its usage after the version.
  const said = await run(command, ['--version'], { env: { ...env } }).catch((fault: { stdout?: string }) => fault)
  const version = /wrk (?:debian\/)?(\S+)/.exec(said.stdout ?? '')?.[1]
  return version === undefined ? null : { command, env, version }
}

async function fetchWrk(cache: string, say: (text: string) => void): Promise<boolean> {
  if (process.platform !== 'linux') return false
  say('wrk is not installed: fetching it from the Debian archive into the cache')
  await mkdir(path.dirname(cache), { recursive: true })
  const dir = await mkdtemp(`${cache}-`)
  try {
    await run('apt-get', ['download', ...debianPackages], { cwd: dir, timeout: fetchTimeoutMs })
    for (const file of await readdir(dir)) {
      if (file.endsWith('.deb')) await run('dpkg', ['-x', file, 'root'], { cwd: dir })
    }
    await rename(path.join(dir, 'root'), cache)
    return true
  } catch (fault) {
    const [why = ''] = (fault instanceof Error ? fault.message : String(fault)).split('\n')
    say(`wrk cannot be fetched (${why}); autocannon takes its place`)
    return false
  } finally {
    await rm(dir, { recursive: true, force: true })
  }
}

export function wrkGenerator(wrk: Wrk, children: Children): LoadGenerator {
  return {
    name: `wrk ${wrk.version}`,
    async run(load) {
      const { origin, path: urlPath, connections, seconds } = load
      const flags = [load.async && 'async', load.keyed && 'keyed', load.identified && 'identified']
      const child = children.start({
        command: wrk.command,
        args: [
          ...['-t', '1', '-c', String(connections), '-d', `${seconds}s`, '--timeout', '10s', '-s', script],
          ...[`${origin}${urlPath}`, '--', new URL(origin).host, urlPath, targetOf(origin)],
          ...[String(load.lanes), uniquePrefix(), ...flags.filter((flag) => typeof flag === 'string')],
        ],
        env: wrk.env,
        cwd: path.dirname(script),
        name: 'wrk',
      })
      const [, json = ''] = await child.line(/^RESULT (.*)$/, (seconds + 30) * 1_000)
      await child.ended
      return toResult(load, JSON.parse(json) as Counted)
    },
  }
}
