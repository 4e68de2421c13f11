/** What the generation section offers. */

/** 10,000 tokens a second in all. */
export const flowLoad = { streams: 500, every: 50 } as const
/** A tenth of it, by as many streams: what is left when nothing is scarce. */
export const calmLoad = { streams: 500, every: 500 } as const
/** As fast as they are taken. */
export const fullLoad = { streams: 64, every: 0 } as const

/** Ten at once of one user, who has three places. */
export const burstOf = { requests: 10, places: 3, script: { tokens: 20, every: 50 } } as const
/** Leaves after a tenth of it, and is away while a few tokens come. */
export const resuming = { script: { tokens: 200, every: 20 }, readFirst: 20, awayMs: 200 } as const
/** It is over by then. */
export const resumingLate = { script: { tokens: 50, every: 20 }, readFirst: 20, awayMs: 3_000 } as const
