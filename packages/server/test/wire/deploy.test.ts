/** What operators see through deploy/ holds: rules and queries by promtool, metric names by the source. */
import { readdirSync, readFileSync } from 'node:fs'
import { mkdtemp, rm, writeFile } from 'node:fs/promises'
import { tmpdir } from 'node:os'
import { join } from 'node:path'
import { fileURLToPath } from 'node:url'
import { describe, expect, it } from 'vitest'
import { findPromtool, promtoolTests } from '../../../spillway/test/setup/promtool.js'
import { createMetrics } from '../../src/prometheus/metrics.js'
import { createAlertMetrics } from '../../src/workloads/alerts/metrics.js'
import { createMessageMetrics } from '../../src/workloads/messages/metrics.js'
import { createObjectiveMetrics } from '../../src/workloads/objectives/metrics.js'
import { createPetitionMetrics } from '../../src/workloads/petitions/metrics.js'
import { createRoutingMetrics } from '../../src/workloads/routing/metrics.js'

const root = fileURLToPath(new URL('../../../../', import.meta.url))
const prometheusFolder = join(root, 'deploy', 'prometheus')
const read = (file: string): string => readFileSync(join(root, file), 'utf8')
const matches = (text: string, pattern: RegExp): string[] => [...text.matchAll(pattern)].map((match) => match[1] ?? '')

const rules = read('deploy/prometheus/rules.yml')
const ruleTests = readdirSync(prometheusFolder).filter((name) => name.endsWith('.test.yml'))
const alertNames = matches(rules, /^ +- alert: (\S+)$/gm)
const runbook = read('docs/guides/runbooks/alerts.md')
const runbookQueries = matches(runbook, /^```promql\n([\s\S]*?)\n```$/gm).flatMap((block) => block.split('\n'))
const recordNames = [...new Set(matches(rules, /^ +- record: (\S+)$/gm))]

/** Days in steps of minutes take some seconds, on a busy machine more. */
const promtoolTimeoutMs = 120_000
const withPromtool = promtoolTests(await findPromtool())

describe('Prometheus', () => {
  it(
    'takes the rules',
    withPromtool(async (promtool) => {
      const { ok, output } = await promtool(['check', 'rules', 'rules.yml'], prometheusFolder)
      expect(output).toContain(`${matches(rules, /^ +- (alert|record): /gm).length} rules found`)
      expect(ok, output).toBe(true)
    }),
  )

  it(
    'takes the example of its configuration',
    withPromtool(async (promtool) => {
      const { ok, output } = await promtool(['check', 'config', 'prometheus.yml'], prometheusFolder)
      expect(ok, output).toBe(true)
    }),
  )

  it.for(ruleTests)('%s passes', { timeout: promtoolTimeoutMs }, async (file, { skip }) => {
    const test = withPromtool(async (promtool) => {
      const { ok, output } = await promtool(['test', 'rules', file], prometheusFolder)
      expect(ok, output).toBe(true)
    })
    await test({ skip })
  })

  it('has a test for every alert, in which it fires and in which it does not', () => {
    const cases = ruleTests
      .map((file) => read(`deploy/prometheus/${file}`))
      .flatMap((text) => text.split(/^ +- eval_time: /m).slice(1))
    const about = (name: string) => cases.filter((text) => matches(text, /^ +alertname: (\S+)$/gm).includes(name))
    const fires = (text: string) => text.includes('exp_alerts:')
    expect(alertNames.filter((name) => !about(name).some(fires))).toEqual([])
    expect(alertNames.filter((name) => about(name).every(fires))).toEqual([])
  })

  it('has a computed example for every recorded series', () => {
    const examined = ruleTests
      .flatMap((file) => matches(read(`deploy/prometheus/${file}`), /^ +- expr: (.+)$/gm))
      .join('\n')
    expect(recordNames.filter((name) => !examined.includes(name))).toEqual([])
  })

  it('has the four alerts of the router with their times and severities', () => {
    const timeAndSeverity = (name: string) =>
      /for: (\S+)\n\s+labels:\n\s+severity: (\S+)/.exec(rules.slice(rules.indexOf(`- alert: ${name}\n`)))?.slice(1)
    expect(timeAndSeverity('RouterIntakeBackpressureActive')).toEqual(['1m', 'warning'])
    expect(timeAndSeverity('RouterIntakeQueueDepthHigh')).toEqual(['5m', 'critical'])
    expect(timeAndSeverity('RouterIntakeLatencyHigh')).toEqual(['5m', 'critical'])
    expect(timeAndSeverity('RouterIntakeInflightHigh')).toEqual(['5m', 'warning'])
  })

  it('has no number among the labels of an alert', () => {
    const labels = matches(rules, /^ +labels:\n((?: {10}.+\n)+)/gm).join('')
    expect(labels).toContain('severity: critical')
    expect(labels).not.toMatch(/\{\{|\$value/)
  })

  it('links every alert to a section of the runbook', () => {
    const links = matches(rules, /^ +runbook_url: (.+)$/gm)
    expect(links).toHaveLength(alertNames.length)
    const anchors = matches(runbook, /^#+ (.+)$/gm).map((heading) =>
      heading
        .toLowerCase()
        .replaceAll(/[^\w -]/g, '')
        .replaceAll(' ', '-'),
    )
    expect(
      links.filter((link) => !anchors.some((anchor) => link === `docs/guides/runbooks/alerts.md#${anchor}`)),
    ).toEqual([])
    expect(new Set(links).size).toBe(alertNames.length)
  })
})

/** The metrics of the router and its gateway that operators build on. */
const routerNames = [
  'router_jetstream_pending_messages',
  'router_jetstream_ack_pending_messages',
  'router_jetstream_delivered_messages_total',
  'router_jetstream_redelivered_messages_total',
  'router_intake_processing_latency_seconds',
  'router_intake_processing_latency_p50',
  'router_intake_processing_latency_p95',
  'router_intake_processing_latency_p99',
  'router_intake_inflight_messages',
  'router_intake_inflight_messages_max',
  'router_intake_backpressure_active',
  'router_intake_backpressure_triggered_total',
  'router_intake_backpressure_rejections_total',
  'gateway_rate_limit_backpressure_adjustment_total',
  'gateway_backpressure_status',
]

async function registered(): Promise<Map<string, string>> {
  const { registry } = createMetrics()
  createPetitionMetrics(registry)
  createMessageMetrics(registry)
  createRoutingMetrics(registry, { subject: 's', consumer: 'c' })
  createAlertMetrics(registry)
  createObjectiveMetrics(registry)
  return new Map((await registry.getMetricsAsJSON()).map(({ name, type }) => [name, String(type)]))
}

/** What a scrape shows of them: a histogram is seen as its parts only. */
async function scrapedNames(): Promise<Set<string>> {
  const parts = ['_bucket', '_sum', '_count']
  return new Set(
    [...(await registered())].flatMap(([name, type]) =>
      type === 'histogram' ? parts.map((part) => name + part) : [name],
    ),
  )
}

const promqlWords = new Set([
  'by',
  'without',
  'on',
  'ignoring',
  'group_left',
  'group_right',
  'bool',
  'and',
  'or',
  'unless',
  'offset',
])
/** Prometheus makes these itself. */
const ownNames = new Set(['up', 'ALERTS'])

/** The names of series in an expression: words that are no function, keyword, label or duration. */
function seriesIn(expression: string): string[] {
  const bare = expression
    .replaceAll(/"[^"]*"|'[^']*'/g, '')
    .replaceAll(/\{[^}]*\}|\[[^\]]*\]/g, ' ')
    .replaceAll(/\b(?:by|without|on|ignoring|group_left|group_right)\s*\([^)]*\)/g, ' ')
    .replaceAll(/\boffset\s+\w+/g, ' ')
  return matches(bare, /(?<![\w:.$])([a-zA-Z_:][\w:]*)(?!\s*\(|[\w:])/g).filter((word) => !promqlWords.has(word))
}

/** Of rules: `expr:` on one line, or as a block of deeper lines. */
function ruleExpressions(text: string): string[] {
  const blocks = [...text.matchAll(/^( +)expr: \|\n((?:\1 {2,}.*\n)+)/gm)].map((match) => match[2] ?? '')
  return [...matches(text, /^ +expr: (?!\|)(.+)$/gm), ...blocks]
}

describe('metric names', () => {
  it('are read from expressions', () => {
    expect(
      seriesIn(
        '1 - sum by (a, le) (rate(x_bucket{le="0.5", b=~"y_z"}[5m])) / (q:r:s > 0) unless on (a) z_total offset 5m',
      ),
    ).toEqual(['x_bucket', 'q:r:s', 'z_total'])
  })

  it('of the router and its gateway are registered in the source', async () => {
    const names = await registered()
    expect(routerNames.filter((name) => !names.has(name))).toEqual([])
  })

  it('in the rules are exported by the server, or recorded by a rule', async () => {
    const names = await scrapedNames()
    const queries = matches(rules, /with printf "([^"]+)"/g).map((query) => query.replace("'%s'", '""'))
    const expressions = [...ruleExpressions(rules), ...queries]
    expect(expressions).toHaveLength(matches(rules, /^ +- (alert|record): /gm).length + queries.length)
    const used = expressions.flatMap(seriesIn)
    expect(used.filter((name) => !names.has(name) && !recordNames.includes(name) && !ownNames.has(name))).toEqual([])
  })

  it('in the tests of the rules are exported by the server', async () => {
    const names = await scrapedNames()
    const series = ruleTests.flatMap((file) => matches(read(`deploy/prometheus/${file}`), /^ +- series: ([\w:]+)/gm))
    expect(series.length).toBeGreaterThan(0)
    expect(series.filter((name) => !names.has(name) && !ownNames.has(name))).toEqual([])
  })

  it('in the runbook are exported by the server, or recorded by a rule', async () => {
    const names = await scrapedNames()
    const used = runbookQueries.flatMap(seriesIn)
    expect(used.length).toBeGreaterThan(40)
    expect(used.filter((name) => !names.has(name) && !recordNames.includes(name) && !ownNames.has(name))).toEqual([])
  })

  it('in the dashboard are exported by the server, or recorded by a rule', async () => {
    const names = await scrapedNames()
    const used = panels.flatMap(({ targets = [] }) => targets.flatMap(({ expr }) => seriesIn(expr)))
    expect(used.length).toBeGreaterThan(40)
    expect(used.filter((name) => !names.has(name) && !recordNames.includes(name))).toEqual([])
  })
})

interface Panel {
  id: number
  type: string
  title: string
  targets?: { expr: string; datasource: { uid: string } }[]
  fieldConfig?: {
    defaults: { unit?: string; min?: number; max?: number; thresholds: { steps: { value: number | null }[] } }
  }
  gridPos: { x: number; y: number; w: number; h: number }
}

const dashboard = JSON.parse(read('deploy/grafana/spillway.json')) as {
  templating: { list: { name: string; type: string }[] }
  panels: Panel[]
}
const { panels } = dashboard

describe('the dashboard', () => {
  it.each([
    ['Queue depth', 'router_jetstream_pending_messages', 'timeseries', 'short', [null, 10, 100, 1_000]],
    ['Processing latency p95', 'router_intake_processing_latency_p95', 'timeseries', 'ms', [null, 500, 2_000, 5_000]],
    ['In-flight messages', 'router_intake_inflight_messages', 'timeseries', 'short', [null, 50, 200, 500]],
    ['Backpressure status', 'router_intake_backpressure_active', 'gauge', 'short', [null, 1]],
  ])('shows "%s" with its thresholds', (title, metric, type, unit, steps) => {
    const panel = panels.find((one) => one.title === title)
    expect(panel?.type).toBe(type)
    expect(panel?.targets?.flatMap(({ expr }) => seriesIn(expr))).toEqual([metric])
    expect(panel?.fieldConfig?.defaults.unit).toBe(unit)
    expect(panel?.fieldConfig?.defaults.thresholds.steps.map(({ value }) => value)).toEqual(steps)
  })

  it('has a row for each part of the server', () => {
    expect(panels.filter(({ type }) => type === 'row').map(({ title }) => title)).toEqual([
      'Router intake',
      'Objectives',
      'Admissions',
      'Operations and lanes',
      'Petitions',
      'Messages',
      'Store and processes',
    ])
  })

  it('takes its data source from a variable', () => {
    expect(dashboard.templating.list).toContainEqual(
      expect.objectContaining({ name: 'datasource', type: 'datasource' }),
    )
    const sources = panels.flatMap(({ targets = [] }) => targets.map(({ datasource }) => datasource.uid))
    expect(new Set(sources)).toEqual(new Set(['${' + 'datasource}']))
  })

  it('has panels with ids of their own, none upon another', () => {
    expect(new Set(panels.map(({ id }) => id)).size).toBe(panels.length)
    const cells = panels.flatMap(({ gridPos: { x, y, w, h } }) =>
      Array.from({ length: w * h }, (_, cell) => `${x + (cell % w)},${y + Math.floor(cell / w)}`),
    )
    expect(new Set(cells).size).toBe(cells.length)
    expect(Math.max(...panels.map(({ gridPos: { x, w } }) => x + w))).toBe(24)
  })
})

it.for([
  ['the dashboard', () => panels.flatMap(({ targets = [] }) => targets.map(({ expr }) => expr))],
  ['the runbook', () => runbookQueries],
] as const)('%s asks what Prometheus understands', async ([, queries], { skip }) => {
  const rule = (expr: string, n: number) =>
    `      - record: query:${n}\n        expr: ${JSON.stringify(expr.replaceAll('$__rate_interval', '1m'))}\n`
  const folder = await mkdtemp(join(tmpdir(), 'spillway-deploy-'))
  const check = withPromtool(async (promtool) => {
    await writeFile(join(folder, 'queries.yml'), `groups:\n  - name: q\n    rules:\n${queries().map(rule).join('')}`)
    const { ok, output } = await promtool(['check', 'rules', 'queries.yml'], folder)
    expect(output).toContain(`${queries().length} rules found`)
    expect(ok, output).toBe(true)
  })
  await check({ skip }).finally(() => rm(folder, { recursive: true, force: true }))
})
