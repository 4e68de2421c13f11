/** Time and chance, so that what goes by them can be tested without waiting. */
export interface Clock {
  /** Milliseconds that never go backwards. */
  now(): number
  /** Milliseconds since 1970, for dates that the server names. */
  wallMs(): number
  /** Rejects with the signal's reason when that is aborted first. */
  sleep(ms: number, signal?: AbortSignal): Promise<void>
  /** 0 to 1. */
  random(): number
}

/** The longest that a timer takes: beyond it, it would fire at once. */
export const timerMsMax = 2 ** 31 - 1

export const systemClock: Clock = {
  now: () => performance.now(),
  wallMs: () => Date.now(),
  random: () => Math.random(),
  sleep: (ms, signal) =>
    new Promise((resolve, reject) => {
      const leave = (): void => {
        clearTimeout(timer)
        reject(signal?.reason)
      }
      const timer = setTimeout(
        () => {
          signal?.removeEventListener('abort', leave)
          resolve()
        },
        Math.min(ms, timerMsMax),
      )
      if (signal?.aborted === true) leave()
      else signal?.addEventListener('abort', leave, { once: true })
    }),
}

/** Rejects with what `late` makes when it does not come in time, and with the signal's reason when that is aborted first. */
export async function within<T>(
  ms: number,
  wanted: T | Promise<T>,
  late: () => Error,
  signal?: AbortSignal | undefined,
): Promise<T> {
  const done = new AbortController()
  const stop = new Promise<never>((_, reject) => {
    const timer = setTimeout(() => reject(late()), Math.min(ms, timerMsMax))
    const leave = (): void => reject(signal?.reason)
    signal?.addEventListener('abort', leave, { once: true })
    done.signal.addEventListener('abort', () => {
      clearTimeout(timer)
      signal?.removeEventListener('abort', leave)
    })
  })
  try {
    return await Promise.race([wanted, stop])
  } finally {
    done.abort()
  }
}
