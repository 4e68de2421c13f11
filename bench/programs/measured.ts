/** Measuring inside a program, on demand: `GET /measure/<name>?seconds=3`, so that several programs can take turns. */
import type { FastifyInstance } from 'fastify'
import { percentile } from '../statistics.js'

export interface Rows {
  readonly rows: number
  readonly seconds: number
  /** Of one unit of work, from its beginning to its end. */
  readonly p50Ms: number
  readonly p99Ms: number
}

/** One unit of work; how many rows it stored. */
export type Work = (worker: number) => Promise<number>

/** Runs `loops` loops at once until the time is over; each starts its next unit as soon as the last one is done. */
export async function rowsIn(seconds: number, loops: number, work: Work): Promise<Rows> {
  const began = performance.now()
  const end = began + seconds * 1_000
  const tookMs: number[] = []
  let rows = 0
  const loop = async (worker: number): Promise<void> => {
    for (let at = performance.now(); at < end; ) {
      // Not `rows += await …`: that reads the sum before it waits, and loses what the other loops added meanwhile.
      const stored = await work(worker)
      rows += stored
      const now = performance.now()
      tookMs.push(now - at)
      at = now
    }
  }
  await Promise.all(Array.from({ length: loops }, (_, worker) => loop(worker)))
  return {
    rows,
    seconds: (performance.now() - began) / 1_000,
    p50Ms: percentile(tookMs, 0.5),
    p99Ms: percentile(tookMs, 0.99),
  }
}

export interface Asked {
  readonly seconds: number
  readonly count: number
  /** Unique for each measurement. */
  readonly key: string
}

export function onMeasure(app: FastifyInstance, name: string, measure: (asked: Asked) => Promise<object>): void {
  app.get<{ Querystring: { seconds?: string; count?: string; key?: string } }>(`/measure/${name}`, (request) => {
    const { seconds = '0', count = '0', key = '' } = request.query
    return measure({ seconds: Number(seconds), count: Number(count), key })
  })
}
