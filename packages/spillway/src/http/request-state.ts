import type { Principal, Role } from './identity.js'
import type { TellsError } from './problem.js'
import type { Trace } from './trace.js'

declare module 'fastify' {
  interface FastifyRequest {
    /** Who asks. Set on every route that is not public. */
    principal: Principal
    /** The trace of this request; made on first use, without an AsyncLocalStorage. */
    readonly trace: Trace
    /** The peer, or the client behind trusted proxies. */
    readonly clientAddress: string
    /** Behind `trace`. */
    traceMemo: Trace | null
  }

  interface FastifyContextConfig {
    /** What the principal must be allowed to do; `operate` may do all. */
    role?: Role
    /** Answers without authentication. */
    public?: true
    /** Never refused for lack of connections or while draining (health, metrics). */
    neverShed?: true
    /** Answered whatever the Host header says (health): probes may come by any name. */
    anyHost?: true
    /** Takes something although its method is GET: not for pages of other sites. */
    consumes?: true
    /** How the clients of this route read problems, where that is not as a problem document alone. */
    tellsError?: TellsError
  }
}
