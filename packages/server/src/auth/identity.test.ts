import { mayUseQueue } from 'spillway/workload'
import { describe, expect, it } from 'vitest'
import { clientAddress, hasRole, networksOf, type Principal } from './identity.js'

const principal = (queues?: string[], ...roles: Principal['roles'] extends ReadonlySet<infer R> ? R[] : never) => ({
  identity: 'a',
  roles: new Set(roles),
  ...(queues === undefined ? {} : { queues }),
})

describe('roles and queues', () => {
  it('operate has every role, others have their own', () => {
    expect(hasRole(principal(undefined, 'operate'), 'metrics')).toBe(true)
    expect(hasRole(principal(undefined, 'submit'), 'submit')).toBe(true)
    expect(hasRole(principal(undefined, 'submit'), 'consume')).toBe(false)
  })

  it('matches queues by name and by prefix', () => {
    expect(mayUseQueue(principal().queues, 'anything')).toBe(true)
    expect(mayUseQueue(principal(['orders*', 'mail']).queues, 'orders')).toBe(true)
    expect(mayUseQueue(principal(['orders*', 'mail']).queues, 'orders.eu')).toBe(true)
    expect(mayUseQueue(principal(['orders*', 'mail']).queues, 'mail')).toBe(true)
    expect(mayUseQueue(principal(['orders*', 'mail']).queues, 'mailbox')).toBe(false)
    expect(mayUseQueue(principal(['orders*']).queues, 'my-orders')).toBe(false)
    expect(mayUseQueue(principal([]).queues, 'orders')).toBe(false)
  })
})

describe('client address', () => {
  const trusted = networksOf(['10.0.0.0/8', '2001:db8::/32', '127.0.0.1'])

  it.each([
    // An untrusted peer's header does not count.
    ['203.0.113.9', '1.1.1.1', '203.0.113.9'],
    ['10.0.0.1', undefined, '10.0.0.1'],
    ['10.0.0.1', '1.1.1.1', '1.1.1.1'],
    // Hops written by the client are left of the hop that the proxy appended.
    ['10.0.0.1', '6.6.6.6, 1.1.1.1', '1.1.1.1'],
    ['10.0.0.1', '6.6.6.6, 1.1.1.1, 10.2.2.2', '1.1.1.1'],
    ['10.0.0.1', '10.3.3.3, 10.2.2.2', '10.3.3.3'],
    ['10.0.0.1', '1.1.1.1, nonsense', '10.0.0.1'],
    ['10.0.0.1', '1.1.1.1:5678', '1.1.1.1'],
    ['10.0.0.1', '[2001:DB9:0::1]:443', '2001:db9::1'],
    ['::ffff:10.0.0.1', '1.1.1.1', '1.1.1.1'],
    ['::ffff:127.0.0.1', undefined, '127.0.0.1'],
    ['2001:db8::5', '::ffff:9.9.9.9', '9.9.9.9'],
    ['fe80::1%eth0', undefined, 'fe80::1'],
  ])('peer %s, X-Forwarded-For %s → %s', (peer, header, expected) => {
    expect(clientAddress(header, peer, trusted)).toBe(expected)
  })

  it('trusts no proxy unless configured to', () => {
    expect(clientAddress('1.1.1.1', '127.0.0.1', undefined)).toBe('127.0.0.1')
  })
})
