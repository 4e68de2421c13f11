/** Whether a queue is among the allowed names, where `orders*` means a prefix; no list: all are. */
export function mayUseQueue(allowed: readonly string[] | undefined, queue: string): boolean {
  if (allowed === undefined) return true
  return allowed.some((name) => (name.endsWith('*') ? queue.startsWith(name.slice(0, -1)) : queue === name))
}

/** Lanes of our own workloads: a caller that writes to them could hold up others. */
export const reservedQueuePrefix = 'spillway:'

export function isReservedQueue(queue: string): boolean {
  return queue.startsWith(reservedQueuePrefix)
}
