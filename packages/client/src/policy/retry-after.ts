const httpDate = /^(?:Mon|Tue|Wed|Thu|Fri|Sat|Sun)[a-z]*,? [\w -]+ \d\d:\d\d:\d\d (GMT|\d{4})$/

/**
 * Milliseconds from either form of Retry-After, seconds or an HTTP date. Null if missing or invalid. A date is compared with
 * the server's Date header, if present: the client's clock may be minutes off.
 */
export function retryAfterMs(header: string | null, nowMs: number, dateHeader: string | null = null): number | null {
  if (header === null) return null
  const text = header.trim()
  if (/^\d+$/.test(text)) return Number(text) * 1_000
  // Date.parse accepts almost anything that contains a year.
  const form = httpDate.exec(text)
  if (form === null) return null
  // The oldest of the three forms, which ends with the year, is in GMT without saying so.
  const at = Date.parse(form[1] === 'GMT' ? text : `${text} GMT`)
  if (Number.isNaN(at)) return null
  const serverNow = dateHeader === null ? Number.NaN : Date.parse(dateHeader)
  return Math.max(0, at - (Number.isNaN(serverNow) ? nowMs : serverNow))
}
