/**
 * Removes messages whose retention has ended (mq_sweep), in short steps over the partitions. A task of
 * maintenance/sweeps.ts, which schedules it: a round goes from the first partition to the last, with a pause after each step.
 */
import type { Intake, SweptBatch } from 'spillway/workload'

export const sweepEveryMs = 5_000
/** Per transaction, because pushes wait for its locks. */
const mostDefault = 2_000
const stepMs = 10_000
const stepPartitions = 500

/** Each call runs the next step, which removes at most `most` messages. */
export function messageSweep(
  intake: Pick<Intake, 'read' | 'transaction'>,
  schema: string,
  most = mostDefault,
): () => Promise<SweptBatch> {
  /** The last partition that was visited; null: a new round starts. */
  let at: string | null = null
  const isNeeded = async (): Promise<boolean> => {
    const { rows } = await intake.read<{ needed: boolean }>(
      `SELECT EXISTS (SELECT FROM ${schema}.mq_queues q WHERE q.retention_enabled OR q.max_wait_seconds > 0) OR EXISTS (SELECT FROM ${schema}.mq_traces) AS needed`,
    )
    return rows[0]?.needed === true
  }
  return async () => {
    // If everything is kept, this is the only statement.
    if (at === null && !(await isNeeded())) return { removed: {}, isFull: false }
    const { rows } = await intake.transaction(
      (tx) =>
        tx.query<{ removed: number; given_up: number; traces: number; last: string | null }>(
          `SELECT removed, given_up, traces, last FROM ${schema}.mq_sweep($1, $2, $3)`,
          [most, at, stepPartitions],
        ),
      { timeoutMs: stepMs },
    )
    const [row] = rows
    if (row === undefined) throw new Error('the sweep gave no answer')
    const { removed, given_up: givenUp, traces, last } = row
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
