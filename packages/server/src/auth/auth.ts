import { limits } from '@spillway/protocol/wire'
import {
  createRemoteJWKSet,
  decodeProtectedHeader,
  errors,
  type JWTPayload,
  type JWTVerifyGetKey,
  jwtVerify,
} from 'jose'
import { isUnstorable } from 'spillway/workload'
import type { Config } from '../config/index.js'
import { openApiKeyFile } from './api-keys.js'
import { clientAddress, isRole, networksOf, type Principal, type Role, roles } from './identity.js'

/** With none of a key file, a key set and a secret, authentication is off. */
export interface AuthOptions extends Partial<Config['auth']> {
  trustedProxies?: readonly string[]
  /** Called when the key file becomes unreadable or the key server does not answer. */
  onFault: (fault: unknown) => void
  /** For the key file's reload; tokens are checked against the system clock. */
  now?: () => number
}

/** Why the caller was not authenticated. */
export interface NotAuthenticated {
  refused: 'missing' | 'invalid' | 'malformed' | 'unavailable'
  detail: string
}

export type AuthResult = Principal | NotAuthenticated

export interface RequestHeaders {
  authorization?: string | undefined
  'x-user-id'?: string | string[] | undefined
  'x-forwarded-for'?: string | string[] | undefined
}

export interface Authenticator {
  readonly enabled: boolean
  /** Synchronous unless a JWT has to be verified. */
  authenticate(headers: RequestHeaders, peerAddress: string): AuthResult | Promise<AuthResult>
  clientAddress(headers: RequestHeaders, peerAddress: string): string
}

export function isRefused(result: AuthResult): result is NotAuthenticated {
  return 'refused' in result
}

const bearerForm = /^bearer +([^\s]+) *$/i
const tokenCharactersMax = 8_192
const jwtForm = /^[\w-]+\.[\w-]+\.[\w-]*$/
const clockToleranceSeconds = 5
const maxAgeSecondsDefault = 86_400
const keyServerTimeoutMs = 2_000
const symmetricAlgorithms = ['HS256', 'HS384', 'HS512']
const asymmetricAlgorithms = ['RS256', 'RS384', 'RS512', 'PS256', 'PS384', 'PS512', 'ES256', 'ES384', 'ES512', 'EdDSA']

const missing: NotAuthenticated = { refused: 'missing', detail: 'Send a key or a token as Authorization: Bearer.' }
const invalid: NotAuthenticated = { refused: 'invalid', detail: 'The key or token is not valid.' }
const unavailable: NotAuthenticated = { refused: 'unavailable', detail: 'Tokens cannot be verified at the moment.' }

const allRoles: ReadonlySet<Role> = new Set(roles)
const namedRoles: ReadonlySet<Role> = new Set<Role>(['submit', 'consume'])

/** `roles` as an array or as a text with spaces. Unknown names belong to other services and are ignored. */
function claimedRoles(claim: unknown): ReadonlySet<Role> {
  const names: unknown[] = typeof claim === 'string' ? claim.split(/\s+/) : Array.isArray(claim) ? claim : []
  return new Set(names.filter(isRole))
}

function principalOf(payload: JWTPayload): AuthResult {
  const { sub, roles: claim, queues } = payload
  if (typeof sub !== 'string' || sub === '' || sub.length > limits.identityCharacters || isUnstorable(sub))
    return invalid
  const principal: Principal = { identity: sub, roles: claimedRoles(claim) }
  if (queues === undefined) return principal
  // An unreadable restriction must not turn into no restriction.
  if (!Array.isArray(queues) || !queues.every((name) => typeof name === 'string')) return invalid
  return { ...principal, queues }
}

function isTokenFault(fault: unknown): boolean {
  if (fault instanceof errors.JWKSTimeout || fault instanceof errors.JWKSInvalid) return false
  // jose uses the generic code when the key server's answer is not a JWKS.
  return fault instanceof errors.JOSEError && fault.code !== errors.JOSEError.code
}

function algorithmOf(token: string): string | undefined {
  try {
    const { alg } = decodeProtectedHeader(token)
    return typeof alg === 'string' ? alg : undefined
  } catch {
    // A TypeError: the text has the dots of a token but is not one.
    return undefined
  }
}

/** A token with `iat` must not be from the future, nor last longer than allowed. */
function isTooLong({ iat, exp }: JWTPayload, maxAgeSeconds: number): boolean {
  if (iat === undefined) return false
  if (typeof iat !== 'number' || exp === undefined) return true
  return exp - iat > maxAgeSeconds || iat > Date.now() / 1_000 + clockToleranceSeconds
}

type TokenVerifier = (token: string) => Promise<AuthResult>

function tokenVerifier(options: AuthOptions): TokenVerifier | undefined {
  const { jwtSecret = null, jwksUrl = null, jwtIssuer = null, jwtAudience = null } = options
  if (jwtSecret === null && jwksUrl === null) return undefined
  const secret = jwtSecret === null ? undefined : new TextEncoder().encode(jwtSecret)
  const keySet =
    jwksUrl === null ? undefined : createRemoteJWKSet(new URL(jwksUrl), { timeoutDuration: keyServerTimeoutMs })
  const checks = {
    clockTolerance: clockToleranceSeconds,
    requiredClaims: ['exp'],
    ...(jwtIssuer !== null && { issuer: jwtIssuer }),
    ...(jwtAudience !== null && { audience: jwtAudience }),
  }
  return async (token) => {
    const algorithm = algorithmOf(token)
    if (algorithm === undefined) return invalid
    // The header selects the family, and the family selects the key: a public key is never used as an HMAC secret.
    const symmetric = algorithm.startsWith('HS')
    const key = symmetric ? secret : keySet
    if (key === undefined) return invalid
    const verifying = { ...checks, algorithms: symmetric ? symmetricAlgorithms : asymmetricAlgorithms }
    try {
      // A secret or a key set: each overload takes one of them.
      const { payload } = await jwtVerify(token, key as JWTVerifyGetKey, verifying)
      return isTooLong(payload, options.jwtMaxAgeSeconds ?? maxAgeSecondsDefault) ? invalid : principalOf(payload)
    } catch (fault) {
      if (isTokenFault(fault)) return invalid
      options.onFault(fault)
      return unavailable
    }
  }
}

function withoutAuthentication(headers: RequestHeaders, address: () => string): AuthResult {
  const named = headers['x-user-id']
  if (named === undefined) return { identity: address(), roles: allRoles }
  if (typeof named !== 'string' || named === '' || named.length > limits.identityCharacters) {
    return { refused: 'malformed', detail: `X-User-ID must have 1 to ${limits.identityCharacters} characters.` }
  }
  return { identity: named, roles: namedRoles }
}

export function createAuthenticator(options: AuthOptions): Authenticator {
  const { apiKeysFile = null, trustedProxies = [], onFault, now = Date.now } = options
  const keys = apiKeysFile === null ? undefined : openApiKeyFile(apiKeysFile, onFault, now)
  const verify = tokenVerifier(options)
  const trusted = trustedProxies.length === 0 ? undefined : networksOf(trustedProxies)
  const addressOf = (headers: RequestHeaders, peer: string) => clientAddress(headers['x-forwarded-for'], peer, trusted)
  const enabled = keys !== undefined || verify !== undefined

  return {
    enabled,
    clientAddress: addressOf,
    authenticate(headers, peerAddress) {
      if (!enabled) return withoutAuthentication(headers, () => addressOf(headers, peerAddress))
      const { authorization } = headers
      if (authorization === undefined) return missing
      if (authorization.length > tokenCharactersMax) return invalid
      const token = bearerForm.exec(authorization)?.[1]
      if (token === undefined) return invalid
      const principal = keys?.find(token)
      if (principal !== undefined) return principal
      return verify !== undefined && jwtForm.test(token) ? verify(token) : invalid
    },
  }
}
