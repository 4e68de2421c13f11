/**
 * `npm run chaos -- --routing`: the overloads of the router's intake in full size, with the thresholds that it has by
 * default, on a gateway, two routers and a NATS server of their own. What is played and judged is what the tests play.
 */
import { createWriteStream } from 'node:fs'
import { mkdtemp, rm, writeFile } from 'node:fs/promises'
import { tmpdir } from 'node:os'
import { join } from 'node:path'
import { workloadSql } from '@spillway/server/internal'
import pg from 'pg'
import { coreSql, migrate } from 'spillway/workload'
import { drill } from '../packages/server/test/routing-drill.js'
import type { Scenario } from '../packages/server/test/routing-evidence.js'
import { type Finding, figures, judge, rules } from '../packages/server/test/routing-verdict.js'
import { schema, startCluster } from './cluster.js'
import { machine } from './report.js'

const usual = {
  bounds: { backlog: [10, 100, 1_000], latency: [500, 2_000, 5_000], inflight: [50, 200, 500] },
  ...{ detectionMaxMs: 1_500, hopeless: 20, decidePerMinute: 50, checkIntervalSeconds: 1, checkTimeoutMs: 1_000 },
} as const

export const scenarios: readonly Scenario[] = [
  // 200 messages a second at most: the backlog stays above its bound for seconds.
  {
    ...{ ...usual, name: 'backlog', messages: 2_000, viaGateway: 50, delayMs: 100, concurrency: [10, 10] },
    passes: ['backlog'],
  },
  // 100 a second, of more than 300 that come: they wait for longer than they are worked on.
  {
    ...{ ...usual, name: 'latency', messages: 1_000, overMs: 3_000, viaGateway: 20, delayMs: 2_000 },
    ...{ concurrency: [100, 100], passes: ['latency'] },
  },
  // One router takes nearly all of it, for two rounds: half of a thousand each would be at the bound, and not above it.
  {
    ...{ ...usual, name: 'in-flight', messages: 1_000, viaGateway: 100, delayMs: 1_000, concurrency: [510, 10] },
    passes: ['inflight'],
  },
  // What is handed out does not count as pending: together they hold less than the backlog has beyond its bound.
  {
    ...{ ...usual, name: 'combined', messages: 3_000, viaGateway: 50, delayMs: 3_000, concurrency: [600, 100] },
    passes: ['backlog', 'latency', 'inflight'],
  },
]

export interface RoutingRunOptions {
  reportFile: string | null
  keep: boolean
  say(line: string): void
  signal: AbortSignal
}

interface Played {
  name: string
  figures: ReturnType<typeof figures>
  findings: Finding[]
}

/** Ends with the findings; null when it was interrupted. */
export async function runRouting({ reportFile, keep, say, signal }: RoutingRunOptions): Promise<Finding[] | null> {
  const startedAt = new Date()
  const folder = await mkdtemp(join(tmpdir(), 'spillway-chaos-routing-'))
  const played: Played[] = []
  const databaseLog = createWriteStream(join(folder, 'database.log'))
  try {
    say('starting PostgreSQL')
    const cluster = await startCluster(join(folder, 'data'), (line) => databaseLog.write(`${line}\n`))
    try {
      for (const scenario of scenarios) {
        if (signal.aborted) return null
        played.push(await playOne(scenario, { folder, clusterUrl: cluster.url, say }))
      }
    } finally {
      await cluster.stop()
    }
  } finally {
    await new Promise((resolve) => databaseLog.end(resolve))
    await rm(join(folder, 'data'), { recursive: true, force: true })
  }
  const findings = played.flatMap((one) => one.findings)
  const file = reportFile ?? join(tmpdir(), 'spillway-chaos-routing.json')
  const seconds = Math.round((Date.now() - startedAt.getTime()) / 1_000)
  const report = { startedAt: startedAt.toISOString(), seconds, machine: machine(), scenarios: played }
  await writeFile(file, `${JSON.stringify(report, null, 2)}\n`)
  const isKept = keep || findings.length > 0
  if (!isKept) await rm(folder, { recursive: true, force: true })
  const verdict = findings.length === 0 ? 'nothing was found' : `${findings.length} violations`
  say(`${verdict}; report: ${file}${isKept ? `; evidence: ${folder}` : ''}`)
  return findings
}

async function playOne(
  scenario: Scenario,
  { folder, clusterUrl, say }: { folder: string; clusterUrl: string; say(line: string): void },
): Promise<Played> {
  const { name } = scenario
  // A database of its own: alerts of the one before would be reported in this one.
  const url = new URL(clusterUrl)
  url.pathname = `/routing_${name.replace(/\W/g, '_')}`
  const client = new pg.Client({ connectionString: clusterUrl })
  await client.connect()
  await client.query(`CREATE DATABASE ${url.pathname.slice(1)} TEMPLATE template0 ENCODING 'UTF8' LOCALE 'C'`)
  await client.end()
  const quiet = (): void => undefined
  await migrate({
    url: url.href,
    schema,
    sql: [coreSql, ...workloadSql],
    log: { info: quiet, warn: quiet, error: quiet },
  })
  say(`${name}: ${scenario.messages} messages, ${scenario.delayMs} ms each`)
  const evidence = await drill(scenario, { databaseUrl: url.href, say: (line) => say(`${name}: ${line}`) })
  const findings = judge(evidence)
  const seen = figures(evidence)
  await writeFile(join(folder, `${name}.json`), JSON.stringify(evidence))
  for (const [figure, value] of Object.entries(seen)) say(`  ${figure.padEnd(18)} ${[value].flat().join(', ')}`)
  for (const { rule, detail } of findings) say(`  FOUND ${rules[rule]}: ${detail}`)
  return { name, figures: seen, findings }
}
