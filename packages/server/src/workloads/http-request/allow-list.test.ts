import { describe, expect, it } from 'vitest'
import { parseAllowList } from './allow-list.js'

const list = parseAllowList([
  'http://127.0.0.1:9000',
  'https://API.example.com/',
  'https://*.hooks.example.org',
  'http://[::1]:8080',
])

describe('allow-list', () => {
  it.each([
    'http://127.0.0.1:9000/a?b',
    'http://2130706433:9000/',
    'https://api.example.com/x',
    'https://api.example.com:443/x',
    'https://a.hooks.example.org/',
    'https://a.b.hooks.example.org/',
    'http://[::1]:8080/',
    'http://[0:0::1]:8080/',
  ])('allows %s', (url) => {
    expect(list.allows(new URL(url))).toBe(true)
  })

  it.each([
    'http://127.0.0.1:9001/',
    'https://127.0.0.1:9000/',
    'http://api.example.com/',
    'https://api.example.com:8443/',
    'https://api.example.com.evil.org/',
    'https://api.example.com@evil.org/',
    'https://user:pw@api.example.com/',
    'https://hooks.example.org/',
    'https://badhooks.example.org/',
    'https://a.hooks.example.org:444/',
    'http://a.hooks.example.org/',
    'file:///etc/passwd',
  ])('refuses %s', (url) => {
    expect(list.allows(new URL(url))).toBe(false)
  })

  it('allows nothing when empty', () => {
    expect(parseAllowList([]).allows(new URL('http://127.0.0.1/'))).toBe(false)
  })

  it.each([
    'example.com',
    'ftp://example.com',
    'https://example.com/path',
    'https://u:p@example.com',
    'https://*',
    'https://*.com',
    'https://a.*.example.com',
    'https://*example.com',
    '',
  ])('does not take %j as an origin', (text) => {
    expect(() => parseAllowList([text])).toThrow(expect.objectContaining({ code: 'invalid_forward_origin' }))
  })
})
