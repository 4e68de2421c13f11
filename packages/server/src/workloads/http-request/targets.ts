/**
 * What an instance may call: the listed origins, and on its own origin only `/demo/echo`. Otherwise a caller could reach the
 * administration through the server itself: with authentication off, a loopback call without a user is the operator's.
 *
 * The rules are plain data, so that an instance can announce them and the others can decide by the same code.
 */
import { isIP } from 'node:net'
import { hostname, networkInterfaces } from 'node:os'
import { networksOf } from '../../auth/identity.js'
import { type AllowList, parseAllowList } from './allow-list.js'

export interface TargetRules {
  /** Origins and wildcards, as in SPILLWAY_FORWARD_ALLOW. */
  origins: readonly string[]
  /** Where the instance itself listens; null: it does not listen. */
  own: OwnAddress | null
}

export interface OwnAddress {
  /** In the form of `bareHost`. */
  hosts: readonly string[]
  /** Every loopback address and name reaches it. */
  loopback: boolean
  port: number
}

export const demoEchoPath = '/demo/echo'

/** An unspecified address also connects to this machine. */
const local = networksOf(['127.0.0.0/8', '0.0.0.0/8', '::1', '::'])

/** The URL standard has normalised case and addresses; brackets, trailing dots and mapped IPv4 remain. */
function bareHost(host: string): string {
  const bare = host
    .toLowerCase()
    .replace(/^\[|\]$/g, '')
    .replace(/\.+$/, '')
  const mapped = /^::ffff:([0-9a-f]{1,4}):([0-9a-f]{1,4})$/.exec(bare)
  if (mapped === null) return bare
  const [high, low] = [Number.parseInt(mapped[1] ?? '', 16), Number.parseInt(mapped[2] ?? '', 16)]
  return [high >> 8, high & 255, low >> 8, low & 255].join('.')
}

function isLocal(host: string): boolean {
  if (host === 'localhost' || host.endsWith('.localhost')) return true
  const family = isIP(host)
  return family !== 0 && local.check(host, family === 4 ? 'ipv4' : 'ipv6')
}

/** For a server on this host. On all addresses: the current addresses of this machine, and its name. */
export function ownAddress(listenHost: string, port: number): OwnAddress {
  const host = bareHost(listenHost)
  const isAny = host === '0.0.0.0' || host === '::'
  const addresses = isAny
    ? Object.values(networkInterfaces()).flatMap((all) => all?.map(({ address }) => address) ?? [])
    : []
  const hosts = isAny ? [...addresses, hostname()] : [host]
  return { hosts: [...new Set(hosts.map(bareHost))], loopback: isLocal(host), port }
}

function isOwn({ hosts, loopback, port }: OwnAddress, url: URL): boolean {
  const named = url.port === '' ? (url.protocol === 'https:' ? 443 : 80) : Number(url.port)
  if (named !== port) return false
  const host = bareHost(url.hostname)
  return hosts.includes(host) || (loopback && isLocal(host))
}

export function targetsOf({ origins, own }: TargetRules): AllowList {
  const list = parseAllowList(origins)
  return {
    // The call uses exactly this path: the URL standard has resolved its dots, and nothing is decoded after this check.
    allows: (url) => list.allows(url) && (own === null || url.pathname === demoEchoPath || !isOwn(own, url)),
  }
}
