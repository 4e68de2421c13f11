import { type Intake, type IntakeLog, type Periodic, periodic } from 'spillway/workload'

/** Repeats the work while the store is available. What it throws is logged, and it is repeated all the same. */
export function repeatWhenReady(
  intake: Intake,
  log: Pick<IntakeLog, 'warn'>,
  everyMs: number,
  what: string,
  work: () => Promise<void>,
): Periodic {
  const whenReady = async (): Promise<void> => {
    if (intake.isReady) await work()
  }
  return periodic(everyMs, whenReady, {
    onFault: (fault) => log.warn({ err: fault, retryMs: everyMs }, `${what} failed, retrying`),
  })
}

/** Date.parse reads far more than HTTP dates, such as 2026: only text that begins with a weekday is one. */
const httpDate = /^(?:Mon|Tue|Wed|Thu|Fri|Sat|Sun)/

/**
 * The wait that a target asks for with Retry-After, in either form (RFC 9110 §10.2.3), at most `maxMs`; undefined if absent,
 * unreadable or past.
 */
export function waitAskedFor(header: unknown, nowMs: number, maxMs: number): number | undefined {
  if (typeof header !== 'string') return undefined
  const text = header.trim()
  const waitMs = /^\d{1,10}$/.test(text) ? Number(text) * 1_000 : httpDate.test(text) ? Date.parse(text) - nowMs : 0
  return waitMs > 0 ? Math.min(waitMs, maxMs) : undefined
}
