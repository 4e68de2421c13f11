/**
 * Removes messages that have been kept long enough (mq_sweep), in short steps over the partitions. A task of maintenance/sweeps.ts,
 * which says when: a round goes from the first partition to the last, with a rest after each step.
 */
import type { IntakeApi, SweptBatch } from 'spillway/workload'

export interface Step {
  removed: number
  givenUp: number
  traces: number
  /** The last partition that was looked at; null: there are no more. */
  last: string | null
}

export interface SweepStore {
  /** Whether there is anything that may ever be removed. */
  isNeeded(): Promise<boolean>
  /** Looks at the next partitions behind `after`, and removes `most` messages at most. */
  step(most: number, after: string | null): Promise<Step>
}

export const sweepEveryMs = 5_000
/** Of one transaction: it holds locks that pushes wait for. */
const mostDefault = 2_000

/** Each call is the next step. */
export function messageSweep(store: SweepStore, most = mostDefault): () => Promise<SweptBatch> {
  let at: string | null = null
  return async () => {
    // One statement in a while for those who keep everything.
    if (at === null && !(await store.isNeeded())) return { removed: {}, isFull: false }
    const { removed, givenUp, traces, last } = await store.step(most, at)
    // When it took all that it may, the same partitions may have more.
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

export function sweepStore(intake: IntakeApi, schema: string): SweepStore {
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
