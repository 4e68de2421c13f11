import { BlockList, isIP } from 'node:net'
import { type Role, roles } from 'spillway/workload'

/** The caller. */
export interface Principal {
  identity: string
  roles: ReadonlySet<Role>
  /** Names of queues it may use; `orders*` is a prefix. Absent: all. */
  queues?: readonly string[]
}

/** Whether it has one of these roles. `operate` includes all. */
export function hasRole({ roles: held }: Principal, wanted: Role | readonly Role[]): boolean {
  if (held.has('operate')) return true
  return typeof wanted === 'string' ? held.has(wanted) : wanted.some((role) => held.has(role))
}

type Held = { readonly roles: ReadonlySet<string>; readonly queues?: readonly string[] }

/** For things that belong to no queue: a key that is bound to queues may not change them. */
export const operatesAll = ({ roles: held, queues }: Held): boolean => held.has('operate') && queues === undefined
export const viewsAll = (held: Held): boolean =>
  operatesAll(held) || (held.roles.has('view') && held.queues === undefined)

export function isRole(value: unknown): value is Role {
  return (roles as readonly unknown[]).includes(value)
}

/** `10.0.0.0/8`, `::1`: addresses or networks, in the form that the configuration has checked. */
export function networksOf(texts: readonly string[]): BlockList {
  const list = new BlockList()
  for (const text of texts) {
    const [address = '', prefix] = text.split('/')
    const family = isIP(address) === 6 ? 'ipv6' : 'ipv4'
    if (prefix === undefined) list.addAddress(address, family)
    else list.addSubnet(address, Number(prefix), family)
  }
  return list
}

/** One form per address: an IPv4 client of a dual-stack socket shows as ::ffff:1.2.3.4, and zones are local. */
function canonicalAddress(text: string): string | undefined {
  const version = isIP(text)
  if (version === 4) return text
  if (version === 0) return undefined
  const mapped = /^::ffff:(\d+\.\d+\.\d+\.\d+)$/i.exec(text)
  if (mapped?.[1] !== undefined) return mapped[1]
  const bare = text.split('%', 1)[0] ?? text
  return new URL(`http://[${bare}]`).hostname.slice(1, -1)
}

/** A hop of X-Forwarded-For: some proxies append the port. */
function hopAddress(hop: string): string | undefined {
  const text = hop.trim()
  const bracketed = /^\[([^\]]+)\](?::\d+)?$/.exec(text)
  if (bracketed?.[1] !== undefined) return canonicalAddress(bracketed[1])
  const withPort = /^(\d+\.\d+\.\d+\.\d+):\d+$/.exec(text)
  return canonicalAddress(withPort?.[1] ?? text)
}

function isTrusted(address: string, trusted: BlockList): boolean {
  return trusted.check(address, isIP(address) === 6 ? 'ipv6' : 'ipv4')
}

/** Hops checked at most; a longer chain is padding. */
const hopsMax = 32

/**
 * The client's address: the peer, or if the peer is a trusted proxy, the right-most hop of X-Forwarded-For that is not
 * trusted. Everything left of an untrusted or unreadable hop can be forged, so the walk ends there.
 */
export function clientAddress(
  forwardedFor: string | string[] | undefined,
  peerAddress: string,
  trusted: BlockList | undefined,
): string {
  let address = canonicalAddress(peerAddress) ?? peerAddress
  if (forwardedFor === undefined || trusted === undefined || isIP(address) === 0) return address
  const hops = (Array.isArray(forwardedFor) ? forwardedFor.join(',') : forwardedFor).split(',').slice(-hopsMax)
  for (const hop of hops.reverse()) {
    if (!isTrusted(address, trusted)) return address
    const next = hopAddress(hop)
    if (next === undefined) return address
    address = next
  }
  return address
}

export { type Role, roles } from 'spillway/workload'
