/** Time and randomness, so that tests need not wait. */
export interface Clock {
  /** Milliseconds that never go backwards. */
  now(): number
  /** Milliseconds since 1970, for dates from the server. */
  wallMs(): number
  /** Rejects with the signal's reason if that is aborted first. */
  sleep(ms: number, signal?: AbortSignal): Promise<void>
  /** 0 to 1. */
  random(): number
}

/** A longer timer would fire at once. */
const timerMsMax = 2 ** 31 - 1

export const later = (ms: number, call: () => void): ReturnType<typeof setTimeout> =>
  setTimeout(call, Math.min(ms, timerMsMax))

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
      const timer = later(ms, () => {
        signal?.removeEventListener('abort', leave)
        resolve()
      })
      if (signal?.aborted === true) leave()
      else signal?.addEventListener('abort', leave, { once: true })
    }),
}

/** Rejects with the error from `late` on timeout, and with the signal's reason if that is aborted first. */
export async function within<T>(
  ms: number,
  wanted: T | Promise<T>,
  late: () => Error,
  signal?: AbortSignal | undefined,
): Promise<T> {
  const done = new AbortController()
  const stop = new Promise<never>((_, reject) => {
    const timer = later(ms, () => reject(late()))
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
