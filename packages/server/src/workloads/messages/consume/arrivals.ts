/**
 * Waiting consumers. None of them polls the database:
 *
 *   pop finds nothing ──► waits ──► notice (a push made a partition ready), or a message is due, or the check once a second
 *   that covers all waiters here ──► one waiter for that queue and group pops ──► found: two more are woken, there may be
 *   more; nothing found: it waits again
 *
 * A notice is only a hint and may be lost; the check once a second is the reliable part.
 */
import { hash } from 'node:crypto'
import { type Periodic, periodic } from 'spillway/workload'

export interface Target {
  queue: string | null
  group: string
  partition?: string | null
  namespace?: string | null
  task?: string | null
}

export type NamedTarget = { queue: string; group: string }

export interface ArrivalsOptions {
  /** The targets that have something to read. */
  due(targets: readonly NamedTarget[]): Promise<readonly NamedTarget[]>
  onFault(fault: unknown): void
  onWaiting(count: number): void
}

interface Line {
  target: Target
  mark: string | null
  /** Each wakes its waiter. */
  waiters: Set<() => void>
  due: NodeJS.Timeout | undefined
}

const lookAroundMs = 1_000
const wokenByFound = 2
const looksPerAsking = 5
const expectMsMax = 60_000

export class Arrivals {
  readonly #options: ArrivalsOptions
  readonly #lines = new Map<string, Line>()
  readonly #byGroup = new Map<string, Set<Line>>()
  readonly #regular: Periodic
  #looks = 0
  #count = 0
  #closed = false

  constructor(options: ArrivalsOptions) {
    this.#options = options
    this.#regular = periodic(lookAroundMs, () => this.#look(), { onFault: options.onFault })
  }

  /** Resolves when a pop is worth trying, or when `signal` fires. Call before the pop, so that no message is missed. */
  wait(target: Target, signal: AbortSignal): { woken: Promise<void>; leave(): void } {
    const key = keyOf(target)
    let line = this.#lines.get(key)
    if (line === undefined) {
      line = { target, mark: target.queue === null ? null : markOf(target.queue), waiters: new Set(), due: undefined }
      this.#lines.set(key, line)
      const shared = this.#byGroup.get(groupKey(target)) ?? new Set()
      this.#byGroup.set(groupKey(target), shared.add(line))
    }
    const { waiters } = line
    let wake = (): void => undefined
    const leave = (): void => {
      if (!waiters.delete(wake)) return
      signal.removeEventListener('abort', wake)
      this.#counted(-1)
      if (waiters.size === 0) this.#close(key)
    }
    const woken = new Promise<void>((resolve) => {
      wake = () => {
        leave()
        resolve()
      }
    })
    waiters.add(wake)
    this.#counted(1)
    if (signal.aborted) wake()
    else signal.addEventListener('abort', wake, { once: true })
    return { woken, leave }
  }

  /** A message may be available in `ms`. */
  expect(target: Target, ms: number): void {
    const line = this.#lines.get(keyOf(target))
    if (line === undefined || line.due !== undefined || (ms > lookAroundMs && line.target.queue !== null)) return
    line.due = setTimeout(
      () => {
        line.due = undefined
        wakeSome(line, 1)
      },
      Math.min(expectMsMax, Math.max(1, ms)),
    )
    line.due.unref()
  }

  /** This queue may have more for other consumers of the same group. */
  found(target: NamedTarget): void {
    this.#wakeAt(target, wokenByFound)
    this.#wakeAt({ ...target, queue: null }, wokenByFound)
  }

  /** Messages arrived in the queues with these marks. */
  came(marks: ReadonlySet<string>): void {
    const any = marks.has('*')
    for (const line of this.#lines.values()) if (any || line.mark === null || marks.has(line.mark)) wakeSome(line, 1)
  }

  /** Notices may have been lost. Waiters without a queue depend on them; the regular check covers the others. */
  missed(): void {
    for (const line of this.#lines.values()) if (line.mark === null) wakeSome(line, 1)
  }

  get isClosed(): boolean {
    return this.#closed
  }

  /** Ends all waits. */
  close(): void {
    this.#closed = true
    void this.#regular.stop()
    for (const line of this.#lines.values()) wakeSome(line, line.waiters.size)
  }

  async #look(): Promise<void> {
    const lines = [...this.#lines.values()]
    if (lines.length === 0) return
    const named = lines.flatMap(({ target: { queue, group } }) => (queue === null ? [] : [{ queue, group }]))
    for (const target of await this.#options.due(named)) this.#wakeAt(target, 1)
    // Waiters without a queue must pop to find out. Every notice wakes them, and every few checks.
    if (this.#looks++ % looksPerAsking === 0) this.missed()
  }

  #wakeAt(target: Pick<Target, 'queue' | 'group'>, count: number): void {
    for (const line of this.#byGroup.get(groupKey(target)) ?? []) wakeSome(line, count)
  }

  #close(key: string): void {
    const line = this.#lines.get(key)
    if (line === undefined) return
    clearTimeout(line.due)
    this.#lines.delete(key)
    const shared = this.#byGroup.get(groupKey(line.target))
    shared?.delete(line)
    if (shared?.size === 0) this.#byGroup.delete(groupKey(line.target))
  }

  #counted(by: number): void {
    this.#count += by
    this.#options.onWaiting(this.#count)
  }
}

function wakeSome(line: Line, count: number): void {
  let left = count
  for (const wake of line.waiters) {
    if (left-- <= 0) return
    wake()
  }
}

/** A short form of the queue's name for notices. If two queues share one, a waiter pops and finds nothing. */
export const markOf = (queue: string): string => hash('md5', queue, 'hex').slice(0, 8)

const groupKey = ({ queue, group }: Pick<Target, 'queue' | 'group'>): string => `${queue ?? ''}\0${group}`

const keyOf = ({ queue, group, partition, namespace, task }: Target): string =>
  `${queue ?? ''}\0${group}\0${partition ?? ''}\0${namespace ?? ''}\0${task ?? ''}`
