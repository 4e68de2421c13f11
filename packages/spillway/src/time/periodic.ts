export interface PeriodicOptions {
  /** Each pause is up to this share longer or shorter, so that processes that start together do not stay together. */
  jitter?: number
  /** Gets what the task throws; the next run follows all the same. Default: the fault is not caught. */
  onFault?(fault: unknown): void
}

export interface Periodic {
  /** Resolves when the current run, if any, has ended. */
  stop(): Promise<void>
}

/** Runs the task again and again, with a pause of `everyMs` before each run. Does not keep the process alive. */
export function periodic(
  everyMs: number,
  task: () => void | Promise<void>,
  { jitter = 0, onFault }: PeriodicOptions = {},
): Periodic {
  let timer: NodeJS.Timeout | undefined
  let running: Promise<void> | undefined
  let stopped = false
  const schedule = (): void => {
    running = undefined
    if (stopped) return
    timer = setTimeout(run, everyMs * (1 + jitter * (2 * Math.random() - 1)))
    timer.unref()
  }
  const run = (): void => {
    try {
      const result = task()
      if (result === undefined) schedule()
      else running = (onFault === undefined ? result : result.catch(onFault)).finally(schedule)
    } catch (fault) {
      schedule()
      if (onFault === undefined) throw fault
      onFault(fault)
    }
  }
  schedule()
  return {
    stop: async () => {
      stopped = true
      clearTimeout(timer)
      await running
    },
  }
}
