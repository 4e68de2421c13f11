/**
 * A fleet of clients at work when their server begins to refuse nine of ten requests, and then stops refusing. Each client is
 * one of its own, as in processes of their own: they know nothing of each other.
 */
import { clientOn } from '../src/client.js'
import type { Clock } from '../src/clock.js'
import type { ClientOptions } from '../src/options.js'

export interface StormOptions {
  clients: number
  /** Calls that each client makes, one after the other. */
  calls: number
  /** Between two of them: 0 to so long. */
  thinkMsMax: number
  refusesFromMs: number
  refusesUntilMs: number
  refusedShare: number
  retryAfterSeconds: number
  deadlineMs: number
  /** False: as clients are that repeat what was refused after a second, for comparison. */
  hasManners: boolean
}

export interface Storm {
  /** Calls that succeeded, and requests that were sent for them. */
  useful: number
  sent: number
  failed: string[]
  /** When each request arrived. */
  arrivalsMs: number[]
  /** The longest that a call took. */
  longestMs: number
  endedMs: number
}

export const thirtySeconds: StormOptions = {
  ...{ clients: 200, calls: 5, thinkMsMax: 4_000 },
  ...{ refusesFromMs: 5_000, refusesUntilMs: 35_000, refusedShare: 0.9, retryAfterSeconds: 5 },
  deadlineMs: 60_000,
  hasManners: true,
}

const impatient: Partial<ClientOptions> = {
  throttle: false,
  retry: { attempts: 1_000, maxRetryDelayMs: 2_000, honorRetryAfter: false, budget: false },
}

/** `exchange` carries a request to the server and back, and says when it arrives there. */
export async function storm(
  options: StormOptions,
  clock: Clock,
  exchange: (arrive: () => Response) => Promise<Response>,
): Promise<Storm> {
  const begunMs = clock.now()
  const since = (): number => clock.now() - begunMs
  const seen: Storm = { useful: 0, sent: 0, failed: [], arrivalsMs: [], longestMs: 0, endedMs: 0 }
  const answer = (): Response => {
    const now = since()
    seen.sent++
    seen.arrivalsMs.push(now)
    const isRefusing = now >= options.refusesFromMs && now < options.refusesUntilMs
    if (!isRefusing || clock.random() >= options.refusedShare) return Response.json({ items: [], next_cursor: null })
    // As the server does it: spread over a tenth, in whole seconds.
    const retryAfter = String(Math.ceil(options.retryAfterSeconds * (1 + clock.random() * 0.1)))
    const problem = { code: 'overloaded', title: 'Overloaded', detail: 'later', status: 503 }
    return Response.json(problem, { status: 503, headers: { 'retry-after': retryAfter } })
  }
  const work = async (): Promise<void> => {
    const { operations } = clientOn(
      {
        ...{ baseUrl: 'http://storm.test', deadlineMs: options.deadlineMs, fetch: () => exchange(answer) },
        ...(!options.hasManners && impatient),
      },
      clock,
    )
    for (let call = 0; call < options.calls; call++) {
      await clock.sleep(clock.random() * options.thinkMsMax)
      const askedMs = since()
      await operations.list().then(
        () => seen.useful++,
        (fault: unknown) => seen.failed.push(String(fault)),
      )
      seen.longestMs = Math.max(seen.longestMs, since() - askedMs)
    }
    seen.endedMs = Math.max(seen.endedMs, since())
  }
  await Promise.all(Array.from({ length: options.clients }, work))
  return seen
}

/** Arrivals in each second. */
export function histogram({ arrivalsMs, endedMs }: Pick<Storm, 'arrivalsMs' | 'endedMs'>): number[] {
  const bins = new Array<number>(Math.ceil(endedMs / 1_000)).fill(0)
  for (const ms of arrivalsMs) bins[Math.floor(ms / 1_000)] = (bins[Math.floor(ms / 1_000)] ?? 0) + 1
  return bins
}

export function drawn(bins: readonly number[]): string {
  return bins
    .map((count, i) => `${String(i).padStart(4)} s ${String(count).padStart(5)} ${'#'.repeat(Math.ceil(count / 2))}`)
    .join('\n')
}
