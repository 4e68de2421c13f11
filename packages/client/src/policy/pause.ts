/** What a pause is worth having for: with less time left the answer would hardly come before the deadline. */
const roomMsMin = 50
const baseMs = 250

export interface PauseInput {
  /** How often it was tried, whether or not it was sent: from 1 on. */
  tries: number
  /** What the server asked for; 0: nothing. */
  retryAfterMs: number
  maxMs: number
  /** Until the deadline. */
  leftMs: number
  /** 0 to 1. */
  random: number
}

/**
 * Full jitter above what the server asked for: never earlier, and spread over as much again, so that those who were
 * refused together do not come back together. Without that, over a time that doubles. Null: there is no point in waiting,
 * as the server's time is longer than the caller waits, or would end after the deadline.
 */
export function pauseMs({ tries, retryAfterMs, maxMs, leftMs, random }: PauseInput): number | null {
  if (retryAfterMs > maxMs) return null
  const roomMs = leftMs - retryAfterMs
  if (roomMs < roomMsMin) return null
  const doubledMs = baseMs * 2 ** Math.min(tries - 1, 20)
  // Not past the deadline by chance: an attempt that still fits is worth more than an error now.
  return retryAfterMs + random * Math.min(Math.max(doubledMs, retryAfterMs), maxMs, roomMs)
}

/** A long-poll that is answered sooner than this, and with nothing, was not held back. */
export const quickMs = 100
const idleMsMax = 1_000

/** Before the next one, so that a server that holds nothing back is not asked in a hot loop; `times` in a row, from 1 on. */
export function idleMs(times: number, random: number): number {
  return quickMs + random * (Math.min(idleMsMax, quickMs * 2 ** Math.min(times, 10)) - quickMs)
}
