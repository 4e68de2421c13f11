/**
 * Rates in any window, on the real SQL with a clock that the test moves: random windows, limits and arrivals. FC_SEED
 * repeats a run.
 */
import { randomUUID } from 'node:crypto'
import fc from 'fast-check'
import { afterAll, beforeAll, expect, it } from 'vitest'
import type { RateCheck } from '../../src/store/port.js'
import { coreSql } from '../../src/store/postgres/generated/sql.js'
import { migrate } from '../../src/store/postgres/migrate.js'
import { postgresStore } from '../../src/store/postgres/store.js'
import { type OpenedStore, storesOn } from '../conformance/harness.js'
import { administer } from '../setup/administer.js'
import { freshDatabase, type TestDatabase } from '../setup/database.js'

const seed = Number(process.env.FC_SEED ?? Date.now() % 0x7fffffff)

let database: TestDatabase
let opened: OpenedStore

beforeAll(async () => {
  database = await freshDatabase()
  opened = await storesOn(database.url)()
})
afterAll(async () => {
  await opened.close()
  await database.drop()
})

/** Callers of one key, and when they were admitted. */
class Callers {
  readonly admitted: number[] = []
  readonly #check: RateCheck
  readonly #windowMs: number

  constructor(
    readonly limit: number,
    windowSeconds: number,
    public now: number,
  ) {
    this.#check = { key: randomUUID(), limit, windowSeconds }
    this.#windowMs = windowSeconds * 1_000
  }

  wait(ms: number): void {
    this.now += ms
  }

  /** Asks for `n` at once, checks each answer, and returns the wait of those that were refused. */
  async ask(n: number): Promise<number | null> {
    await opened.freeze(new Date(this.now).toISOString())
    const answers = await opened.store.admit(Array.from({ length: n }, () => ({ halt: null, rates: [this.#check] })))
    let waitMs: number | null = null
    for (const { verdict, rate } of answers) {
      if (verdict === 'admit') {
        this.admitted.push(this.now)
        expect(this.#within(this.#windowMs)).toBeLessThanOrEqual(this.limit)
      } else {
        // A slot is free at most a 60th of the window late.
        expect(this.#within(this.#windowMs * (61 / 60))).toBeGreaterThanOrEqual(this.limit)
        waitMs = rate?.resetMs ?? null
      }
    }
    return waitMs
  }

  /** Admitted in the closed window of that length that ends now. */
  #within(ms: number): number {
    return this.admitted.filter((at) => at >= this.now - ms).length
  }
}

const windowSeconds = fc.oneof(
  fc.integer({ min: 1, max: 120 }),
  fc.constantFrom(1, 10, 60, 3_600, 86_400, 31 * 86_400),
  fc.integer({ min: 1, max: 31 * 86_400 }),
)
const start = fc.date({ min: new Date('2026-01-01'), max: new Date('2040-01-01'), noInvalidDate: true })
/** The time before it, in windows: mostly far less than one. */
const gap = fc.oneof(
  fc.constant(0),
  fc.double({ min: 0, max: 0.2, noNaN: true }),
  fc.double({ min: 0, max: 2, noNaN: true }),
)
const arrivals = fc.array(fc.record({ gap, n: fc.integer({ min: 1, max: 4 }), obeys: fc.boolean() }), { maxLength: 40 })

it('admits at most the limit in any window, and a caller that waits for Retry-After', {
  timeout: 120_000,
}, async () => {
  process.stdout.write(`rate windows: FC_SEED=${seed}\n`)
  const property = fc.asyncProperty(
    ...[fc.integer({ min: 1, max: 6 }), windowSeconds, start, arrivals],
    async (limit, seconds, at, list) => {
      const callers = new Callers(limit, seconds, at.getTime())
      for (const arrival of list) {
        callers.wait(Math.round(arrival.gap * seconds * 1_000))
        const waitMs = await callers.ask(arrival.n)
        if (waitMs === null || !arrival.obeys) continue
        callers.wait(waitMs - 1)
        if (waitMs > 1) expect(await callers.ask(1)).not.toBeNull()
        callers.wait(1)
        expect(await callers.ask(1)).toBeNull()
      }
    },
  )
  await fc.assert(property, { seed, numRuns: 100 })
})

it('keeps the counts that release 0.2.0 made', async () => {
  const empty = await freshDatabase({ empty: true })
  const log = { debug: () => undefined, info: () => undefined, warn: () => undefined, error: () => undefined }
  const before = { ...coreSql, tables: coreSql.tables.filter(({ id }) => id < '0004'), functions: [] }
  await migrate({ url: empty.url, schema: 'spillway', sql: [before], log })
  const key = randomUUID()
  // Two in this minute, three eight minutes ago.
  await administer(
    empty.url,
    `INSERT INTO spillway.rates (key, win, minutes, counts, total, expires_at, sweep_at)
     SELECT '${key}', 10, ARRAY[m - 8, m], ARRAY[3, 2], 5, now() + interval '1 hour', now() + interval '1 hour'
     FROM (SELECT floor(extract(epoch FROM now()) / 60)::int) x(m)`,
  )
  const store = postgresStore({ url: empty.url, schema: 'spillway' })
  try {
    await store.migrate()
    const check: RateCheck = { key, limit: 6, windowSeconds: 600 }
    const [first, second] = await store.admit(Array.from({ length: 2 }, () => ({ halt: null, rates: [check] })))
    expect(first).toMatchObject({ verdict: 'admit', rate: { left: 0 } })
    expect(second).toMatchObject({ verdict: 'refuse', by: 'rate' })
    // The minute eight minutes ago leaves the window 10 minutes after its end.
    expect(second?.rate?.resetMs).toBeGreaterThan(60_000)
    expect(second?.rate?.resetMs).toBeLessThanOrEqual(180_000)
  } finally {
    await store.close()
    await empty.drop()
  }
})
