import { hash, timingSafeEqual } from 'node:crypto'
import { readFileSync, statSync } from 'node:fs'
import { isRole, type Principal, type Role, roles } from './identity.js'

/** Thrown at start for an unusable key file. Later the last good table stays in use and the fault is logged. */
export class ApiKeysError extends Error {
  readonly code = 'invalid_api_keys'
}

interface KeyEntry {
  digest: Buffer
  principal: Principal
}

type KeyTable = ReadonlyMap<string, KeyEntry>

const entryName = /^sha256:([0-9a-f]{64})$/i

function readQueues(value: unknown, where: string): readonly string[] | undefined {
  if (value === undefined) return undefined
  if (Array.isArray(value) && value.every((name) => typeof name === 'string' && name !== '')) return value
  throw new ApiKeysError(`${where}: "queues" must be an array of names`)
}

function readEntry(value: unknown, where: string): Principal {
  if (typeof value !== 'object' || value === null) throw new ApiKeysError(`${where}: must be an object`)
  const { identity, roles: given, queues, ...unknown } = value as Record<string, unknown>
  const extra = Object.keys(unknown)[0]
  if (extra !== undefined) throw new ApiKeysError(`${where}: unknown member ${JSON.stringify(extra)}`)
  if (typeof identity !== 'string' || identity === '') throw new ApiKeysError(`${where}: "identity" must be a name`)
  if (!Array.isArray(given) || !given.every(isRole)) {
    throw new ApiKeysError(`${where}: "roles" must be an array of ${roles.join(', ')}`)
  }
  const allowedQueues = readQueues(queues, where)
  const principal: Principal = { identity, roles: new Set<Role>(given) }
  return allowedQueues === undefined ? principal : { ...principal, queues: allowedQueues }
}

/** The file holds digests only: `{"sha256:<hex of the key>": {"identity", "roles", "queues"?}}`. */
export function parseApiKeys(text: string): KeyTable {
  let parsed: unknown
  try {
    parsed = JSON.parse(text)
  } catch (cause) {
    throw new ApiKeysError('the file is not JSON', { cause })
  }
  if (typeof parsed !== 'object' || parsed === null || Array.isArray(parsed)) {
    throw new ApiKeysError('the file must hold one JSON object')
  }
  const table = new Map<string, KeyEntry>()
  for (const [index, [name, value]] of Object.entries(parsed).entries()) {
    // Entries are named by position, so that a key written here in clear does not reach the log.
    const where = `entry ${index + 1}`
    const digest = entryName.exec(name)?.[1]?.toLowerCase()
    if (digest === undefined) throw new ApiKeysError(`${where}: its name must be sha256: and 64 hex digits`)
    table.set(digest, { digest: Buffer.from(digest, 'hex'), principal: readEntry(value, where) })
  }
  return table
}

/** How long a removed key may still work, in milliseconds. */
const reloadCheckMs = 2_000

/**
 * Checks the file again at most every two seconds, when a key is looked up. A stat costs microseconds, and checking before
 * use means that an idle server does not accept a key that was removed an hour ago.
 */
export function openApiKeyFile(path: string, onFault: (fault: unknown) => void, now: () => number) {
  const version = (): string => {
    const { mtimeMs, size, ino } = statSync(path)
    return `${mtimeMs} ${size} ${ino}`
  }
  const load = (): KeyTable => parseApiKeys(readFileSync(path, 'utf8'))

  let loadedVersion: string
  let table: KeyTable
  try {
    loadedVersion = version()
    table = load()
  } catch (cause) {
    if (cause instanceof ApiKeysError) throw new ApiKeysError(`${path}: ${cause.message}`, { cause })
    throw new ApiKeysError(`${path}: cannot be read`, { cause })
  }
  let checkedAt = now()

  const reload = () => {
    checkedAt = now()
    try {
      const current = version()
      if (current === loadedVersion) return
      // Remembered before loading, so that a broken file is reported once and not every two seconds.
      loadedVersion = current
      table = load()
    } catch (fault) {
      onFault(fault)
    }
  }

  return {
    find(key: string): Principal | undefined {
      if (now() - checkedAt >= reloadCheckMs) reload()
      const digest = hash('sha256', key, 'buffer')
      const entry = table.get(digest.toString('hex'))
      // The lookup is by a digest that the caller cannot control; the deciding comparison takes constant time.
      return entry !== undefined && timingSafeEqual(entry.digest, digest) ? entry.principal : undefined
    },
  }
}
