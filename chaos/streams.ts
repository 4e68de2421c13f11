/**
 * `npm run chaos -- --streams`: processes, PostgreSQL and Redis are killed during hundreds of streams, first with the log in
 * PostgreSQL, then in Redis; then clients that come and go at random, and one user against many. What is played and judged
 * is what the tests play.
 */
import { createWriteStream } from 'node:fs'
import { mkdtemp, rm, writeFile } from 'node:fs/promises'
import { tmpdir } from 'node:os'
import { join } from 'node:path'
import pg from 'pg'
import { churn } from '../packages/server/test/generation-churn.js'
import { contend } from '../packages/server/test/generation-contention.js'
import {
  type GenerationFleet,
  type GenerationFleetOptions,
  startGenerationFleet,
} from '../packages/server/test/generation-faults-fleet.js'
import { killed, pausedPastLease, settled, stopped, wave } from '../packages/server/test/generation-faults-wave.js'
import { findRedis, type RedisServer, startRedis } from '../packages/spillway/test/setup/redis.js'
import { type Cluster, startCluster } from './cluster.js'
import { machine } from './report.js'

export interface StreamsRunOptions {
  seed: number
  /** Streams at once in each wave. */
  streams: number
  reportFile: string | null
  keep: boolean
  say(line: string): void
  signal: AbortSignal
}

interface Played {
  name: string
  figures: Record<string, unknown>
  findings: string[]
}

interface Stage {
  cluster: Cluster
  seed: number
  streams: number
  say(line: string): void
  signal: AbortSignal
}

/** Of a reader: on a small machine hundreds of streams take a minute to begin. */
const patienceMs = 300_000
const users = 60
const roomy = {
  GENERATION_CONCURRENCY: '512',
  QUEUE_FAILOVER_TIMEOUT_SECONDS: '120',
  STREAM_FIRST_TOKEN_SECONDS: '120',
}
const perUser = 3

/** Ends with the findings; null when it was interrupted. */
export async function runStreams(options: StreamsRunOptions): Promise<string[] | null> {
  const { reportFile, keep, say, signal, seed, streams } = options
  const startedAt = new Date()
  const folder = await mkdtemp(join(tmpdir(), 'spillway-chaos-streams-'))
  const databaseLog = createWriteStream(join(folder, 'database.log'))
  const played: Played[] = []
  try {
    say('starting PostgreSQL')
    const cluster = await startCluster(join(folder, 'data'), (line) => databaseLog.write(`${line}\n`))
    try {
      const stage: Stage = { cluster, seed, streams, say, signal }
      for (const part of [inPostgres, inRedis, inKeptRedis, atRandom, oneAgainstMany]) {
        if (!signal.aborted) played.push(...(await part(stage)))
      }
    } finally {
      await cluster.stop()
    }
  } finally {
    await new Promise((resolve) => databaseLog.end(resolve))
    await rm(join(folder, 'data'), { recursive: true, force: true })
  }
  if (signal.aborted) return null
  const findings = played.flatMap((one) => one.findings)
  const file = reportFile ?? join(tmpdir(), 'spillway-chaos-streams.json')
  const seconds = Math.round((Date.now() - startedAt.getTime()) / 1_000)
  const report = { startedAt: startedAt.toISOString(), seconds, seed, streams, machine: machine(), parts: played }
  await writeFile(file, `${JSON.stringify(report, null, 2)}\n`)
  const isKept = keep || findings.length > 0
  if (!isKept) await rm(folder, { recursive: true, force: true })
  const verdict = findings.length === 0 ? 'nothing was found' : `${findings.length} violations`
  say(`${verdict}; report: ${file}${isKept ? `; the log of PostgreSQL: ${folder}` : ''}`)
  return findings
}

async function inPostgres(stage: Stage): Promise<Played[]> {
  return withFleet(stage, 'postgres', fourProcesses, async (fleet) => [
    await struck(stage, fleet, 'postgres: worker', () => killed(fleet, 'worker')),
    await struck(stage, fleet, 'postgres: gateway', () => killed(fleet, 'gateway')),
    await struck(stage, fleet, 'postgres: worker paused', () => pausedPastLease(fleet, 'worker')),
    await struck(stage, fleet, 'postgres: worker stopped', async (release) => {
      const code = await stopped(fleet, 'worker', release)
      if (code !== 0) throw new Error(`a worker that was asked to stop ended with ${code}`)
    }),
    await struck(stage, fleet, 'postgres: PostgreSQL', async () => {
      await stage.cluster.crash('postgres', 0)
    }),
  ])
}

async function inRedis(stage: Stage): Promise<Played[]> {
  return withRedis(stage, {}, (redis) =>
    withFleet(stage, 'redis', { ...fourProcesses, env: { ...roomy, REDIS_URL: redis.url } }, async (fleet) => [
      await struck(stage, fleet, 'redis: worker', () => killed(fleet, 'worker')),
      await struck(stage, fleet, 'redis: gateway', () => killed(fleet, 'gateway')),
      await struck(stage, fleet, 'redis: PostgreSQL', async () => {
        await stage.cluster.crash('postgres', 0)
      }),
      await struck(stage, fleet, 'redis: Redis, which forgets', () => redis.restart()),
    ]),
  )
}

async function inKeptRedis(stage: Stage): Promise<Played[]> {
  return withRedis(stage, { appendonly: 'yes', appendfsync: 'always' }, (redis) =>
    withFleet(stage, 'kept', { ...fourProcesses, env: { ...roomy, REDIS_URL: redis.url } }, async (fleet) => [
      await struck(stage, fleet, 'redis: Redis, which keeps everything', () => redis.restart()),
    ]),
  )
}

async function atRandom(stage: Stage): Promise<Played[]> {
  const name = 'at random'
  const clients = 2 * stage.streams
  const env = { GENERATION_CONCURRENCY: '50', CONNECTION_POOL_MAX_PER_USER: String(perUser) }
  return withFleet(stage, 'random', { roles: ['all', 'all'], env }, async (fleet) => {
    stage.say(`${name}: ${clients} clients`)
    const seen = await churn(fleet, { clients, width: 60, users: 20, crashes: 10, seed: stage.seed })
    const { transcripts: _transcripts, directAtOnce, ...counts } = seen
    const findings = await settled(fleet)
    for (const [user, most] of directAtOnce) {
      if (most > perUser) findings.push(`${user} had ${most} at once on the direct path`)
    }
    if (fleet.upstream.counts.open > 0) findings.push(`the upstream still has ${fleet.upstream.counts.open} open`)
    return [
      reported(stage, { name, figures: { ...counts, directAtOnce: Math.max(...directAtOnce.values()) }, findings }),
    ]
  })
}

async function oneAgainstMany(stage: Stage): Promise<Played[]> {
  const name = 'one against many'
  const env = { ...roomy, GENERATION_CONCURRENCY: '4' }
  return withFleet(stage, 'many', { roles: ['all'], env }, async (fleet) => {
    stage.say(`${name}: ${stage.streams} requests of one user, then 20 of others`)
    const { findings, ...figures } = await contend(fleet, { greedy: stage.streams, modest: 20, serviceMs: 100 })
    if (figures.greedyBefore.max > stage.streams / 5) {
      findings.push(`one waited for ${figures.greedyBefore.max} of the greedy user's`)
    }
    return [reported(stage, { name, figures, findings })]
  })
}

const fourProcesses = { roles: ['gateway', 'gateway', 'worker', 'worker'], env: roomy } as const

async function struck(
  stage: Stage,
  fleet: GenerationFleet,
  name: string,
  happens: (release: () => void) => Promise<void>,
): Promise<Played> {
  const { streams } = stage
  if (stage.signal.aborted) return { name, figures: {}, findings: [] }
  stage.say(`${name}: ${streams} streams`)
  const marker = name.replaceAll(/\W+/g, '-')
  // Slow enough for hundreds of them to be half-way at the same time.
  const seen = await wave(fleet, { name: marker, streams, users, tokens: 40, everyMs: 250, happens, patienceMs })
  const { all: _all, findings, ...figures } = seen
  if (seen.hit === 0) findings.push('none of the streams was under way when it happened')
  return reported(stage, { name, figures, findings })
}

function reported(stage: Stage, played: Played): Played {
  stage.say(`  ${JSON.stringify(played.figures)}`)
  for (const finding of played.findings.slice(0, 20)) stage.say(`  FOUND ${finding}`)
  return played
}

/** On a database of its own: what one part leaves must not be seen by the next. */
async function withFleet(
  stage: Stage,
  name: string,
  options: Omit<GenerationFleetOptions, 'url'>,
  play: (fleet: GenerationFleet) => Promise<Played[]>,
): Promise<Played[]> {
  const url = new URL(stage.cluster.url)
  url.pathname = `/streams_${name}`
  const client = new pg.Client({ connectionString: stage.cluster.url })
  await client.connect()
  await client.query(`CREATE DATABASE ${url.pathname.slice(1)} TEMPLATE template0 ENCODING 'UTF8' LOCALE 'C'`)
  await client.end()
  const fleet = await startGenerationFleet({ ...options, url: url.href })
  try {
    return await play(fleet)
  } finally {
    await fleet.close()
  }
}

async function withRedis(
  stage: Stage,
  settings: Record<string, string>,
  play: (redis: RedisServer) => Promise<Played[]>,
): Promise<Played[]> {
  const found = await findRedis()
  if ('missing' in found) {
    stage.say(`without Redis: ${found.missing}`)
    return []
  }
  const redis = await startRedis({ settings })
  try {
    return await play(redis)
  } finally {
    await redis.stop()
  }
}
