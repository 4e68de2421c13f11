const defaultPort = '4222'
const schemes = ['nats:', 'tls:']

/**
 * `nats://[user:password@|token@]host[:port]`, or `tls://…` to require TLS; separate several with commas. The library
 * mistakes a password's digits for the port, so it gets the parts. `shown` has hosts and ports only: safe to log.
 */
export function parseAddress(text: string) {
  const urls = text.split(',').map((part) => parseOne(part.trim()))
  const servers = urls.map(({ hostname, port }) => `${hostname}:${port || defaultPort}`)
  const signed = urls.find(({ username }) => username !== '')
  const tls = urls.some(({ protocol }) => protocol === 'tls:') ? { tls: {} } : {}
  return { shown: servers.join(','), options: { servers, ...tls, ...(signed ? credentials(signed) : {}) } }
}

function parseOne(text: string): URL {
  const withScheme = text.includes('://') ? text : `nats://${text}`
  // The text may contain a password, so errors do not quote it.
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
