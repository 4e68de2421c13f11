/** Names in Redis. Several installations can share one, each with its prefix. */
export interface Names {
  stream(id: string): string
  /** Exists from the opening of a stream for as long as the stream may exist. */
  mark(id: string): string
  /** The channel for append notifications. */
  readonly bell: string
  /** Written from time to time, to check that Redis accepts writes. */
  readonly trial: string
}

export function namesFor(prefix: string): Names {
  if (prefix === '') throw new TypeError('a prefix is needed')
  return {
    stream: (id) => `${prefix}:stream:{${id}}`,
    mark: (id) => `${prefix}:mark:{${id}}`,
    bell: `${prefix}:bell`,
    trial: `${prefix}:trial`,
  }
}
