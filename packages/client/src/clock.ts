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
      const timer = setTimeout(() => {
        signal?.removeEventListener('abort', leave)
        resolve()
      }, ms)
      if (signal?.aborted === true) leave()
      else signal?.addEventListener('abort', leave, { once: true })
    }),
}
