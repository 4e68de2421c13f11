/** The code of a store's fault. */
export function codeOf(fault: unknown): string | undefined {
  return typeof fault === 'object' && fault !== null && 'code' in fault && typeof fault.code === 'string'
    ? fault.code
    : undefined
}

/** The database could not do its work, whatever the values were. All other faults are ours, the user's, or the values'. */
export const isNobodysFault = (fault: unknown): boolean => nobodysFault.has(codeOf(fault) ?? '')

const nobodysFault: ReadonlySet<string> = new Set(['unavailable', 'timeout', 'conflict', 'disk_full'])

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
