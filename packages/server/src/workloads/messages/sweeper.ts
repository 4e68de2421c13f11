/**
 * Removes messages whose retention has ended (mq_sweep), in short steps over the partitions. A task of
 * maintenance/sweeps.ts, which schedules it: a round goes from the first partition to the last, with a pause after each step.
 */
import type { Intake, SweptBatch } from 'spillway/workload'

export interface Step {
  removed: number
  givenUp: number
  traces: number
  /** The last partition that was visited; null: there are no more. */
  last: string | null
}

export interface SweepStore {
  /** Whether anything can ever be removed. */
  isNeeded(): Promise<boolean>
  /** Visits the next partitions after `after`, and removes at most `most` messages. */
  step(most: number, after: string | null): Promise<Step>
}

export const sweepEveryMs = 5_000
/** Per transaction, because pushes wait for its locks. */
const mostDefault = 2_000

/** Each call runs the next step. */
export function messageSweep(store: SweepStore, most = mostDefault): () => Promise<SweptBatch> {
  let at: string | null = null
  return async () => {
    // If everything is kept, this is the only statement.
    if (at === null && !(await store.isNeeded())) return { removed: {}, isFull: false }
    const { removed, givenUp, traces, last } = await store.step(most, at)
    // If the limit was reached, the same partitions may have more.
    const isFull = Math.max(removed, givenUp, traces) >= most
    if (!isFull) at = last
    return {
      removed: { mq_messages: removed, mq_given_up: givenUp, mq_traces: traces },
      isFull,
      goesOn: isFull || last !== null,
    }
  }
}

const stepMs = 10_000
const stepPartitions = 500

export function sweepStore(intake: Intake, schema: string): SweepStore {
  return {
    isNeeded: async () => {
      const { rows } = await intake.read<{ needed: boolean }>(
        `SELECT EXISTS (SELECT FROM ${schema}.mq_queues q WHERE q.retention_enabled OR q.max_wait_seconds > 0) OR EXISTS (SELECT FROM ${schema}.mq_traces) AS needed`,
      )
      return rows[0]?.needed === true
    },
    step: (most, after) =>
      intake.transaction(
        async (tx) => {
          const { rows } = await tx.query<{ removed: number; given_up: number; traces: number; last: string | null }>(
            `SELECT removed, given_up, traces, last FROM ${schema}.mq_sweep($1, $2, $3)`,
            [most, after, stepPartitions],
          )
          const [row] = rows
          if (row === undefined) throw new Error('the sweep gave no answer')
          return { removed: row.removed, givenUp: row.given_up, traces: row.traces, last: row.last }
        },
        { timeoutMs: stepMs },
      ),
  }
}
