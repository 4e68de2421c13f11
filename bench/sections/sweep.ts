/**
 * Whether the sweep removes rows as fast as they expire, and what that costs those who are accepted meanwhile.
 *
 * Burst: the rows of 2,000 keyed requests a second over ten minutes (keys, rate rows and lanes) expire at once, when the
 * replaceable clock is moved; the real server removes them beside a steady load. Steady (not with --quick): keyed requests
 * at 2,000 a second, or what the machine can do, whose keys expire after half a minute, because the clock of the sweep's
 * connection is ahead of the others': the table must stay as large as it is after the first half minute.
 */
import { randomUUID } from 'node:crypto'
import { setTimeout as delay } from 'node:timers/promises'
import pg from 'pg'
import { figure, verdict } from '../figures.js'
import type { BenchContext, Figure, Plot, Section, SectionResult, Verdict } from '../section.js'
import { median, percentile } from '../statistics.js'

const perSecond = 2_000
/** Of each table. */
const burstRows = (quick: boolean): number => (quick ? 60_000 : 600 * perSecond)
const burstSecondsMax = 900
const calmSeconds = (quick: boolean): number => (quick ? 6 : 20)
/** Well below what the machine can do: a latency under full load would measure the queue. */
const besideRate = 200
const steadySeconds = 240
const steadyTtlSeconds = 30
const sampleMs = 1_000
const inFlightMax = 256
const restShare = 0.1

export const sweep: Section = {
  name: 'sweep',
  title: 'Sweep',
  estimateSeconds: (quick) => (quick ? 50 : 700),
  run: measure,
}

async function measure(context: BenchContext): Promise<SectionResult> {
  const parts = [await burst(context)]
  if (!context.quick) parts.push(await steady(context))
  return {
    figures: parts.flatMap(({ figures }) => figures),
    verdicts: parts.flatMap(({ verdicts }) => verdicts),
    plots: parts.flatMap(({ plots }) => plots),
    notes: parts.flatMap(({ notes }) => notes),
  }
}

async function burst(context: BenchContext): Promise<SectionResult> {
  const { quick } = context
  const rows = burstRows(quick)
  const url = await context.postgres.createDatabase('sweep')
  const first = await context.serve({ DATABASE_URL: url })
  const client = await connected(url)
  try {
    context.say(`writing ${rows} keys, rate rows and lanes`)
    await fill(client, rows)
    context.say(`${besideRate} keyed requests a second, nothing to sweep`)
    const without = await keyedLoad(first.origin, besideRate, calmSeconds(quick) * 1_000)
    await first.stop()
    await client.query(clockSql(`clock_timestamp() + interval '25 hours'`))
    const server = await context.serve({ DATABASE_URL: url })
    const began = performance.now()
    context.say('all of it has expired; sweeping beside the same load')
    const gone = new AbortController()
    const beside = keyedLoad(server.origin, besideRate, burstSecondsMax * 1_000, gone.signal)
    const left: [number, number][] = []
    do {
      await delay(sampleMs)
      left.push([(performance.now() - began) / 1_000, await expiredLeft(client)])
    } while ((left.at(-1)?.[1] ?? 0) > 0 && performance.now() - began < burstSecondsMax * 1_000)
    const seconds = (performance.now() - began) / 1_000
    const spent = await counter(server.origin, 'spillway_sweep_seconds_total')
    gone.abort()
    const withSweep = await beside
    await server.stop()
    const removed = 3 * rows - (left.at(-1)?.[1] ?? 0)
    const what = `${rows} keys, rate rows and lanes expire at once`
    const p99 = (load: Load): number => percentile(load.latenciesMs, 0.99)
    return {
      figures: [
        figure({ what, variant: 'until all are gone', unit: 's', runs: [seconds] }),
        figure({ what, variant: 'rows removed', unit: '/s', runs: [removed / seconds] }),
        figure({ what, variant: 'share of the time', unit: '%', runs: [(spent / seconds) * 100] }),
        figure({ what, variant: 'p99 of keyed requests, nothing to sweep', unit: 'ms', runs: [p99(without)] }),
        figure({ what, variant: 'p99 of keyed requests beside the sweep', unit: 'ms', runs: [p99(withSweep)] }),
      ],
      verdicts: [
        verdict({
          what: `rows that the sweep removes, for ${perSecond} keyed requests with a rate and a lane each`,
          ...{ value: removed / seconds, unit: '/s', rule: 'at-least', target: 3 * perSecond },
        }),
        verdict({
          what: 'share of the time that the sweep takes',
          ...{ value: (spent / seconds) * 100, unit: '%', rule: 'at-most', target: restShare * 100 },
        }),
      ],
      plots: [
        {
          name: 'sweep-left',
          title: 'Expired rows that are left',
          xLabel: 'seconds',
          yLabel: 'rows',
          kind: 'lines',
          series: [{ name: 'left', points: left }],
        },
      ],
      notes: [
        `Burst: rows as ${perSecond} keyed requests a second leave them in ${rows / perSecond} s, written by SQL, expired by moving \`clock()\` by 25 hours. Beside it ${besideRate} keyed pushes a second at steady times; ${without.failed + withSweep.failed} of ${without.latenciesMs.length + withSweep.latenciesMs.length} were not answered 201 or 202.`,
      ],
    }
  } finally {
    await client.end()
    await context.postgres.dropDatabase('sweep')
  }
}

async function steady(context: BenchContext): Promise<SectionResult> {
  const url = await context.postgres.createDatabase('sweep_steady')
  const server = await context.serve({ DATABASE_URL: url, SPILLWAY_IDEMPOTENCY_TTL_HOURS: '1' })
  const client = await connected(url)
  try {
    await client.query(
      clockSql(
        `clock_timestamp() + CASE WHEN current_query() LIKE '%.sweep\\_%' THEN interval '1 hour' - interval '${steadyTtlSeconds} s' ELSE interval '0' END`,
      ),
    )
    context.say(`${perSecond} keyed requests a second for ${steadySeconds} s, kept for ${steadyTtlSeconds} s`)
    const began = performance.now()
    const load = keyedLoad(server.origin, perSecond, steadySeconds * 1_000)
    const samples: { at: number; rows: number; mb: number }[] = []
    while (performance.now() - began < steadySeconds * 1_000) {
      await delay(5 * sampleMs)
      const { rows } = await client.query<{ n: string; size: string }>(
        `SELECT (SELECT count(*) FROM idempotency) AS n, pg_total_relation_size('idempotency') AS size`,
      )
      const [row] = rows
      samples.push({
        at: (performance.now() - began) / 1_000,
        rows: Number(row?.n),
        mb: Number(row?.size) / 1_048_576,
      })
    }
    const { latenciesMs, failed } = await load
    await server.stop()
    // A round begins each minute: the first cycles are over when three minutes of four are.
    const among = (from: number, to: number) => samples.filter(({ at }) => at >= from && at < to)
    const early = among(steadySeconds * 0.375, steadySeconds * 0.6875)
    const late = among(steadySeconds * 0.6875, steadySeconds + 60)
    const growth = median(late.map(({ rows }) => rows)) / median(early.map(({ rows }) => rows))
    const what = `keyed requests for ${steadySeconds} s, kept for ${steadyTtlSeconds} s`
    const figures: Figure[] = [
      figure({ what, variant: 'requests', unit: '/s', runs: [latenciesMs.length / steadySeconds] }),
      figure({ what, variant: 'keys in the table at the end', unit: 'rows', runs: late.map(({ rows }) => rows) }),
      figure({ what, variant: 'size of the table and its indexes', unit: 'MB', runs: late.map(({ mb }) => mb) }),
      figure({ what, variant: 'p99', unit: 'ms', runs: [percentile(latenciesMs, 0.99)] }),
    ]
    const verdicts: Verdict[] = [
      verdict({
        what: 'keys late in the run, by keys in its middle',
        value: growth,
        unit: '×',
        rule: 'at-most',
        target: 1.25,
      }),
    ]
    const plots: Plot[] = [
      {
        name: 'sweep-steady',
        title: 'Keys in the table',
        xLabel: 'seconds',
        yLabel: 'rows',
        kind: 'lines',
        series: [{ name: 'keys', points: samples.map(({ at, rows }) => [at, rows] as const) }],
      },
    ]
    const notes = [
      `Steady: pushes with a key each, at most ${inFlightMax} at once; ${failed} were not answered 201 or 202. The clock of the sweep's connection is an hour less ${steadyTtlSeconds} s ahead, so that keys that are kept for an hour expire after ${steadyTtlSeconds} s.`,
    ]
    return { figures, verdicts, plots, notes }
  } finally {
    await client.end()
    await context.postgres.dropDatabase('sweep_steady')
  }
}

interface Load {
  latenciesMs: number[]
  failed: number
}

/** Keyed pushes at steady times, answered or not; a request that finds too many under way is left out. */
async function keyedLoad(origin: string, rate: number, ms: number, signal?: AbortSignal): Promise<Load> {
  const load: Load = { latenciesMs: [], failed: 0 }
  const under = new Set<Promise<void>>()
  const one = async (n: number): Promise<void> => {
    const asked = performance.now()
    const answer = await fetch(`${origin}/api/v1/push`, {
      method: 'POST',
      headers: { 'content-type': 'application/json', 'idempotency-key': randomUUID() },
      body: JSON.stringify({ items: [{ queue: 'bench', partition: String(n % 1_000), payload: n }] }),
    }).catch(() => null)
    await answer?.body?.cancel()
    load.latenciesMs.push(performance.now() - asked)
    if (answer?.status !== 201 && answer?.status !== 202) load.failed++
  }
  const began = performance.now()
  for (let n = 0; ; n++) {
    const at = (n / rate) * 1_000
    const early = began + at - performance.now()
    if (early > 1) await delay(early)
    if (signal?.aborted || performance.now() - began >= ms) break
    if (under.size >= inFlightMax) await Promise.race(under)
    const request = one(n).finally(() => under.delete(request))
    under.add(request)
  }
  await Promise.all(under)
  return load
}

const clockSql = (time: string): string =>
  `CREATE OR REPLACE FUNCTION clock() RETURNS timestamptz LANGUAGE sql VOLATILE AS $$ SELECT ${time} $$`

async function connected(url: string): Promise<pg.Client> {
  const client = new pg.Client({ connectionString: url, options: '-c search_path=spillway', application_name: 'bench' })
  await client.connect()
  return client
}

/** Rows that expire within a day and a bit, one for each of `perSecond` requests a second. */
async function fill(client: pg.Client, rows: number): Promise<void> {
  const at = (hours: number): string => `clock() + interval '${hours} hours' + n * interval '${1_000 / perSecond} ms'`
  const each = `FROM generate_series(1, ${rows}) n`
  await client.query(
    `INSERT INTO idempotency (key, request, op, answer, expires_at) SELECT gen_random_uuid(), gen_random_uuid(), gen_random_uuid(), '{"v":"done"}', ${at(24)} ${each}`,
  )
  await client.query(
    `INSERT INTO rates (key, ends, sums, span_ms, expires_at, sweep_at) SELECT gen_random_uuid(), '{0,1}', '{0,1}', 3600000, ${at(2)}, ${at(2)} ${each}`,
  )
  await client.query(
    `INSERT INTO lanes (id, queue, partition, moved_at, sweep_at) SELECT gen_random_uuid(), 'bench', n::text, ${at(0)}, ${at(1)} ${each}`,
  )
  await client.query('ANALYZE idempotency, rates, lanes')
}

async function expiredLeft(client: pg.Client): Promise<number> {
  const { rows } = await client.query<{ n: string }>(
    `SELECT (SELECT count(*) FROM idempotency WHERE expires_at < clock()) + (SELECT count(*) FROM rates WHERE sweep_at < clock()) + (SELECT count(*) FROM lanes WHERE sweep_at < clock()) AS n`,
  )
  return Number(rows[0]?.n)
}

async function counter(origin: string, name: string): Promise<number> {
  const text = await (await fetch(`${origin}/metrics`)).text()
  return Number(new RegExp(`^${name} (.*)$`, 'm').exec(text)?.[1] ?? 0)
}
