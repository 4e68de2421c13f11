/**
 * Whole seconds for Retry-After: at least the base, at most a tenth more, at random, so that clients refused together do not
 * return together. The tenth is computed as × 11 / 10: 1.1 × 60 is 66.00000000000001.
 */
export function retryAfterSeconds(baseSeconds: number, random: () => number = Math.random): number {
  const low = Math.max(1, Math.ceil(baseSeconds))
  const high = Math.max(low, Math.ceil((baseSeconds * 11) / 10))
  return low + Math.floor(random() * (high - low + 1))
}
