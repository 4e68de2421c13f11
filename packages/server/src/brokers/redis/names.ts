export type Names = ReturnType<typeof namesFor>

/** Names in Redis. Several installations can share one, each with its prefix. */
export function namesFor(prefix: string) {
  return {
    stream: (id: string): string => `${prefix}:stream:{${id}}`,
    /** Exists from the opening of a stream for as long as the stream may exist. */
    mark: (id: string): string => `${prefix}:mark:{${id}}`,
    /** The channel for append notifications. */
    bell: `${prefix}:bell`,
    /** Written from time to time, to check that Redis accepts writes. */
    trial: `${prefix}:trial`,
  }
}
