/**
 * Queues and their options. Before a push is written it must know whether its queue is encrypted. That is cached here, looked
 * up again once a second, and dropped when an instance announces a change. The statement that stores a message checks it
 * again.
 */
import { type QueueOptionName, type QueueOptions, queueOptionDefaults } from '@spillway/protocol/wire'
import { type Intake, isReservedQueue, mayUseQueue, type Problem } from 'spillway/workload'

/** Column names. */
const columns: Readonly<Record<QueueOptionName, string>> = {
  leaseTime: 'lease_seconds',
  retryLimit: 'retry_limit',
  retryDelay: 'retry_delay_ms',
  maxSize: 'max_size',
  priority: 'priority',
  delayedProcessing: 'delay_seconds',
  windowBuffer: 'window_seconds',
  retentionSeconds: 'retention_seconds',
  completedRetentionSeconds: 'completed_retention_seconds',
  retentionEnabled: 'retention_enabled',
  maxWaitTimeSeconds: 'max_wait_seconds',
  deadLetterQueue: 'dead_letter_queue',
  dlqAfterMaxRetries: 'dlq_after_max_retries',
  encryptionEnabled: 'encryption_enabled',
}
export const optionNames = Object.keys(queueOptionDefaults) as QueueOptionName[]

export interface Configuration {
  queue: string
  /** Null: unchanged. */
  namespace: string | null
  task: string | null
  options: Partial<QueueOptions>
}

export interface Configured extends Configuration {
  options: QueueOptions
}

const knownMs = 1_000
const knownMax = 10_000
const createTriesMax = 3

export class Queues {
  readonly #intake: Intake
  readonly #schema: string
  readonly #channel: string
  readonly #asked = new Map<string, Promise<void>>()
  readonly #known = new Map<string, { isSealed: boolean; until: number }>()

  constructor(intake: Intake, schema: string) {
    this.#intake = intake
    this.#schema = schema
    this.#channel = `spillway_${schema.slice(1, -1).replaceAll('""', '"')}`
    intake.onNotice('mqconf', (queue) => void this.#known.delete(queue))
  }

  async configure(configuration: Configuration): Promise<Configured> {
    const row = await this.#write(
      configuration,
      (columns) =>
        `UPDATE SET namespace = coalesce(excluded.namespace, q.namespace), task = coalesce(excluded.task, q.task)${columns
          .map((c) => `, ${c} = excluded.${c}`)
          .join('')}`,
    )
    return toConfigured(row ?? {})
  }

  /** Creates a queue. Null: it exists with other options, and nothing was changed. */
  async create(configuration: Configuration): Promise<Configured | null> {
    const { queue, namespace, task, options } = configuration
    let row: Record<string, unknown> | undefined
    // Repeats only if the queue was deleted between the two statements.
    for (let tries = 0; row === undefined && tries < createTriesMax; tries++) {
      const made = await this.#write(configuration, () => 'NOTHING')
      if (made !== null) return toConfigured(made)
      const { rows } = await this.#intake.read<Record<string, unknown>>(
        `SELECT q.* FROM ${this.#schema}.mq_queues q WHERE q.name = $1`,
        [queue],
      )
      row = rows[0]
    }
    if (row === undefined) return null
    const there = toConfigured(row)
    const isSame =
      optionNames.every((name) => options[name] === undefined || options[name] === there.options[name]) &&
      (namespace === null || namespace === there.namespace) &&
      (task === null || task === there.task)
    return isSame ? there : null
  }

  async #write(
    { queue, namespace, task, options }: Configuration,
    onConflict: (columns: readonly string[]) => string,
  ): Promise<Record<string, unknown> | null> {
    const given = optionNames.filter((name) => options[name] !== undefined)
    const list = given.map((name) => columns[name])
    const values = given.map((name) => options[name])
    const { rows } = await this.#intake.read<Record<string, unknown>>(
      `INSERT INTO ${this.#schema}.mq_queues AS q (name, namespace, task, created_at${list.map((c) => `, ${c}`).join('')})
       VALUES ($1, $2, $3, ${this.#schema}.clock()${list.map((_, i) => `, $${i + 4}`).join('')})
       ON CONFLICT (name) DO ${onConflict(list)}
       RETURNING q.*`,
      [queue, namespace, task, ...values],
    )
    if (rows[0] === undefined) return null
    this.#known.delete(queue)
    // A hint of limited size: other instances learn about a longer name within a second.
    await this.#intake.read('SELECT pg_notify($1, $2)', [this.#channel, `mqconf:${queue}`])
    return rows[0]
  }

  /**
   * Which of these are encrypted. The first caller looks them up and the others wait for it. Known but old entries are looked
   * up in the background.
   */
  sealed(queues: ReadonlySet<string>): ReadonlySet<string> | Promise<ReadonlySet<string>> {
    const now = performance.now()
    const unknown: string[] = []
    const old: string[] = []
    for (const queue of queues) {
      const known = this.#known.get(queue)
      if (known === undefined) unknown.push(queue)
      else if (known.until <= now) old.push(queue)
    }
    if (old.length > 0) this.#lookUpOnce(old).catch(() => undefined)
    if (unknown.length === 0) return this.#among(queues)
    return this.#lookUpOnce(unknown).then(() => this.#among(queues))
  }

  /** According to the last lookup. */
  isSealed(queue: string): boolean {
    return this.#known.get(queue)?.isSealed === true
  }

  #among(queues: ReadonlySet<string>): ReadonlySet<string> {
    const out = new Set<string>()
    for (const queue of queues) if (this.isSealed(queue)) out.add(queue)
    return out
  }

  async #lookUpOnce(queues: readonly string[]): Promise<void> {
    const mine = queues.filter((queue) => !this.#asked.has(queue))
    if (mine.length > 0) {
      const asking = this.lookUp(mine).finally(() => {
        for (const queue of mine) this.#asked.delete(queue)
      })
      for (const queue of mine) this.#asked.set(queue, asking)
    }
    await Promise.all(new Set(queues.map((queue) => this.#asked.get(queue))))
  }

  /** Looks these up now. */
  async lookUp(queues: readonly string[]): Promise<void> {
    const { rows } = await this.#intake.read<{ name: string }>(
      `SELECT q.name FROM ${this.#schema}.mq_queues q WHERE q.name = ANY ($1) AND q.encryption_enabled`,
      [queues],
    )
    if (this.#known.size > knownMax) this.#known.clear()
    const sealed = new Set(rows.map(({ name }) => name))
    const until = performance.now() + knownMs
    for (const queue of queues) this.#known.set(queue, { isSealed: sealed.has(queue), until })
  }

  forget(queue: string): void {
    this.#known.delete(queue)
  }
}

export function toConfigured(row: Record<string, unknown>): Configured {
  return {
    queue: String(row.name),
    namespace: (row.namespace as string | null) ?? null,
    task: (row.task as string | null) ?? null,
    options: Object.fromEntries(optionNames.map((name) => [name, row[columns[name]]])) as QueueOptions,
  }
}

/** Why a caller with these queue patterns may not use the queue; null if it may. */
export function queueProblem(queues: readonly string[] | undefined, queue: string): Problem | null {
  if (isReservedQueue(queue)) {
    return { code: 'invalid_request', detail: 'Names that begin with "spillway:" are reserved.' }
  }
  if (!mayUseQueue(queues, queue)) {
    return { code: 'forbidden', detail: `This key may not use the queue ${queue}.` }
  }
  return null
}
