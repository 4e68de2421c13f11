import type { FastifyInstance } from 'fastify'

const exposedHeaders = [
  'Location',
  'Retry-After',
  'X-Request-Id',
  'Preference-Applied',
  'Idempotent-Replayed',
  'RateLimit',
  'RateLimit-Policy',
  'X-RateLimit-Limit',
  'X-RateLimit-Remaining',
  'X-RateLimit-Reset',
  'X-Stream-Id',
  'X-Thread-ID',
  'X-Resilience-Layer',
].join(', ')

const allowedMethods = 'GET, HEAD, POST, PUT, PATCH, DELETE'

/** How long a browser may cache a preflight's answer, in seconds. */
const preflightMaxAge = '600'

/** Whether the answer depends on the origin. */
export function variesByOrigin(origins: readonly string[]): boolean {
  return origins.length > 0 && !origins.includes('*')
}

/**
 * Browsers of the given origins (`*`: all) may call. Credentials are never allowed: identity is a Bearer token, which the
 * page itself must hold, so a foreign page cannot act for a logged-in user.
 */
export function allowOrigins(app: FastifyInstance, origins: readonly string[]): void {
  if (origins.length === 0) return
  const all = origins.includes('*')
  const varies = variesByOrigin(origins)
  const known = new Set(origins)
  app.addHook('onRequest', (request, reply, done) => {
    const { origin } = request.headers
    if (varies) reply.header('vary', 'Origin')
    if (origin === undefined || !(all || known.has(origin))) return done()
    reply.header('access-control-allow-origin', all ? '*' : origin)
    reply.header('access-control-expose-headers', exposedHeaders)
    if (request.method !== 'OPTIONS' || request.headers['access-control-request-method'] === undefined) return done()
    reply.header('access-control-allow-methods', allowedMethods)
    reply.header('access-control-max-age', preflightMaxAge)
    const asked = request.headers['access-control-request-headers']
    if (asked !== undefined) reply.header('access-control-allow-headers', asked)
    reply.code(204).send()
  })
}
