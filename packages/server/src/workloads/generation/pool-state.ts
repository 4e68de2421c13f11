/** HEALTHY < 70% ≤ DEGRADED < 90% ≤ CRITICAL < 100% = EXHAUSTED: the values of `sse_pool_state`. */
export function poolStateOf(held: number, total: number): number {
  if (held >= total) return 3
  if (held >= total * 0.9) return 2
  return held >= total * 0.7 ? 1 : 0
}
