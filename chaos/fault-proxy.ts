/**
 * A TCP proxy between one process and PostgreSQL that fails as networks do.
 *
 *   pass ──cut()──► every connection is reset, new ones pass
 *     │──delay(ms)──► what is sent arrives so much later, in order, both ways
 *     │──halfOpen()──► connections stay open and nothing arrives any more; new ones are accepted, and say nothing
 *     │      └──restore()──► pass; what was silent is reset, as by a peer that has forgotten it
 *     └──blackHole()──► those that are open are silent for ever, and neither side hears of the other's end; new ones pass
 */
import { once } from 'node:events'
import { type AddressInfo, connect, createServer, type Socket } from 'node:net'

export interface FaultProxy {
  readonly port: number
  readonly connections: number
  cut(): void
  delay(ms: number): void
  halfOpen(): void
  blackHole(): void
  restore(): void
  close(): Promise<void>
}

interface Link {
  near: Socket
  far: Socket | null
  silent: boolean
  /** Silent forever: neither side gets a signal, not even a reset. */
  forgotten: boolean
}

export async function startFaultProxy(target: { host: string; port: number }): Promise<FaultProxy> {
  const links = new Set<Link>()
  let delayMs = 0
  let newAreSilent = false

  const carry = (link: Link, from: Socket, to: Socket): void => {
    // Delayed chunks keep their order: each waits for the one before it.
    let last = Promise.resolve()
    let waiting = 0
    const write = (chunk: Buffer): void => {
      if (link.silent || to.destroyed) return
      if (!to.write(chunk)) {
        from.pause()
        to.once('drain', () => from.resume())
      }
    }
    from.on('data', (chunk: Buffer) => {
      if (link.silent) return
      if (delayMs === 0 && waiting === 0) return write(chunk)
      waiting++
      const ready = new Promise<void>((resolve) => setTimeout(resolve, delayMs))
      last = last
        .then(() => ready)
        .then(() => {
          waiting--
          write(chunk)
        })
    })
    from.on('end', () => {
      if (!link.silent) to.end()
    })
    from.on('close', () => {
      if (!link.silent) to.destroy()
    })
    // Resets are what is played here: the other side hears of it by the close that follows.
    from.on('error', () => from.destroy())
  }

  const server = createServer({ allowHalfOpen: true, noDelay: true }, (near) => {
    const link: Link = { near, far: null, silent: newAreSilent, forgotten: false }
    links.add(link)
    near.on('close', () => {
      // A silent far side stays open: PostgreSQL does not hear that its client is gone, either.
      if (!link.silent) links.delete(link)
    })
    if (link.silent) {
      near.on('error', () => near.destroy())
      near.resume()
      return
    }
    const far = connect({ ...target, noDelay: true, allowHalfOpen: true })
    link.far = far
    carry(link, near, far)
    carry(link, far, near)
  })
  server.listen(0, '127.0.0.1')
  await once(server, 'listening')
  const { port } = server.address() as AddressInfo

  const reset = (which: (link: Link) => boolean): void => {
    for (const link of links) {
      if (!which(link)) continue
      links.delete(link)
      link.silent = true
      link.near.resetAndDestroy()
      link.far?.resetAndDestroy()
    }
  }
  const silence = (): void => {
    for (const link of links) link.silent = true
  }
  return {
    port,
    get connections() {
      return links.size
    },
    cut: () => reset((link) => !link.forgotten),
    delay: (ms) => {
      delayMs = ms
    },
    halfOpen: () => {
      newAreSilent = true
      silence()
    },
    blackHole: () => {
      silence()
      for (const link of links) link.forgotten = true
    },
    restore: () => {
      delayMs = 0
      newAreSilent = false
      reset((link) => link.silent && !link.forgotten)
    },
    close: async () => {
      const closed = once(server, 'close')
      server.close()
      reset(() => true)
      await closed
    },
  }
}
