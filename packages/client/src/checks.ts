/** What the caller gives is looked at before anything is sent: a mistake of the caller is no fault of the server. */

/** At least `least`; Infinity is a number, too. */
export function number(name: string, given: number, least = 0): number {
  if (given >= least) return given
  throw new TypeError(`${name} must be a number of at least ${least}, not ${given}`)
}

/** Later ones win, whatever the case of their names. The value is not told: it may be a secret. */
export function mergedHeaders(...given: Readonly<Record<string, string>>[]): Record<string, string> {
  const merged = new Headers()
  for (const [name, value] of given.flatMap((each) => Object.entries(each))) {
    try {
      merged.set(name, value)
    } catch {
      throw new TypeError(`a header has a name or a value that cannot be sent: ${JSON.stringify(name)}`)
    }
  }
  return Object.fromEntries(merged)
}

/** A name as one part of a path. */
export function segment(name: string): string {
  // URLs have no way to write these two: every client takes them for "here" and "above", escaped or not.
  if (name === '' || name === '.' || name === '..') {
    throw new TypeError(`${JSON.stringify(name)} cannot be a part of a path`)
  }
  try {
    return encodeURIComponent(name)
  } catch {
    throw new TypeError(`${JSON.stringify(name)} is no well-formed text`)
  }
}
