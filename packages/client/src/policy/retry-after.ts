/**
 * Milliseconds, from either form of Retry-After: seconds or an HTTP date. Null for none, or one that is neither. A date is
 * compared with the server's own clock where the answer tells that: the client's may be minutes off.
 */
export function retryAfterMs(header: string | null, nowMs: number, dateHeader: string | null = null): number | null {
  if (header === null) return null
  const text = header.trim()
  if (/^\d+$/.test(text)) return Number(text) * 1_000
  // Date.parse takes a lone number, too, for a year: "-5" and "1.5" are no dates.
  const at = /[a-z]/i.test(text) ? Date.parse(text) : Number.NaN
  if (Number.isNaN(at)) return null
  const told = dateHeader === null ? Number.NaN : Date.parse(dateHeader)
  return Math.max(0, at - (Number.isNaN(told) ? nowMs : told))
}
