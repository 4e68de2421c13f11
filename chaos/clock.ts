import { setTimeout as delay } from 'node:timers/promises'

/** Milliseconds since the epoch, with fractions: what one process does in one millisecond still has an order. */
export const now = (): number => performance.timeOrigin + performance.now()

/** Shorter when the signal fires. */
export async function pause(ms: number, signal: AbortSignal): Promise<void> {
  try {
    await delay(ms, undefined, { signal })
  } catch (fault) {
    if (!signal.aborted) throw fault
  }
}
