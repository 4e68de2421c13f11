/** Little servers in the place of gateways: the test decides how and when each request is answered. */
import { once } from 'node:events'
import { createServer, type IncomingHttpHeaders, type IncomingMessage, request, type ServerResponse } from 'node:http'
import type { AddressInfo } from 'node:net'
import { onTestFinished } from 'vitest'
import { signal } from '../../spillway/test/pipeline-fixture.js'
import { freePort } from '../../spillway/test/setup/nats.js'
import { type Nginx, startNginx } from '../../spillway/test/setup/nginx.js'

export interface Arrival {
  /** Which of the gateways it reached. */
  gateway: number
  method: string
  /** As it was sent: with its query, nothing decoded. */
  target: string
  headers: IncomingHttpHeaders
  /** The port at the other end: the same one means the same connection. */
  peerPort: number
  request: IncomingMessage
  response: ServerResponse
  /** Resolves when the other end has closed before the answer was complete. */
  left: Promise<void>
}

export interface Gateways {
  /** Host and port of each. */
  servers: string[]
  arrivals: Arrival[]
  /** The next request that no one has been given yet, also one that came before. */
  next(): Promise<Arrival>
  close(): Promise<void>
}

/** Without `answer`, each request waits until the test takes it with `next`. */
export async function startGateways(count: number, answer?: (arrival: Arrival) => void): Promise<Gateways> {
  const arrivals: Arrival[] = []
  const waiting: ((arrival: Arrival) => void)[] = []
  let given = 0
  const take = (gateway: number) => (incoming: IncomingMessage, response: ServerResponse) => {
    const left = signal()
    response.once('close', () => {
      if (!response.writableFinished) left.fire()
    })
    const { method = '', url: target = '', headers, socket } = incoming
    const arrival = { gateway, method, target, headers, peerPort: socket.remotePort ?? 0, request: incoming, response }
    const whole: Arrival = { ...arrival, left: left.promise }
    arrivals.push(whole)
    answer?.(whole)
    if (waiting.length > 0) given++
    waiting.shift()?.(whole)
  }
  const servers = Array.from({ length: count }, (_, gateway) => createServer(take(gateway)).listen(0, '127.0.0.1'))
  await Promise.all(servers.map((server) => once(server, 'listening')))
  return {
    servers: servers.map((server) => `127.0.0.1:${(server.address() as AddressInfo).port}`),
    arrivals,
    next: async () => {
      const early = arrivals[given]
      if (early === undefined) return new Promise((resolve) => waiting.push(resolve))
      given++
      return early
    },
    close: async () => {
      for (const server of servers) {
        server.close()
        server.closeAllConnections()
      }
      await Promise.all(servers.map((server) => server.listening && once(server, 'close')))
    },
  }
}

export interface CallOptions {
  method?: string
  headers?: Readonly<Record<string, string>>
  body?: string | Buffer
  /** The address to call from. */
  localAddress?: string
  signal?: AbortSignal
}

export interface Called {
  status: number
  headers: IncomingHttpHeaders
  /** The next piece as it comes, undefined after the last; fails when the connection breaks. */
  piece(): Promise<string | undefined>
  text(): Promise<string>
  json(): Promise<Record<string, unknown>>
}

/** Over a connection of its own. Resolves when the headers are there. */
export async function call(origin: string, target: string, options: CallOptions = {}): Promise<Called> {
  const { body, ...rest } = options
  const { hostname, port } = new URL(origin)
  // `path` as it is given: a URL would tidy it.
  const outgoing = request({ hostname, port, path: target, agent: false, ...rest })
  outgoing.end(body)
  const [response] = (await once(outgoing, 'response')) as [IncomingMessage]
  const pieces = response.setEncoding('utf8')[Symbol.asyncIterator]() as AsyncIterator<string>
  const piece = async (): Promise<string | undefined> => {
    const { value, done } = await pieces.next()
    return done === true ? undefined : value
  }
  const text = async (): Promise<string> => {
    let whole = ''
    for (let next = await piece(); next !== undefined; next = await piece()) whole += next
    return whole
  }
  return {
    status: response.statusCode ?? 0,
    headers: response.headers,
    piece,
    text,
    json: async () => JSON.parse(await text()) as Record<string, unknown>,
  }
}

export interface BehindOptions {
  gateways?: number
  answer?: (arrival: Arrival) => void
  /** More servers for nginx to know, e.g. one where nobody listens. */
  others?: readonly string[]
  replace?: Readonly<Record<string, string>>
}

/** nginx and the gateways behind it, until the test ends. */
export async function behindNginx(options: BehindOptions = {}): Promise<{ nginx: Nginx; gateways: Gateways }> {
  const gateways = await startGateways(options.gateways ?? 1, options.answer)
  onTestFinished(() => gateways.close())
  const servers = [...(options.others ?? []), ...gateways.servers]
  const nginx = await startNginx({ servers, ...(options.replace !== undefined && { replace: options.replace }) })
  onTestFinished(() => nginx.stop())
  return { nginx, gateways }
}

/** A server of which nobody is at home. */
export async function deadServer(): Promise<string> {
  return `127.0.0.1:${await freePort()}`
}

export function answerJson({ gateway, response }: Arrival): void {
  response.setHeader('content-type', 'application/json').end(JSON.stringify({ gateway }))
}
