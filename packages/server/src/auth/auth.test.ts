import { createHash } from 'node:crypto'
import { SignJWT } from 'jose'
import { describe, expect, it } from 'vitest'
import { parseApiKeys } from './api-keys.js'
import { createAuthenticator } from './auth.js'

const unexpected = (fault: unknown) => {
  throw fault
}
const secret = 'a secret of more than thirty-two bytes'

const nowSeconds = () => Math.floor(Date.now() / 1_000)

/** Expires in five minutes unless the claims say otherwise; `exp: undefined` leaves it out. */
function token(claims: Record<string, unknown>, key = secret) {
  return new SignJWT({ exp: nowSeconds() + 300, ...claims })
    .setProtectedHeader({ alg: 'HS256' })
    .sign(new TextEncoder().encode(key))
}

describe('with authentication off', () => {
  const auth = createAuthenticator({ onFault: unexpected })

  it('takes the client address with all roles', () => {
    expect(auth.enabled).toBe(false)
    expect(auth.authenticate({}, '::ffff:127.0.0.1')).toEqual({
      identity: '127.0.0.1',
      roles: new Set(['submit', 'consume', 'operate', 'view', 'metrics']),
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

  it.each([
    ['without an expiry', () => ({ exp: undefined })],
    ['that lasts longer than a day', () => ({ iat: nowSeconds(), exp: nowSeconds() + 86_401 })],
    ['issued more than a day ago', () => ({ iat: nowSeconds() - 86_500, exp: nowSeconds() + 60 })],
    ['issued in the future', () => ({ iat: nowSeconds() + 3_600, exp: nowSeconds() + 3_660 })],
    ['with an issue date that is no number', () => ({ iat: 'today' })],
  ])('refuses one %s', async (_, claims) => {
    expect(await authenticate(await token({ sub: 'ann', ...claims() }))).toMatchObject({ refused: 'invalid' })
  })

  it('takes one that lasts a day, and the longest time that is set', async () => {
    const day = { sub: 'ann', iat: nowSeconds(), exp: nowSeconds() + 86_400 }
    expect(await authenticate(await token(day))).toMatchObject({ identity: 'ann' })
    const short = createAuthenticator({ jwtSecret: secret, jwtMaxAgeSeconds: 60, onFault: unexpected })
    const asked = async (claims: object) =>
      short.authenticate({ authorization: `Bearer ${await token({ sub: 'ann', ...claims })}` }, '127.0.0.1')
    expect(await asked(day)).toMatchObject({ refused: 'invalid' })
    expect(await asked({ iat: nowSeconds(), exp: nowSeconds() + 60 })).toMatchObject({ identity: 'ann' })
  })

  it('checks the issuer and the audience where they are set', async () => {
    const strict = createAuthenticator({
      jwtSecret: secret,
      jwtIssuer: 'https://id.example',
      jwtAudience: 'spillway',
      onFault: unexpected,
    })
    const asked = async (claims: object) =>
      strict.authenticate({ authorization: `Bearer ${await token({ sub: 'ann', ...claims })}` }, '127.0.0.1')
    const right = { iss: 'https://id.example', aud: ['other', 'spillway'] }
    expect(await asked(right)).toMatchObject({ identity: 'ann' })
    for (const wrong of [
      {},
      { ...right, iss: 'https://evil.example' },
      { ...right, aud: 'other' },
      { aud: 'spillway' },
    ]) {
      expect(await asked(wrong)).toMatchObject({ refused: 'invalid' })
    }
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

  it('does not repeat a key that is written in clear', () => {
    expect(() => parseApiKeys('{"secret-key":{}}')).not.toThrow(/secret-key/)
  })
})
