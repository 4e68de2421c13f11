/** With less time left, the answer would hardly arrive before the deadline. */
const roomMsMin = 50
const baseMs = 250

export interface PauseInput {
  /** How often it was tried, sent or not, from 1 on. */
  tries: number
  /** The server's Retry-After; 0: none. */
  retryAfterMs: number
  maxMs: number
  /** Until the deadline. */
  leftMs: number
  /** 0 to 1. */
  random: number
}

/**
 * Full jitter on top of Retry-After: never earlier, and spread over as much again, so that clients that were refused
 * together do not return together. Without Retry-After, jitter over a time that doubles. Null: no retry, because the pause
 * is longer than the maximum or would end after the deadline.
 */
export function pauseMs({ tries, retryAfterMs, maxMs, leftMs, random }: PauseInput): number | null {
  if (retryAfterMs > maxMs) return null
  const roomMs = leftMs - retryAfterMs
  if (roomMs < roomMsMin) return null
  const doubledMs = baseMs * 2 ** Math.min(tries - 1, 20)
  // The jitter must not exceed the deadline: an attempt that still fits is worth more than an error now.
  return retryAfterMs + random * Math.min(Math.max(doubledMs, retryAfterMs), maxMs, roomMs)
}

/** A long-poll that returns empty sooner than this was not held back. */
export const quickMs = 100
const idleMsMax = 1_000

/**
 * The pause before the next poll, so that a server that does not hold back is not polled in a hot loop; `times` in a row,
 * from 1 on.
 */
export function idleMs(times: number, random: number): number {
  return quickMs + random * (Math.min(idleMsMax, quickMs * 2 ** Math.min(times, 10)) - quickMs)
}
