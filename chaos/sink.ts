/**
 * The world outside the store: a service that the operations call. It writes down every call, and answers as the workload
 * says: slow ones late, flaky ones with 503 at first, poisoned ones with 400.
 */
import { once } from 'node:events'
import { createServer } from 'node:http'
import type { AddressInfo } from 'node:net'
import type { Delivery } from './records.js'
import { behaviourOf, type Lane, type Temper } from './workload.js'

export interface Sink {
  readonly origin: string
  /** In the order in which they came. */
  readonly deliveries: readonly Delivery[]
  close(): Promise<void>
}

export async function startSink(options: { seed: number; lanes: readonly Lane[]; temper: Temper }): Promise<Sink> {
  const deliveries: Delivery[] = []
  const lanes = new Map(options.lanes.map((lane) => [lane.name, lane]))
  const seen = new Map<string, number>()

  const judge = (lane: string, n: number): { status: number; runMs: number; token: string } => {
    const spec = lanes.get(lane)
    if (spec === undefined) return { status: 200, runMs: 0, token: '' }
    const { failures, poison, runMs, token } = behaviourOf(options.seed, spec, n, options.temper)
    const times = (seen.get(`${lane}#${n}`) ?? 0) + 1
    seen.set(`${lane}#${n}`, times)
    return { status: poison ? 400 : times <= failures ? 503 : 200, runMs, token }
  }

  const server = createServer((request, response) => {
    const at = Date.now()
    let text = ''
    request.setEncoding('utf8').on('data', (chunk: string) => {
      text += chunk
    })
    request.on('end', () => {
      const { lane, n } = JSON.parse(text) as { lane: string; n: number }
      const { status, runMs, token } = judge(lane, n)
      deliveries.push({ at, lane, n, key: request.headers['idempotency-key']?.toString() ?? null, status })
      setTimeout(() => {
        response.writeHead(status, { 'content-type': 'application/json' }).end(JSON.stringify({ lane, n, token }))
      }, runMs)
    })
    // A caller that dies half-way is part of the run.
    request.on('error', () => response.destroy())
  })
  server.keepAliveTimeout = 60_000
  server.listen(0, '127.0.0.1')
  await once(server, 'listening')
  const { port } = server.address() as AddressInfo
  return {
    origin: `http://127.0.0.1:${port}`,
    deliveries,
    close: async () => {
      const closed = once(server, 'close')
      server.close()
      server.closeAllConnections()
      await closed
    },
  }
}
