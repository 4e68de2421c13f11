/** Repeats a task, one run at a time, until it is stopped. A fault is logged, and the next round follows. */
import type { IntakeLog } from 'spillway/workload'

export interface Rounds {
  /** Resolves when the last run has ended. */
  stop(): Promise<void>
}

export function rounds(everyMs: number, log: IntakeLog, what: string, round: () => Promise<void>): Rounds {
  let stopped = false
  let timer: NodeJS.Timeout | undefined
  let running: Promise<void> = Promise.resolve()
  const next = (): void => {
    if (stopped) return
    timer = setTimeout(() => {
      running = round()
        .catch((fault: unknown) => log.warn({ err: fault }, `${what} failed; it is tried again`))
        .then(next)
    }, everyMs)
    timer.unref()
  }
  next()
  return {
    stop: async () => {
      stopped = true
      clearTimeout(timer)
      await running
    },
  }
}
