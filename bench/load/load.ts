/** Closed-loop load: each connection sends its next request as soon as the answer to the last one arrives. */

export interface Load {
  /** `http://127.0.0.1:1234`. */
  readonly origin: string
  readonly path: string
  readonly connections: number
  readonly seconds: number
  readonly lanes: number
  /** Asks with `Prefer: respond-async`. */
  readonly async?: boolean
  /** An `Idempotency-Key` of its own for each request. */
  readonly keyed?: boolean
  /** `x-user`, one for each lane. */
  readonly identified?: boolean
}

export interface LoadResult {
  readonly perSecond: number
  readonly requests: number
  readonly p50Ms: number
  readonly p99Ms: number
}

export interface LoadGenerator {
  /** Name and version, for the report. */
  readonly name: string
  /** Rejects when any answer was not 2xx, or a connection failed. */
  run(load: Load): Promise<LoadResult>
}

export interface Counted {
  readonly requests: number
  readonly seconds: number
  readonly failed: number
  readonly p50Ms: number
  readonly p99Ms: number
}

export function toResult(load: Load, counted: Counted): LoadResult {
  const { requests, seconds, failed, p50Ms, p99Ms } = counted
  if (failed > 0 || requests === 0) {
    throw new Error(
      `${failed} of ${requests} requests to ${load.origin}${load.path} failed or were not answered 2xx: the figure would be worthless`,
    )
  }
  return { perSecond: requests / seconds, requests, p50Ms, p99Ms }
}
