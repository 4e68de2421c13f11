/** The code of a store's fault. */
export function codeOf(fault: unknown): string | undefined {
  return typeof fault === 'object' && fault !== null && 'code' in fault && typeof fault.code === 'string'
    ? fault.code
    : undefined
}

/** Retries after a deadlock or serialization failure. The transaction was rolled back. */
export async function retryConflicts<T>(attemptsMax: number, write: () => Promise<T>): Promise<T> {
  for (let attempt = 1; ; attempt++) {
    try {
      return await write()
    } catch (fault) {
      if (codeOf(fault) !== 'conflict' || attempt === attemptsMax) throw fault
    }
  }
}
