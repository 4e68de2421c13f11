/** What all front doors have in common: the order, the call to the downstream, the health route, the start. */
import Fastify, { type FastifyInstance } from 'fastify'
import Type, { type Static } from 'typebox'
import { Pool } from 'undici'
import { deadlineMs } from './overload-wire.js'

export const Order = Type.Object({ n: Type.Integer(), customer: Type.String(), item: Type.String() })
export type Order = Static<typeof Order>

export interface Fulfilled {
  readonly n: number
  readonly fulfilled: boolean
}

/**
 * Calls that may be under way to the downstream at once. Five times what it works on: the pool is not meant to be the
 * brake, but without any bound a door would be out of files before it is out of anything else.
 */
const poolConnections = 100

export class DownstreamLate extends Error {
  override readonly name = 'DownstreamLate'

  constructor() {
    super(`the downstream did not answer within ${deadlineMs} ms`)
  }
}

export class Downstream {
  readonly #pool: Pool

  constructor(origin: string) {
    this.#pool = new Pool(origin, { connections: poolConnections, pipelining: 1 })
  }

  /** Calls that wait for a connection. */
  get waiting(): number {
    return this.#pool.stats.pending
  }

  /**
   * With the deadline that clients have: a door that goes on for those who left would only look worse. A timer that is
   * cleared: `AbortSignal.timeout` would fire five seconds later for every call that has long been answered.
   */
  async fulfil(order: Order): Promise<Fulfilled> {
    const deadline = new AbortController()
    const timer = setTimeout(() => deadline.abort(new DownstreamLate()), deadlineMs)
    try {
      const { statusCode, body } = await this.#pool.request({
        method: 'POST',
        path: '/fulfil',
        headers: { 'content-type': 'application/json' },
        body: JSON.stringify(order),
        signal: deadline.signal,
      })
      if (statusCode !== 200) {
        await body.dump()
        throw new Error(`the downstream answered ${statusCode}`)
      }
      return (await body.json()) as Fulfilled
    } finally {
      clearTimeout(timer)
    }
  }

  close(): Promise<void> {
    return this.#pool.destroy()
  }
}

export interface Health {
  readonly status: 'ok'
  readonly rss: number
  /** CPU time of the process since its start. */
  readonly cpuMs: number
}

/** An app with its health route, which answers from memory. */
export function createDoor(): FastifyInstance {
  const app = Fastify()
  app.get('/health', (_request, reply) => {
    const { user, system } = process.cpuUsage()
    const health: Health = { status: 'ok', rss: process.memoryUsage.rss(), cpuMs: (user + system) / 1_000 }
    reply.send(health)
  })
  return app
}

export async function openDoor(app: FastifyInstance, close: () => Promise<void>): Promise<void> {
  // With the default of 511 it is the kernel that sheds bursts of new connections, by letting them wait for a second.
  const origin = await app.listen({ host: '127.0.0.1', port: 0, backlog: 4_096 })
  process.once('SIGTERM', () => {
    close().then(
      () => process.exit(0),
      (fault: unknown) => {
        console.error(fault)
        process.exit(1)
      },
    )
  })
  console.log(`listening on ${origin}`)
}
