import { createHash } from 'node:crypto'
import { SignJWT } from 'jose'
import { describe, expect, it } from 'vitest'
import { parseApiKeys } from './api-keys.js'
import { createAuthenticator } from './auth.js'

const unexpected = (fault: unknown) => {
  throw fault
}
const secret = 'a secret of more than thirty-two bytes'

function token(claims: Record<string, unknown>, key = secret) {
  return new SignJWT(claims).setProtectedHeader({ alg: 'HS256' }).sign(new TextEncoder().encode(key))
}

describe('with authentication off', () => {
  const auth = createAuthenticator({ onFault: unexpected })

  it('takes the client address with all roles', () => {
    expect(auth.enabled).toBe(false)
    expect(auth.authenticate({}, '::ffff:127.0.0.1')).toEqual({
      identity: '127.0.0.1',
      roles: new Set(['submit', 'consume', 'operate', 'metrics']),
    })
  })

  it('takes X-User-ID with the roles submit and consume', () => {
    expect(auth.authenticate({ 'x-user-id': 'ann' }, '127.0.0.1')).toEqual({
      identity: 'ann',
      roles: new Set(['submit', 'consume']),
    })
  })

  it.each(['', 'x'.repeat(256)])('refuses an X-User-ID of wrong length', (name) => {
    expect(auth.authenticate({ 'x-user-id': name }, '127.0.0.1')).toMatchObject({ refused: 'malformed' })
  })
})

describe('tokens', () => {
  const auth = createAuthenticator({ jwtSecret: secret, onFault: unexpected })
  const authenticate = async (value: string) => auth.authenticate({ authorization: `Bearer ${value}` }, '127.0.0.1')

  it('takes sub and roles; a role of another service does not count', async () => {
    expect(await authenticate(await token({ sub: 'ann', roles: ['submit', 'baker'] }))).toEqual({
      identity: 'ann',
      roles: new Set(['submit']),
    })
    expect(await authenticate(await token({ sub: 'ann', roles: 'consume operate', queues: ['q*'] }))).toEqual({
      identity: 'ann',
      roles: new Set(['consume', 'operate']),
      queues: ['q*'],
    })
  })

  it('does not let X-User-ID name another', async () => {
    const headers = { authorization: `bearer ${await token({ sub: 'ann' })}`, 'x-user-id': 'bob' }
    expect(await auth.authenticate(headers, '127.0.0.1')).toMatchObject({ identity: 'ann' })
  })

  it.each([
    ['expired', { sub: 'ann', exp: 1 }],
    ['without a subject', { roles: ['submit'] }],
    ['with unreadable queues', { sub: 'ann', queues: 'all' }],
  ])('refuses one %s', async (_, claims) => {
    expect(await authenticate(await token(claims))).toMatchObject({ refused: 'invalid' })
  })

  it('refuses another secret, the algorithm none, and texts that are no tokens', async () => {
    expect(await authenticate(await token({ sub: 'ann' }, 'another secret of thirty-two bytes'))).toMatchObject({
      refused: 'invalid',
    })
    const part = (value: object) => Buffer.from(JSON.stringify(value)).toString('base64url')
    expect(await authenticate(`${part({ alg: 'none' })}.${part({ sub: 'ann' })}.`)).toMatchObject({
      refused: 'invalid',
    })
    expect(await authenticate(`${part({ alg: 5 })}.${part({ sub: 'ann' })}.x`)).toMatchObject({ refused: 'invalid' })
    for (const text of ['a.b.c', 'x', '', 'x'.repeat(10_000)]) {
      expect(await authenticate(text)).toMatchObject({ refused: 'invalid' })
    }
  })

  it('says missing only when nothing was sent', () => {
    expect(auth.authenticate({}, '127.0.0.1')).toMatchObject({ refused: 'missing' })
    expect(auth.authenticate({ authorization: 'Basic x' }, '127.0.0.1')).toMatchObject({ refused: 'invalid' })
  })
})

describe('key table', () => {
  const name = `sha256:${createHash('sha256').update('k').digest('hex')}`

  it('reads entries', () => {
    const table = parseApiKeys(JSON.stringify({ [name]: { identity: 'ann', roles: ['submit'], queues: ['a*'] } }))
    expect([...table.values()][0]?.principal).toEqual({
      identity: 'ann',
      roles: new Set(['submit']),
      queues: ['a*'],
    })
  })

  it.each([
    ['not JSON', '{'],
    ['an array', '[]'],
    ['a key in clear', '{"secret-key":{"identity":"a","roles":[]}}'],
    ['no identity', JSON.stringify({ [name]: { roles: [] } })],
    ['an unknown role', JSON.stringify({ [name]: { identity: 'a', roles: ['root'] } })],
    ['no roles', JSON.stringify({ [name]: { identity: 'a' } })],
    ['queues that are no list', JSON.stringify({ [name]: { identity: 'a', roles: [], queues: 'x' } })],
    ['an unknown member', JSON.stringify({ [name]: { identity: 'a', roles: [], queue: ['x'] } })],
  ])('refuses %s', (_, text) => {
    expect(() => parseApiKeys(text)).toThrow(expect.objectContaining({ code: 'invalid_api_keys' }))
  })

  it('does not repeat a key that stands there in clear', () => {
    expect(() => parseApiKeys('{"secret-key":{}}')).not.toThrow(/secret-key/)
  })
})
