import type { LookupAddress } from 'node:dns'
import { describe, expect, it } from 'vitest'
import { checkedLookup, isPublicAddress } from './addresses.js'

describe('public addresses', () => {
  it.each([
    '0.0.0.0',
    '10.1.2.3',
    '100.100.100.200',
    '127.0.0.1',
    '127.8.8.8',
    '168.63.129.16',
    '169.254.169.254',
    '172.31.255.255',
    '192.168.0.1',
    '198.19.0.1',
    '224.0.0.1',
    '255.255.255.255',
    '::',
    '::1',
    '::ffff:127.0.0.1',
    '::ffff:8.8.8.8',
    '::7f00:1',
    '64:ff9b::7f00:1',
    'fe80::1',
    'fe80::1%eth0',
    'fc00::1',
    'fd00:ec2::254',
    'ff02::1',
    '2001::1',
    '2001:db8::1',
    '2002:7f00:1::',
    'localhost',
    '',
  ])('refuses %s', (address) => {
    expect(isPublicAddress(address)).toBe(false)
  })

  it.each(['8.8.8.8', '1.1.1.1', '172.32.0.1', '100.128.0.1', '2606:4700::1111', '2001:4860:4860::8888'])(
    'takes %s',
    (address) => {
      expect(isPublicAddress(address)).toBe(true)
    },
  )
})

describe('checked lookup', () => {
  const answer = (hostname: string, addresses: string[], all = true) =>
    new Promise<unknown>((resolve) => {
      const found: LookupAddress[] = addresses.map((address) => ({ address, family: address.includes(':') ? 6 : 4 }))
      checkedLookup((_, callback) => callback(null, found))(hostname, { all }, (fault, result) => {
        resolve(fault === null ? result : fault)
      })
    })

  it('passes public addresses on, all or the first', async () => {
    expect(await answer('example.com', ['8.8.8.8', '2606:4700::1111'])).toHaveLength(2)
    expect(await answer('example.com', ['8.8.8.8', '2606:4700::1111'], false)).toBe('8.8.8.8')
  })

  it('refuses a name with one private address, or without an address', async () => {
    expect(await answer('example.com', ['8.8.8.8', '10.0.0.1'])).toMatchObject({ code: 'target_not_allowed' })
    expect(await answer('example.com', [])).toMatchObject({ code: 'target_not_allowed' })
  })

  it('lets localhost be loopback and nothing else', async () => {
    expect(await answer('localhost', ['127.0.0.1', '::1'])).toHaveLength(2)
    expect(await answer('localhost', ['10.0.0.1'])).toMatchObject({ code: 'target_not_allowed' })
    expect(await answer('localhost.example.com', ['127.0.0.1'])).toMatchObject({ code: 'target_not_allowed' })
  })
})
