import { describe, expect, it } from 'vitest'
import { ownAddress, targetsOf } from './targets.js'

const allows = (listenHost: string, origins: string[], url: string) =>
  targetsOf({ origins, own: ownAddress(listenHost, 7745) }).allows(new URL(url))

describe('targets', () => {
  it.each([
    ['127.0.0.1', 'http://127.0.0.1:7745'],
    ['127.0.0.1', 'http://localhost:7745'],
    ['127.0.0.1', 'http://localhost.:7745'],
    ['127.0.0.1', 'http://x.localhost:7745'],
    ['127.0.0.1', 'http://[::ffff:127.0.0.1]:7745'],
    ['127.0.0.1', 'http://0.0.0.0:7745'],
    ['::1', 'http://127.0.0.1:7745'],
    ['localhost', 'http://[::1]:7745'],
    ['0.0.0.0', 'http://127.0.0.1:7745'],
    ['::', 'http://localhost:7745'],
    ['192.168.7.1', 'http://192.168.7.1:7745'],
    ['192.168.7.1', 'http://[::ffff:192.168.7.1]:7745'],
    ['own.example.com', 'http://own.example.com.:7745'],
    ['127.0.0.1', 'https://127.0.0.1:7745'],
  ])('listening on %s, %s is the own origin', (host, origin) => {
    expect(allows(host, [origin], `${origin}/demo/echo?x=1`)).toBe(true)
    for (const path of ['/', '/api/v1/admin/halt', '/demo/echo/', '//demo/echo', '/demo/echo%2f..', '/demo/%65cho']) {
      expect(allows(host, [origin], `${origin}${path}`), path).toBe(false)
    }
  })

  it.each([
    ['127.0.0.1', 'http://127.0.0.1:7746'],
    ['127.0.0.1', 'http://localhost.example.com:7745'],
    ['192.168.7.1', 'http://127.0.0.1:7745'],
    ['192.168.7.1', 'http://192.168.7.2:7745'],
    ['own.example.com', 'https://other.example.com:7745'],
  ])('listening on %s, %s is another', (host, origin) => {
    expect(allows(host, [origin], `${origin}/api`)).toBe(true)
  })

  it('unlisted origins are not allowed, the own one included', () => {
    expect(allows('127.0.0.1', [], 'http://127.0.0.1:7745/demo/echo')).toBe(false)
    expect(targetsOf({ origins: ['http://a.example'], own: null }).allows(new URL('http://a.example/x'))).toBe(true)
  })

  it('knows the default port', () => {
    const own = ownAddress('127.0.0.1', 80)
    expect(targetsOf({ origins: ['http://127.0.0.1'], own }).allows(new URL('http://127.0.0.1/api'))).toBe(false)
  })
})
