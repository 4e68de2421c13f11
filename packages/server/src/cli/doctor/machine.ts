import { existsSync } from 'node:fs'
import { access, constants, readFile, statfs } from 'node:fs/promises'
import { createRequire } from 'node:module'
import { createServer } from 'node:net'
import { dirname, join, resolve } from 'node:path'
import { ApiKeysError, parseApiKeys } from '../../auth/api-keys.js'
import type { Config } from '../../config/index.js'
import { codeOf, type Finding, hint, right, wrong } from './finding.js'

const require = createRequire(import.meta.url)

/** The same as `engines` in package.json. */
const nodeMin = [20, 19] as const

export function checkNode(version: string = process.versions.node): Finding {
  const [major = 0, minor = 0] = version.split('.').map(Number)
  const enough = major > nodeMin[0] || (major === nodeMin[0] && minor >= nodeMin[1])
  const name = 'Node.js'
  return enough ? right(name, version) : wrong(name, version, `install Node.js ${nodeMin.join('.')} or newer`)
}

/** With DATABASE_URL the folder is not used. */
export async function checkDataDir(dataDir: string): Promise<Finding[]> {
  const wanted = resolve(dataDir)
  let existing = wanted
  while (!existsSync(existing) && dirname(existing) !== existing) existing = dirname(existing)
  const name = 'data folder'
  try {
    await access(existing, constants.W_OK | constants.X_OK)
  } catch (error) {
    const fix = 'make it writable for this user, or set SPILLWAY_DATA_DIR to another folder'
    return [wrong(name, `${existing} is not writable (${codeOf(error)})`, fix)]
  }
  const { bavail, bsize } = await statfs(existing)
  const detail = existing === wanted ? `${wanted} is writable` : `${wanted} will be made`
  return [right(name, detail), judgeFreeDisk(bavail * bsize)]
}

const gibibyte = 1_073_741_824

/** An empty cluster takes 0.1 GiB, and its write-ahead log may take some GiB more. */
export function judgeFreeDisk(freeBytes: number): Finding {
  const name = 'free disk'
  const detail = `${(freeBytes / gibibyte).toFixed(1)} GiB`
  const fix = 'free some space, or set SPILLWAY_DATA_DIR to a folder on a larger disk'
  if (freeBytes < gibibyte / 2) return wrong(name, detail, fix)
  if (freeBytes < 5 * gibibyte) return hint(name, `${detail}: little for a long queue`, fix)
  return right(name, detail)
}

const platforms: Partial<Record<NodeJS.Platform, string>> = { linux: 'linux', darwin: 'darwin', win32: 'windows' }

/** The binaries are dependencies of the package that runs them. */
const resolveBinaries = (name: string): string =>
  createRequire(require.resolve('@spillway/embedded-postgres')).resolve(name)

/** A problem only where they are needed: with DATABASE_URL nobody starts them. */
export function checkBinaries(needed: boolean, resolvePackage = resolveBinaries): Finding {
  const packageName = `@embedded-postgres/${platforms[process.platform] ?? process.platform}-${process.arch}`
  const name = 'embedded PostgreSQL'
  const missing = (detail: string): Finding =>
    (needed ? wrong : hint)(
      name,
      `${packageName} ${detail}`,
      'npm i @spillway/embedded-postgres (without --omit=optional), or set DATABASE_URL',
    )
  try {
    const program = process.platform === 'win32' ? 'postgres.exe' : 'postgres'
    const path = join(dirname(dirname(resolvePackage(packageName))), 'native', 'bin', program)
    return existsSync(path) ? right(name, packageName) : missing('has no server program')
  } catch (error) {
    return missing(`is not installed (${codeOf(error)})`)
  }
}

export async function checkApiKeysFile(path: string): Promise<Finding> {
  const name = 'API keys'
  const fix = 'SPILLWAY_API_KEYS names a JSON file {"sha256:<hex of the key>":{"identity":"…","roles":[…]}}'
  try {
    parseApiKeys(await readFile(path, 'utf8'))
    return right(name, path)
  } catch (error) {
    const detail = error instanceof ApiKeysError ? error.message : `${path} cannot be read (${codeOf(error)})`
    return wrong(name, detail, fix)
  }
}

export async function checkPort({ host, port }: Config['server']): Promise<Finding> {
  const name = 'port'
  if (port === 0) return right(name, 'a free one will be taken')
  const failure = await tryListening(host, port)
  if (failure === null) return right(name, `${host}:${port} is free`)
  if (failure !== 'EADDRINUSE') {
    const fix = 'set SPILLWAY_HOST and SPILLWAY_PORT to an address of this machine and a port that this user may open'
    return wrong(name, `cannot listen on ${host}:${port} (${failure})`, fix)
  }
  const spillway = await askHealth(host, port)
  if (spillway !== null) return right(name, `Spillway ${spillway} answers on ${host}:${port}`)
  return wrong(name, `another program listens on ${host}:${port}`, 'stop it, or set SPILLWAY_PORT')
}

function tryListening(host: string, port: number): Promise<string | null> {
  return new Promise((settle) => {
    const probe = createServer()
    probe.once('error', (error) => settle(codeOf(error)))
    probe.listen({ host, port, exclusive: true }, () => probe.close(() => settle(null)))
  })
}

/** The version of the Spillway server at this address; null if it is another server. */
async function askHealth(host: string, port: number): Promise<string | null> {
  const reachable = host === '0.0.0.0' ? '127.0.0.1' : host === '::' ? '::1' : host
  const authority = reachable.includes(':') ? `[${reachable}]` : reachable
  try {
    const response = await fetch(`http://${authority}:${port}/_health`, { signal: AbortSignal.timeout(2_000) })
    const health: unknown = await response.json()
    if (typeof health !== 'object' || health === null) return null
    return 'version' in health && 'uptime_seconds' in health ? String(health.version) : null
  } catch (error) {
    // No answer, or not JSON: not a Spillway server. Any other failure is a bug here.
    if (error instanceof TypeError || error instanceof SyntaxError || error instanceof DOMException) return null
    throw error
  }
}
