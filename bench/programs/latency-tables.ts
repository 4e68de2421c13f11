/** Watches the tables of a schema that churn: an overload-safe queue must not leave a trail behind it. */
import { setTimeout as delay } from 'node:timers/promises'
import pg from 'pg'

export interface TablePoint {
  readonly second: number
  readonly megabytes: number
  readonly deadRows: number
}

/** Those that every operation passes through. History grows by design and is dropped by the partition. */
const hotTables = ['lanes', 'ops', 'ready', 'parked', 'leases', 'tallies', 'workers']
const sampleMs = 1_000

/** Looks once a second until `until` is settled. */
export async function watchTables(url: string, until: Promise<unknown>): Promise<TablePoint[]> {
  const client = new pg.Client({ connectionString: url })
  await client.connect()
  const stopped = new AbortController()
  const stop = (): void => stopped.abort()
  until.then(stop, stop)
  const began = performance.now()
  const points: TablePoint[] = []
  try {
    while (!stopped.signal.aborted) {
      const { rows } = await client.query<{ bytes: string; dead: string }>(
        `SELECT sum(pg_total_relation_size(relid)) AS bytes, sum(n_dead_tup) AS dead
         FROM pg_stat_user_tables WHERE schemaname = 'spillway' AND relname = ANY ($1)`,
        [hotTables],
      )
      points.push({
        second: (performance.now() - began) / 1_000,
        megabytes: Number(rows[0]?.bytes ?? 0) / 1_048_576,
        deadRows: Number(rows[0]?.dead ?? 0),
      })
      await delay(sampleMs, undefined, { signal: stopped.signal }).catch((fault: unknown) => {
        if (!stopped.signal.aborted) throw fault
      })
    }
  } finally {
    await client.end()
  }
  return points
}

/**
 * How much of the peak of the last third there was in the middle third already: 1 is flat. Peaks, because between two
 * vacuums both rise and fall; not from the start, because tables first grow to the size they work in.
 */
export function growth(points: readonly TablePoint[], of: (point: TablePoint) => number): number {
  const third = Math.floor(points.length / 3)
  const peak = (part: readonly TablePoint[]): number => Math.max(...part.map(of))
  if (third === 0) throw new RangeError(`${points.length} samples are too few to measure growth`)
  return peak(points.slice(-third)) / Math.max(1, peak(points.slice(-2 * third, -third)))
}

/** The peak within each `seconds`. */
export function peaks(
  points: readonly TablePoint[],
  seconds: number,
  of: (point: TablePoint) => number,
): (readonly [number, number])[] {
  const byPart = new Map<number, number>()
  for (const point of points) {
    const part = Math.floor(point.second / seconds)
    byPart.set(part, Math.max(byPart.get(part) ?? 0, of(point)))
  }
  return [...byPart].map(([part, value]) => [part * seconds, value] as const)
}
