import { setTimeout as delay } from 'node:timers/promises'
import pg from 'pg'
import { type IntakeOptions, type PostgresOptions, postgres } from '../src/index.js'
import type { Intake } from '../src/intake/intake.js'
import { openIntake } from '../src/intake/open-intake.js'
import type { Store, Ticket } from '../src/store/port.js'
import { freshDatabase } from './setup/database.js'

export interface Logged {
  level: string
  message: string
  fields: Record<string, unknown>
}

/** A database of its own, the intakes on it, and a plain connection to look with. */
export interface Bench {
  url: string
  logged: Logged[]
  /** Another instance on the same database. */
  intake(
    options?: Partial<IntakeOptions> & {
      wrap?: (store: Store) => Store
      postgres?: Partial<Extract<PostgresOptions, { url: string }>>
    },
  ): Promise<Intake>
  sql<Row extends Record<string, unknown>>(text: string, values?: unknown[]): Promise<Row[]>
  ticket(id: string): Promise<Ticket>
  /** The ticket once it is finished. */
  finished(id: string, ms?: number): Promise<Ticket>
  /** What does not hold of the queue's invariants. */
  audit(): Promise<string[]>
  close(): Promise<void>
}

/** Stores log lost connections, which many tests cause. */
const unheard = { info: () => undefined, warn: () => undefined, error: () => undefined }

export async function bench(): Promise<Bench> {
  const database = await freshDatabase()
  const intakes: Intake[] = []
  const logged: Logged[] = []
  const pool = new pg.Pool({ connectionString: database.url, max: 4 })
  pool.on('error', () => undefined)
  const reader = postgres({ url: database.url, poolMax: 8, log: unheard })
  const ticket = async (id: string): Promise<Ticket> => {
    const found = await reader.ticket(id)
    if (found === null) throw new Error(`there is no operation ${id}`)
    return found
  }
  return {
    url: database.url,
    logged,
    intake: async ({ wrap = (given: Store) => given, postgres: store, ...options } = {}) => {
      const intake = await openIntake({
        store: wrap(postgres({ url: database.url, poolMax: 8, log: unheard, ...store })),
        retryBaseMs: 20,
        retryMaxMs: 40,
        drainMs: 2_000,
        log: loggingTo(logged),
        ...options,
      })
      intakes.push(intake)
      return intake
    },
    sql: async <Row extends Record<string, unknown>>(text: string, values: unknown[] = []) =>
      (await pool.query<Row>(text, values)).rows,
    ticket,
    finished: (id, ms) =>
      eventually(
        async () => {
          const found = await ticket(id)
          return ['completed', 'failed', 'cancelled'].includes(found.status) ? found : undefined
        },
        `operation ${id} to finish`,
        ms,
      ),
    audit: () => reader.audit(),
    close: async () => {
      await Promise.all(intakes.map((intake) => intake.close()))
      await reader.close()
      await pool.end()
      await database.drop()
    },
  }
}

export function loggingTo(logged: Logged[]) {
  const at = (level: string) => (fields: object, message: string) => {
    logged.push({ level, message, fields: fields as Record<string, unknown> })
  }
  return { debug: at('debug'), info: at('info'), warn: at('warn'), error: at('error') }
}

/** Looks until there is a value; fails loudly when there is none in time. */
export async function eventually<T>(
  look: () => Promise<T | undefined> | T | undefined,
  what: string,
  ms = 10_000,
): Promise<T> {
  const until = performance.now() + ms
  for (;;) {
    const found = await look()
    if (found !== undefined && found !== false) return found
    if (performance.now() > until) throw new Error(`waited ${ms} ms for ${what}`)
    await delay(10)
  }
}

/** Something that one side waits for and the other lets happen. */
export function signal<T = void>(): { promise: Promise<T>; fire(value: T): void } {
  let fire: (value: T) => void = () => undefined
  const promise = new Promise<T>((resolve) => {
    fire = resolve
  })
  return { promise, fire }
}

/** Only some of a store's methods are other than they were. */
export function overriding(store: Store, methods: Partial<Store>): Store {
  return { ...store, ...methods }
}
