/** What things are called in Redis. Several installations share one, each under its prefix. */
export interface Names {
  stream(id: string): string
  /** There from the opening of a stream on, for as long as the stream may be. */
  mark(id: string): string
  /** The channel of the doorbell. */
  readonly bell: string
  /** Written now and then, to see whether writes are taken. */
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
