/** Checks the caller's arguments before anything is sent, so that a caller's mistake does not look like a server fault. */

/** At least `least`; Infinity is a number, too. */
export function number(name: string, given: number, least = 0): number {
  if (given >= least) return given
  throw new TypeError(`${name} must be a number of at least ${least}, not ${given}`)
}

/** Later headers win; names are case-insensitive. Errors never show a value: it may be a secret. */
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
  // URLs cannot express these two: every client resolves them as "here" and "above", escaped or not.
  if (name === '' || name === '.' || name === '..') {
    throw new TypeError(`${JSON.stringify(name)} cannot be a part of a path`)
  }
  try {
    return encodeURIComponent(name)
  } catch {
    throw new TypeError(`${JSON.stringify(name)} is no well-formed text`)
  }
}
