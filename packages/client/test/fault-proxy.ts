/**
 * Stands between client and server and fails as networks, proxies and busy servers do. Each request meets the next fault
 * that is meant for it; without one it passes.
 */
import { once } from 'node:events'
import { request as ask, createServer, type IncomingMessage, type ServerResponse } from 'node:http'
import type { AddressInfo } from 'node:net'

export type Fault =
  /** The connection breaks: before the server has seen anything of it, or after it has done all of it. */
  | { kind: 'drop'; when: 'before' | 'after' }
  /** Accepted, and never heard of again. */
  | { kind: 'silence' }
  /** The server's answer, with half of its body. */
  | { kind: 'truncate' }
  /** Passed on at once, answered so late. */
  | { kind: 'slow'; ms: number }
  /** Answered here. */
  | { kind: 'answer'; status: number; headers?: Record<string, string>; body?: string }
  /** A streamed answer, broken off behind the first chunk that has this text. */
  | { kind: 'cut'; behind: string }
  /** A streamed answer that goes silent there, without an end. */
  | { kind: 'stall'; behind: string }

export interface Seen {
  method: string
  path: string
  headers: IncomingMessage['headers']
}

export interface FaultProxy {
  readonly origin: string
  readonly seen: Seen[]
  /** For the next requests whose path contains `path`, one after the other. */
  plan(path: string, ...faults: Fault[]): void
  /** Forgets what was planned and seen. */
  forget(): void
  /** Served here, for pages. */
  host(path: string, type: string, content: string): void
  close(): Promise<void>
}

/** A refusal as the server makes them. */
export function refusal(status: 429 | 503, retryAfter: string, code = 'overloaded'): Fault {
  const body = JSON.stringify({ code, title: code, detail: 'sent by the proxy', status })
  const headers = { 'content-type': 'application/problem+json', 'retry-after': retryAfter }
  return { kind: 'answer', status, headers, body }
}

export async function startFaultProxy(target: string): Promise<FaultProxy> {
  const seen: Seen[] = []
  const plans: { path: string; fault: Fault }[] = []
  const hosted = new Map<string, { type: string; content: string }>()
  const server = createServer((request, response) => {
    const { method = '', url: path = '' } = request
    const page = hosted.get(path)
    if (page !== undefined) {
      response.writeHead(200, { 'content-type': page.type }).end(page.content)
      return
    }
    seen.push({ method, path, headers: request.headers })
    const at = plans.findIndex((plan) => path.includes(plan.path))
    const fault = at === -1 ? null : (plans.splice(at, 1)[0]?.fault ?? null)
    meet(fault, request, response, target)
  })
  server.listen(0, '127.0.0.1')
  await once(server, 'listening')
  return {
    origin: `http://127.0.0.1:${(server.address() as AddressInfo).port}`,
    seen,
    plan: (path, ...faults) => plans.push(...faults.map((fault) => ({ path, fault }))),
    forget: () => {
      seen.length = 0
      plans.length = 0
    },
    host: (path, type, content) => hosted.set(path, { type, content }),
    close: async () => {
      server.closeAllConnections()
      server.close()
      await once(server, 'close')
    },
  }
}

function meet(fault: Fault | null, request: IncomingMessage, response: ServerResponse, target: string): void {
  // Its client left, which is what half of these faults make it do.
  response.on('error', () => response.destroy())
  switch (fault?.kind) {
    case 'drop':
      if (fault.when === 'after') break
      request.socket.destroy()
      return
    case 'silence':
      request.resume()
      return
    case 'answer':
      request.resume()
      response.writeHead(fault.status, fault.headers).end(fault.body)
      return
  }
  const far = ask(target + request.url, {
    method: request.method,
    headers: { ...request.headers, connection: 'close' },
  })
  far.on('error', () => response.destroy())
  response.on('close', () => far.destroy())
  far.on('response', (answer) => void pass(fault, answer, response))
  request.pipe(far)
}

async function pass(fault: Fault | null, answer: IncomingMessage, response: ServerResponse): Promise<void> {
  const { statusCode = 502, headers } = answer
  if (fault?.kind === 'cut' || fault?.kind === 'stall') {
    response.writeHead(statusCode, headers)
    return cutShort(fault, answer, response)
  }
  if (fault === null) {
    response.writeHead(statusCode, headers)
    answer.pipe(response)
    return
  }
  const pieces: Buffer[] = []
  for await (const piece of answer) pieces.push(piece as Buffer)
  const body = Buffer.concat(pieces)
  if (fault.kind === 'drop') response.destroy()
  if (fault.kind === 'truncate') {
    response.writeHead(statusCode, { ...headers, 'content-length': body.length })
    response.write(body.subarray(0, body.length / 2), () => response.destroy())
  }
  if (fault.kind === 'slow') {
    setTimeout(() => response.destroyed || response.writeHead(statusCode, headers).end(body), fault.ms)
  }
}

async function cutShort(
  { kind, behind }: { kind: 'cut' | 'stall'; behind: string },
  answer: IncomingMessage,
  response: ServerResponse,
): Promise<void> {
  let text = ''
  let isSilent = false
  answer.on('error', () => response.destroy())
  answer.setEncoding('utf8').on('data', (piece: string) => {
    if (isSilent) return
    const before = text.length
    text += piece
    const at = text.indexOf(behind)
    if (at === -1) {
      response.write(piece)
      return
    }
    isSilent = true
    // Up to the middle of a block: what is not whole must not count.
    response.write(text.slice(before, at + behind.length), () => {
      if (kind === 'cut') response.destroy()
    })
  })
}
