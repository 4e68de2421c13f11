import { limits } from '@spillway/protocol/wire'

/** The preferences in `Prefer` (RFC 7240). Unknown or malformed ones are ignored, as the RFC says. */
export interface Preferences {
  respondAsync: boolean
  /** At most 60; Preference-Applied has the value used. */
  waitSeconds?: number
}

const none: Preferences = Object.freeze({ respondAsync: false })

export function parsePreferences(header: string | string[] | undefined): Preferences {
  if (header === undefined) return none
  const preferences: Preferences = { respondAsync: false }
  const text = Array.isArray(header) ? header.join(',') : header
  for (const part of text.split(',')) {
    const token = (part.split(';', 1)[0] ?? '').trim().toLowerCase()
    if (token === 'respond-async') {
      preferences.respondAsync = true
      continue
    }
    const wait = /^wait\s*=\s*"?(\d{1,9})"?$/.exec(token)
    // The first of several counts (RFC 7240 §2).
    if (wait !== null && preferences.waitSeconds === undefined) {
      preferences.waitSeconds = Math.min(Number(wait[1]), limits.preferWaitSecondsMax)
    }
  }
  return preferences
}

/** The value of Preference-Applied, or undefined when nothing was applied. */
export function appliedPreferences(applied: Preferences): string | undefined {
  const parts: string[] = []
  if (applied.respondAsync) parts.push('respond-async')
  if (applied.waitSeconds !== undefined) parts.push(`wait=${applied.waitSeconds}`)
  return parts.length === 0 ? undefined : parts.join(', ')
}

export type IdempotencyKey = { ok: true; key: string | undefined } | { ok: false; detail: string }

/** 1–255 characters; an empty header is a caller's mistake, not an absent one. */
export function parseIdempotencyKey(header: string | string[] | undefined): IdempotencyKey {
  if (header === undefined) return { ok: true, key: undefined }
  const key = Array.isArray(header) ? header.join(', ') : header
  if (key.length >= 1 && key.length <= limits.idempotencyKeyCharacters) return { ok: true, key }
  return { ok: false, detail: `Idempotency-Key must have 1 to ${limits.idempotencyKeyCharacters} characters.` }
}
