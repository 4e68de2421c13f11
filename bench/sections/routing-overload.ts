/** How soon a router says that it is overloaded, and a router that does not say anything. */
import { once } from 'node:events'
import { createServer, type Socket } from 'node:net'
import { setTimeout as delay } from 'node:timers/promises'
import { jetstream } from '@nats-io/jetstream'
import type { BenchNats } from '../nats.js'
import { requestPrefix, routerStream, routerSubject, taskBody } from '../programs/routing-body.js'
import type { BenchContext } from '../section.js'
import { gauge, until, withBroker } from './routing-sites.js'

export const flood = { messages: 2_000, simulateDelayMs: 100, concurrency: 20, threshold: 1_000, scrapeMs: 50 } as const
const detectTimeoutMs = 10_000
const active = 'router_intake_backpressure_active'

/** Milliseconds from the broker having as many as the threshold to the metrics saying so, round by round. */
export async function measureDetection(context: BenchContext, nats: BenchNats, rounds: number): Promise<number[]> {
  const databaseUrl = await context.postgres.createDatabase('routing_flooded')
  const router = await context.serve({
    ...{ DATABASE_URL: databaseUrl, NATS_URL: nats.url, SPILLWAY_ROLES: 'router' },
    ROUTER_SIMULATE_DELAY_MS: String(flood.simulateDelayMs),
    ROUTER_CONCURRENCY: String(flood.concurrency),
    ROUTER_QUEUE_OVERLOAD: String(flood.threshold),
  })
  const tookMs: number[] = []
  for (let round = 0; round < rounds; round++) {
    context.say(`flooding the router: round ${round + 1} of ${rounds}`)
    // It samples once a second, and was just seen to do so: the rounds begin at different places of that second.
    await delay((round / rounds) * 1_000)
    tookMs.push(await floodOnce(nats, router))
    await until('the router recovers', async () => (await gauge(router, active)) === 0)
  }
  await router.stop()
  return tookMs
}

function floodOnce(nats: BenchNats, router: { readonly origin: string }): Promise<number> {
  return withBroker(nats, async (nc, jsm) => {
    const js = jetstream(nc)
    const prefix = requestPrefix()
    let stored = 0
    let crossedAt = Number.POSITIVE_INFINITY
    const published = Array.from({ length: flood.messages }, async (_, n) => {
      await js.publish(routerSubject, taskBody(prefix, n))
      stored += 1
      if (stored === flood.threshold) crossedAt = performance.now()
    })
    const [seenAt] = await Promise.all([seenActive(router), ...published])
    // What is left would only be waited for.
    await jsm.streams.purge(routerStream)
    return Math.max(0, seenAt - crossedAt)
  })
}

async function seenActive(router: { readonly origin: string }): Promise<number> {
  for (const end = performance.now() + detectTimeoutMs; performance.now() < end; await delay(flood.scrapeMs)) {
    if ((await gauge(router, active)) === 1) return performance.now()
  }
  throw new Error(`the overload was not noticed within ${detectTimeoutMs} ms`)
}

export interface Hung {
  /** Where a gateway is to ask. */
  readonly url: string
  /** How often it was asked. */
  asked(): number
  close(): Promise<void>
}

/** Takes every connection and whatever is sent, and never says a word. */
export async function startHung(): Promise<Hung> {
  const sockets = new Set<Socket>()
  let asked = 0
  const server = createServer((socket) => {
    sockets.add(socket)
    socket.on('data', () => {
      asked += 1
    })
    // A caller that times out resets the connection. That is expected here.
    socket.on('error', () => socket.destroy())
    socket.once('close', () => sockets.delete(socket))
  })
  server.listen(0, '127.0.0.1')
  await once(server, 'listening')
  const address = server.address()
  if (address === null || typeof address === 'string') throw new Error('no port')
  return {
    url: `http://127.0.0.1:${address.port}/metrics`,
    asked: () => asked,
    close: async () => {
      for (const socket of sockets) socket.destroy()
      server.close()
      await once(server, 'close')
    },
  }
}
