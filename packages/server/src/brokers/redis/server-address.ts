export interface ServerAddress {
  /** Host, port and database only: safe to log. */
  readonly shown: string
  readonly url: string
}

const defaultPort = '6379'
const schemes = ['redis:', 'rediss:']

/** `redis://[[user]:password@]host[:port][/database]`, or `rediss://…` for TLS. */
export function parseAddress(text: string): ServerAddress {
  // The text may contain a password, so errors do not quote it.
  if (!URL.canParse(text)) throw new TypeError('the address of Redis is no URL')
  const { protocol, hostname, port, pathname } = new URL(text)
  if (!schemes.includes(protocol) || hostname === '') {
    throw new TypeError('the address of Redis is not of the form redis://host:port')
  }
  return { shown: `${hostname}:${port || defaultPort}${pathname === '/' ? '' : pathname}`, url: text }
}
