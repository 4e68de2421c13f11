/**
 * Protects a server without authentication from web pages. Such a server listens on loopback only, but its user's browser
 * runs pages of other sites on the same machine:
 *
 *   - DNS rebinding: evil.example resolves to 127.0.0.1, so its page may call the server as its own origin. The browser
 *     still sends `Host: evil.example`, so only names of this server are accepted.
 *   - A page may send requests to another site without being able to read the answer. So requests that change or consume
 *     something must not come from another site. Browsers say where a request comes from in Sec-Fetch-Site and Origin,
 *     which pages cannot set.
 *
 * With authentication on none of this is needed: a page has no key, and browsers never add one by themselves.
 */
import type { IncomingMessage } from 'node:http'
import { isIP } from 'node:net'
import type { Problem } from 'spillway/workload'
import { type Config, isLoopbackHost } from '../config/index.js'

export interface OwnSites {
  /** Whether the request names this server. Costs a set lookup for a Host that was seen before. */
  isForUs(request: IncomingMessage): boolean
  /** Why the request is refused; undefined: it is allowed. `changes`: it changes or consumes something. */
  refusal(request: IncomingMessage, changes: boolean): Problem | undefined
}

/** Valid Host values are cached, but not all of them: ports make them many. */
const rememberedMax = 64
const shownCharactersMax = 255

type SiteSettings = Pick<Config['server'], 'host' | 'allowedHosts' | 'corsOrigins'>

export function ownSites({ host, allowedHosts, corsOrigins }: SiteSettings): OwnSites {
  const names = new Set([...allowedHosts, host.toLowerCase()])
  const listed = new Set(corsOrigins)
  const remembered = new Set<string>()

  const isOwnName = (name: string): boolean =>
    names.has(name) || /^[^.].*\.localhost$/.test(name) || isLoopbackHost(name)

  const isForUs = (request: IncomingMessage): boolean => {
    const authority = authorityOf(request)
    // Every browser sends a Host. HTTP/1.0 needs none; without one HTTP/1.1 is refused elsewhere.
    if (authority === undefined) return true
    if (remembered.has(authority)) return true
    const name = hostNameOf(authority)
    if (name === undefined || !isOwnName(name)) return false
    if (remembered.size >= rememberedMax) remembered.clear()
    remembered.add(authority)
    return true
  }

  /** Host and port are the ones that the browser used, or the ones that we listen on. */
  const isOurOrigin = (origin: string, request: IncomingMessage): boolean => {
    const authority = /^https?:\/\/([^/]+)$/i.exec(origin)?.[1]
    if (authority === undefined) return false
    if (authority.toLowerCase() === authorityOf(request)?.toLowerCase()) return true
    const name = hostNameOf(authority)
    return name !== undefined && isOwnName(name) && authority.endsWith(`:${request.socket.localPort}`)
  }

  const isFromElsewhere = (request: IncomingMessage): boolean => {
    const { origin, 'sec-fetch-site': site } = request.headers
    if (origin !== undefined && (listed.has('*') || listed.has(origin))) return false
    // 'none': typed by the user. 'same-origin' is the browser's own comparison, right even if a proxy changes the Host.
    if (site === 'same-origin' || site === 'none') return false
    if (site === 'cross-site' || site === 'same-site') return true
    return origin !== undefined && !isOurOrigin(origin, request)
  }

  return {
    isForUs,
    refusal(request, changes) {
      if (!isForUs(request)) return misdirected(authorityOf(request) ?? '')
      return changes && isFromElsewhere(request) ? foreign(request.headers.origin) : undefined
    },
  }
}

const shown = (text: string): string => JSON.stringify(text.slice(0, shownCharactersMax))

function misdirected(authority: string): Problem {
  return {
    code: 'misdirected_request',
    detail: `${shown(authority)} is not a name of this server. If it should be, list the name in SPILLWAY_ALLOWED_HOSTS, or turn authentication on.`,
  }
}

function foreign(origin: string | undefined): Problem {
  const from = origin === undefined ? 'a page of another site' : `the origin ${shown(origin)}`
  return {
    code: 'forbidden',
    detail: `The request comes from ${from} and would change something. To allow it, list the origin in SPILLWAY_CORS_ORIGINS, or turn authentication on.`,
  }
}

/** The host that the request is for. A target in absolute form overrides the Host header (RFC 9112, 3.2.2). */
function authorityOf({ url = '/', headers }: IncomingMessage): string | undefined {
  if (url.charCodeAt(0) === slash || url === '*') return headers.host
  return /^[a-z][a-z0-9+.-]*:\/\/([^/?#]*)/i.exec(url)?.[1] ?? headers.host
}

const slash = 47
const authorityForm = /^(?:\[([0-9a-f:.]+)\]|([^\s:@/?#[\]\\]+))(?::\d*)?$/i

/** Lower case, without port, brackets and trailing dot. Undefined: not a host. */
export function hostNameOf(authority: string): string | undefined {
  const [, address, name] = authorityForm.exec(authority) ?? []
  if (address !== undefined) return isIP(address) === 6 ? address.toLowerCase() : undefined
  return name?.toLowerCase().replace(/\.$/, '')
}

/** Whether there are two Host headers. Node keeps the first; a proxy in front may have used another. */
export function hasTwoHosts({ rawHeaders }: IncomingMessage): boolean {
  let seen = false
  for (let at = 0; at < rawHeaders.length; at += 2) {
    const name = rawHeaders[at]
    if (name?.length !== 4 || name.toLowerCase() !== 'host') continue
    if (seen) return true
    seen = true
  }
  return false
}
