import { lookup as dnsLookup, type LookupAddress } from 'node:dns'
import { isIP, type LookupFunction } from 'node:net'
import { networksOf } from '../../auth/identity.js'

/**
 * Which addresses a forwarded call may reach. IPv4: all except the special-purpose blocks (IANA registry), multicast and
 * the reserved rest. IPv6: only global unicast, 2000::/3, except the blocks carved out of it. That excludes loopback,
 * link-local, unique-local, and every form with an IPv4 address inside (mapped, translated, 6to4, Teredo), which could
 * name a private one.
 */
const refused = networksOf([
  '0.0.0.0/8',
  '10.0.0.0/8',
  '100.64.0.0/10',
  '127.0.0.0/8',
  // The host agent of one large cloud answers on this otherwise public address.
  '168.63.129.16',
  '169.254.0.0/16',
  '172.16.0.0/12',
  '192.0.0.0/24',
  '192.0.2.0/24',
  '192.88.99.0/24',
  '192.168.0.0/16',
  '198.18.0.0/15',
  '198.51.100.0/24',
  '203.0.113.0/24',
  '224.0.0.0/4',
  '240.0.0.0/4',
  ...['2001::/23', '2001:db8::/32', '2002::/16', '3fff::/20'],
])
const globalV6 = networksOf(['2000::/3'])
const loopback = networksOf(['127.0.0.0/8', '::1'])

export function isPublicAddress(address: string): boolean {
  switch (isIP(address)) {
    case 4:
      return !refused.check(address, 'ipv4')
    case 6: {
      const bare = address.split('%', 1)[0] ?? address
      return globalV6.check(bare, 'ipv6') && !refused.check(bare, 'ipv6')
    }
    default:
      return false
  }
}

function isLoopback(address: string): boolean {
  return isIP(address) !== 0 && loopback.check(address, isIP(address) === 6 ? 'ipv6' : 'ipv4')
}

/** A name resolved to a refused address. */
export class AddressRefused extends Error {
  readonly code = 'target_not_allowed'

  constructor(hostname: string) {
    super(`${hostname} resolves to an address that is not public`)
  }
}

export type Resolve = (hostname: string, callback: (fault: Error | null, addresses: LookupAddress[]) => void) => void

const resolveAll: Resolve = (hostname, callback) => dnsLookup(hostname, { all: true }, callback)

/**
 * The lookup of a connection. It connects to the address that it checked, so an answer that changes in between (rebinding)
 * has no effect. One refused address among several refuses the name. Literal addresses never come here: they are allowed
 * by being listed.
 */
export function checkedLookup(resolve: Resolve = resolveAll): LookupFunction {
  return (hostname, options, callback) => {
    resolve(hostname, (fault, addresses) => {
      if (fault !== null) return callback(fault, [])
      const mayReach = hostname === 'localhost' ? isLoopback : isPublicAddress
      const [first] = addresses
      if (first === undefined || !addresses.every(({ address }) => mayReach(address))) {
        return callback(new AddressRefused(hostname), [])
      }
      if (options.all === true) callback(null, addresses)
      else callback(null, first.address, first.family)
    })
  }
}
