export interface BackoffOptions {
  baseMs: number
  maxMs: number
}

/**
 * Full jitter: anywhere between 0 and base × 2^(attempt − 1), at most `maxMs`. The whole range is used so that operations
 * that failed together do not return together.
 */
export function backoffMs(
  attempt: number,
  { baseMs, maxMs }: BackoffOptions,
  random: () => number = Math.random,
): number {
  const ceiling = Math.min(maxMs, baseMs * 2 ** Math.min(attempt - 1, 30))
  return Math.floor(random() * ceiling)
}
