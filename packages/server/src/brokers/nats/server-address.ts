import type { NodeConnectionOptions } from '@nats-io/transport-node'

export interface ServerAddress {
  /** Hosts and ports only: fit for logs. */
  readonly shown: string
  readonly options: Pick<NodeConnectionOptions, 'servers' | 'user' | 'pass' | 'token' | 'tls'>
}

const defaultPort = '4222'
const schemes = ['nats:', 'tls:']

/**
 * `nats://[user:password@|token@]host[:port]`, `tls://…` to insist on TLS; several with commas between. The library
 * takes a password's digits for the port, so that it is given the parts.
 */
export function parseAddress(text: string): ServerAddress {
  const urls = text.split(',').map((part) => parseOne(part.trim()))
  const servers = urls.map(({ hostname, port }) => `${hostname}:${port || defaultPort}`)
  const signed = urls.find(({ username }) => username !== '')
  const tls = urls.some(({ protocol }) => protocol === 'tls:') ? { tls: {} } : {}
  return { shown: servers.join(','), options: { servers, ...tls, ...(signed ? credentials(signed) : {}) } }
}

function parseOne(text: string): URL {
  const withScheme = text.includes('://') ? text : `nats://${text}`
  // The text may hold a password: it is in no message of an error.
  if (!URL.canParse(withScheme)) throw new TypeError('the address of the broker is no URL')
  const url = new URL(withScheme)
  if (!schemes.includes(url.protocol) || url.hostname === '') {
    throw new TypeError('the address of the broker is not of the form nats://host:port')
  }
  return url
}

function credentials({ username, password }: URL): { user: string; pass: string } | { token: string } {
  const user = decodeURIComponent(username)
  return password === '' ? { token: user } : { user, pass: decodeURIComponent(password) }
}
