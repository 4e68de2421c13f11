/** Where and with what a run was made: without it no figure means anything. */
import { execFileSync } from 'node:child_process'
import { closeSync, fdatasyncSync, openSync, readFileSync, rmSync, statfsSync, writeSync } from 'node:fs'
import { arch, availableParallelism, cpus, platform, release, tmpdir, totalmem } from 'node:os'
import path from 'node:path'
import { setTimeout as delay } from 'node:timers/promises'
import { findPeerNode } from './peer-node.js'
import type { BenchPostgres } from './section.js'
import { median } from './statistics.js'

export interface Commit {
  readonly id: string
  /** There were changes that were not committed. */
  readonly dirty: boolean
}

export interface Environment {
  readonly machine: {
    readonly cpu: string
    readonly cores: number
    readonly memoryGb: number
    readonly system: string
    /** Device and file system below PostgreSQL's data, if known. */
    readonly disk: string
    /** Median of writing 8 kB and making it durable: the floor of a lone commit. Null where the data is elsewhere. */
    readonly fdatasyncMs: number | null
    /** How much of the CPU others used just before the run. */
    readonly busyPercent: number
  }
  readonly versions: Readonly<Record<string, string>>
  readonly postgres: { readonly version: string; readonly settings: Readonly<Record<string, string>> }
  readonly commit: Commit
  readonly loadGenerator: string
}

const root = path.join(import.meta.dirname, '..')
const peers = ['fastify', 'pg', 'pg-boss', 'graphile-worker', 'bullmq', 'rate-limiter-flexible', 'resumable-stream']

export async function describeEnvironment(
  postgres: BenchPostgres & { readonly dataDir: string | null },
  loadGenerator: string,
): Promise<Environment> {
  const { dataDir } = postgres
  const busyPercent = await measureBusy()
  return {
    machine: {
      cpu: cpus()[0]?.model.trim() ?? 'unknown',
      cores: availableParallelism(),
      memoryGb: Math.round(totalmem() / 1024 ** 3),
      system: `${platform()} ${release()} ${arch()}`,
      disk: dataDir === null ? 'unknown (PostgreSQL was named)' : describeDisk(dataDir),
      fdatasyncMs: dataDir === null ? null : measureSync(dataDir),
      busyPercent,
    },
    versions: {
      node: process.versions.node,
      'node of the peers': findPeerNode().version,
      spillway: versionOf(path.join(root, 'packages/spillway')),
      ...Object.fromEntries(
        peers.map((name) => [name, versionOf(path.join(import.meta.dirname, 'node_modules', name))]),
      ),
    },
    postgres: { version: postgres.version, settings: postgres.settings },
    commit: describeCommit(),
    loadGenerator,
  }
}

function versionOf(dir: string): string {
  return (JSON.parse(readFileSync(path.join(dir, 'package.json'), 'utf8')) as { version: string }).version
}

function describeCommit(): Commit {
  const git = (...args: string[]): string =>
    execFileSync('git', args, { cwd: root, encoding: 'utf8', stdio: ['ignore', 'pipe', 'ignore'] }).trim()
  try {
    return { id: git('rev-parse', '--short=10', 'HEAD'), dirty: git('status', '--porcelain') !== '' }
  } catch {
    // An unpacked archive has no history; that is no reason not to measure.
    return { id: 'unknown', dirty: false }
  }
}

/** The longest mount point that is a prefix of the folder. */
export function mountOf(dir: string, mounts: string): { device: string; type: string } | null {
  let best: { device: string; type: string; point: string } | null = null
  for (const line of mounts.split('\n')) {
    const [device = '', point = '', type = ''] = line.split(' ')
    const isAbove = point === '/' || dir === point || dir.startsWith(`${point}/`)
    if (point !== '' && isAbove && point.length >= (best?.point.length ?? 0)) best = { device, type, point }
  }
  return best && { device: best.device, type: best.type }
}

function describeDisk(dir: string): string {
  if (platform() !== 'linux') return platform()
  const mount = mountOf(dir, readFileSync('/proc/mounts', 'utf8'))
  return mount === null ? 'unknown' : `${mount.device} (${mount.type})`
}

const tmpfsMagic = 0x01021994

/** In memory nothing is ever made durable: a commit costs nothing there, and a figure says nothing. */
export function isInMemory(dir: string | null): boolean {
  return dir !== null && platform() === 'linux' && statfsSync(dir).type === tmpfsMagic
}

const syncSamples = 50

function measureSync(dir: string): number {
  const file = path.join(dir, 'fdatasync-probe')
  const page = Buffer.alloc(8_192, 1)
  const descriptor = openSync(file, 'w')
  try {
    // Written once first: growing a file costs a second write, of its length, that a recycled WAL segment is spared.
    for (let n = 0; n < syncSamples; n++) writeSync(descriptor, page, 0, page.length, n * page.length)
    fdatasyncSync(descriptor)
    const samples: number[] = []
    for (let n = 0; n < syncSamples; n++) {
      const began = performance.now()
      writeSync(descriptor, page, 0, page.length, n * page.length)
      fdatasyncSync(descriptor)
      samples.push(performance.now() - began)
    }
    return median(samples)
  } finally {
    closeSync(descriptor)
    rmSync(file, { force: true })
  }
}

const busySampleMs = 1_000

/** Of all cores, while this process waits. */
async function measureBusy(): Promise<number> {
  const before = cpus()
  await delay(busySampleMs)
  return busyPercentOf(before, cpus())
}

type CpuTimes = readonly { readonly times: Readonly<Record<string, number>> }[]

export function busyPercentOf(before: CpuTimes, after: CpuTimes): number {
  const total = (all: CpuTimes): number => sum(all.flatMap(({ times }) => Object.values(times)))
  const idle = (all: CpuTimes): number => sum(all.map(({ times }) => times.idle ?? 0))
  const passed = total(after) - total(before)
  return passed <= 0 ? 0 : Math.round((1 - (idle(after) - idle(before)) / passed) * 100)
}

const sum = (values: readonly number[]): number => values.reduce((all, value) => all + value, 0)

/** More than the system's own housekeeping. */
const busyPercentMax = 10

/** A warning if something else used the machine when the run began, or null. */
export function busyWarning({ machine: { busyPercent } }: Environment): string | null {
  if (busyPercent <= busyPercentMax) return null
  return `the machine was ${busyPercent}% busy with other things when the run began, so figures are too low and uneven`
}

/** Why the figures must not be published, or null. */
export function publishingFault(environment: Environment, dataDir: string | null): string | null {
  const { fsync, synchronous_commit: commit, full_page_writes: pages } = environment.postgres.settings
  if (fsync !== 'on') return `PostgreSQL runs with fsync ${fsync}: nothing it confirms is durable`
  if (commit === 'off') return 'PostgreSQL runs with synchronous_commit off: what it confirms may be lost'
  if (pages !== 'on') return `PostgreSQL runs with full_page_writes ${pages}: a torn page would be lost`
  if (isInMemory(dataDir)) return `${tmpdir()} is in memory: set TMPDIR to a folder on a disk`
  return null
}
