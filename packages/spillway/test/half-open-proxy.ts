/**
 * A TCP proxy that can fail as networks do.
 *
 *   passing ──stall()──► stalled: bytes vanish both ways, connections stay open, new ones are accepted and say nothing
 *      │ ▲                  │
 *      │ └────pass()────────┘   what stalled never comes back to life: it is closed, as a peer's reset would
 *      └──refuse()──► refusing: everything is closed, nobody listens
 *
 * resumeNew() leaves what stalled as it is and lets new connections pass.
 */
import { once } from 'node:events'
import { type AddressInfo, connect, createServer, type Socket } from 'node:net'

export interface HalfOpenProxy {
  readonly port: number
  /** The address behind it, changeable: a restarted server has another port. */
  target: { host: string; port: number }
  readonly connections: number
  pass(): Promise<void>
  /** New connections work; those that stalled go on saying nothing, for ever. */
  resumeNew(): void
  stall(): void
  refuse(): Promise<void>
  close(): Promise<void>
}

export async function startHalfOpenProxy(target: { host: string; port: number }): Promise<HalfOpenProxy> {
  const sockets = new Set<Socket>()
  let stalled = false
  /** Stalled for good; `stalled` is about what comes. */
  const dead = new WeakSet<Socket>()
  let current = target
  const keep = (socket: Socket): Socket => {
    sockets.add(socket)
    // A reset is one of the failures played here; the other side hears of it by its own close.
    socket.on('error', () => socket.destroy())
    return socket.on('close', () => sockets.delete(socket))
  }
  const server = createServer((near) => {
    keep(near)
    if (stalled) return void near.pause()
    const far = keep(connect(current))
    const silent = (): boolean => stalled || dead.has(near)
    near.on('data', (chunk) => silent() || far.write(chunk))
    far.on('data', (chunk) => silent() || near.write(chunk))
    near.on('close', () => silent() || far.destroy())
    far.on('close', () => silent() || near.destroy())
  })
  server.listen(0, '127.0.0.1')
  await once(server, 'listening')
  const { port } = server.address() as AddressInfo
  const drop = (): void => {
    for (const socket of sockets) socket.destroy()
  }
  const unlisten = async (): Promise<void> => {
    if (!server.listening) return
    const closed = once(server, 'close')
    server.close()
    drop()
    await closed
  }
  return {
    port,
    get target() {
      return current
    },
    set target(next) {
      current = next
    },
    get connections() {
      return sockets.size
    },
    async pass() {
      if (stalled) drop()
      stalled = false
      if (server.listening) return
      server.listen(port, '127.0.0.1')
      await once(server, 'listening')
    },
    stall() {
      stalled = true
    },
    resumeNew() {
      for (const socket of sockets) dead.add(socket)
      stalled = false
    },
    async refuse() {
      stalled = false
      await unlisten()
    },
    close: unlisten,
  }
}

/** The same database through the proxy. */
export function through(proxy: HalfOpenProxy, url: string): string {
  const proxied = new URL(url)
  proxied.hostname = '127.0.0.1'
  proxied.port = String(proxy.port)
  return proxied.href
}

export function addressOf(url: string): { host: string; port: number } {
  const { hostname, port } = new URL(url)
  return { host: hostname, port: Number(port || 5432) }
}
