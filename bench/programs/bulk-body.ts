export const bulkSize = 1_000

/** The same for every program. */
export const bulkBodies = Array.from({ length: bulkSize }, (_, n) => ({
  queue: 'bench',
  partition: `lane-${n % 200}`,
  payload: { url: 'http://127.0.0.1/demo/echo', body: { ref: `ref-${String(n).padStart(20, 'x')}` } },
}))
