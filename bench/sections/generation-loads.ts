/** What the generation section offers. */

export interface StreamLoad {
  readonly streams: number
  /** Milliseconds between two tokens of a stream. */
  readonly every: number
}

/** 10,000 tokens a second in all; and a tenth of it by as many streams, when nothing is scarce. */
export const flowLoads = {
  full: { flow: { streams: 500, every: 50 }, calm: { streams: 500, every: 500 } },
  quick: { flow: { streams: 200, every: 20 }, calm: { streams: 200, every: 200 } },
} as const satisfies Readonly<Record<string, { flow: StreamLoad; calm: StreamLoad }>>
/** As fast as they are taken. */
export const fullLoad = { streams: 64, every: 0 } as const

/** Ten at once of one user, who has three places. */
export const burstOf = { requests: 10, places: 3, script: { tokens: 20, every: 50 } } as const
/** Leaves after a tenth of it, and is away while a few tokens come. */
export const resuming = { script: { tokens: 200, every: 20 }, readFirst: 20, awayMs: 200 } as const
/** It is over by then. */
export const resumingLate = { script: { tokens: 50, every: 20 }, readFirst: 20, awayMs: 3_000 } as const
