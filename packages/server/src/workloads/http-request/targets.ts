/**
 * What an instance may call: the listed origins, less its own, of which only `/demo/echo`. Without that exception a caller
 * could reach the administration through the server itself, which with authentication off takes a call from loopback that
 * names nobody for the operator's.
 *
 * The rules are plain data, so that an instance can tell the others what it may call, and they can decide by the same code.
 */
import { BlockList, isIP } from 'node:net'
import { hostname, networkInterfaces } from 'node:os'
import { type AllowList, parseAllowList } from './allow-list.js'

export interface TargetRules {
  /** Origins and wildcards, as in SPILLWAY_FORWARD_ALLOW. */
  origins: readonly string[]
  /** Where the instance itself listens; null: nowhere. */
  own: OwnAddress | null
}

export interface OwnAddress {
  /** In the form of `bareHost`. */
  hosts: readonly string[]
  /** It is reached by every loopback address and name. */
  loopback: boolean
  port: number
}

export const demoEchoPath = '/demo/echo'

/** An unspecified address connects to this machine as well. */
const local = new BlockList()
local.addSubnet('127.0.0.0', 8, 'ipv4')
local.addSubnet('0.0.0.0', 8, 'ipv4')
local.addAddress('::1', 'ipv6')
local.addAddress('::', 'ipv6')

/** The URL standard has lower-cased it and given addresses one form; left are brackets, trailing dots and mapped IPv4. */
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

/** Of a server that listens there. On all addresses: those that this machine has now, and its name. */
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
    origins: list.origins,
    // What is sent is this path: the URL standard has resolved its dots, and nothing is decoded behind this check.
    allows: (url) => list.allows(url) && (own === null || url.pathname === demoEchoPath || !isOwn(own, url)),
  }
}
