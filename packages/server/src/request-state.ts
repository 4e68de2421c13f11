import type { ServerResponse } from 'node:http'
import type { Trace } from 'spillway/workload'
import type { Principal } from './auth/identity.js'

declare module 'fastify' {
  interface FastifyRequest {
    /** The caller. Set on every route that is not public. */
    principal: Principal
    /** The trace of this request; created on first use, without an AsyncLocalStorage. */
    readonly trace: Trace
    /** The peer, or the client behind trusted proxies. */
    readonly clientAddress: string
    /** For body parsers, which do not get the reply. */
    response: ServerResponse
    /** Caches `trace`. */
    traceMemo: Trace | null
    /** The JSON body as received. */
    bodyText?: string | undefined
  }

  interface FastifyContextConfig {
    /** Belongs to no queue: refused for a key that is bound to queues. */
    wholeServer?: true
    /** Answers without authentication. */
    public?: true
    /** Never refused for lack of connections or while draining (health, metrics). */
    neverShed?: true
    /** Its body may use the space that is kept for acks, whatever its size. */
    isAck?: true
    /** Answered whatever the Host header says (health): probes may use any name. */
    anyHost?: true
    /** Consumes something although its method is GET: refused for pages of other sites. */
    consumes?: true
  }
}
