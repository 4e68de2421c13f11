/** Where `http.request` may go: origins, compared in the form of the URL standard. */
export interface AllowList {
  allows(url: URL): boolean
}

export class AllowListError extends Error {
  readonly code = 'invalid_forward_origin'
}

interface Wildcard {
  protocol: string
  /** With its leading dot, so that `*.example.com` is neither `example.com` nor `badexample.com`. */
  suffix: string
  port: string
}

const wildcardForm = /^(https?:)\/\/\*(\.[^/*]+)$/i

function parseOrigin(text: string): URL {
  let url: URL
  try {
    url = new URL(text)
  } catch (cause) {
    throw new AllowListError(`Not an origin: ${JSON.stringify(text)}`, { cause })
  }
  if (url.protocol !== 'http:' && url.protocol !== 'https:') {
    throw new AllowListError(`Not an http or https origin: ${JSON.stringify(text)}`)
  }
  if (url.username !== '' || url.password !== '' || url.pathname !== '/' || url.search !== '' || url.hash !== '') {
    throw new AllowListError(`An origin has a scheme, a host and a port, nothing more: ${JSON.stringify(text)}`)
  }
  if (url.hostname.includes('*')) {
    throw new AllowListError(
      `A wildcard is allowed for subdomains only, as in https://*.example.com: ${JSON.stringify(text)}`,
    )
  }
  return url
}

function parseWildcard(text: string): Wildcard | undefined {
  const match = wildcardForm.exec(text.replace(/\/$/, ''))
  if (match === null) return undefined
  const { protocol, hostname, port } = parseOrigin(`${match[1]}//any${match[2]}`)
  const suffix = hostname.slice('any'.length)
  if (!suffix.slice(1).includes('.')) throw new AllowListError(`Too wide: ${JSON.stringify(text)}`)
  return { protocol, suffix, port }
}

/** Origins such as `http://127.0.0.1:9000`, `https://api.example.com` or `https://*.example.com`. */
export function parseAllowList(origins: readonly string[]): AllowList {
  const exact = new Set<string>()
  const wildcards: Wildcard[] = []
  for (const text of origins) {
    const wildcard = parseWildcard(text)
    if (wildcard === undefined) exact.add(parseOrigin(text).origin)
    else wildcards.push(wildcard)
  }
  return {
    allows(url) {
      if (url.username !== '' || url.password !== '') return false
      if (exact.has(url.origin)) return true
      return wildcards.some(
        ({ protocol, suffix, port }) =>
          url.protocol === protocol &&
          url.port === port &&
          url.hostname.length > suffix.length &&
          url.hostname.endsWith(suffix),
      )
    },
  }
}
