/**
 * Counts what one process asks of PostgreSQL: a proxy that reads the frontend's half of the wire protocol as it passes.
 * Nothing else is counted, not autovacuum, not another client, and the server needs no extension. It counts statements
 * executed (Query and Execute messages; BEGIN and COMMIT are statements too) by their text.
 */
import { connect, createServer, type Server, type Socket } from 'node:net'

export interface QueryCounter {
  /** The same database, through the proxy. */
  readonly url: string
  /** Executions by statement, since the last reset. */
  counts(): ReadonlyMap<string, number>
  reset(): void
  close(): Promise<void>
}

export async function countQueries(databaseUrl: string): Promise<QueryCounter> {
  const target = new URL(databaseUrl)
  const port = target.port === '' ? 5_432 : Number(target.port)
  const counts = new Map<string, number>()
  const sockets = new Set<Socket>()
  const count = (statement: string): void => {
    counts.set(statement, (counts.get(statement) ?? 0) + 1)
  }
  const server = createServer((client) => {
    const upstream = connect({ host: target.hostname, port, noDelay: true })
    client.setNoDelay(true)
    const reader = new FrontendReader(count)
    client.on('data', (chunk: Buffer) => reader.read(chunk))
    join(client, upstream)
    join(upstream, client)
    for (const socket of [client, upstream]) {
      sockets.add(socket)
      socket.once('close', () => sockets.delete(socket))
    }
  })
  await listening(server)
  const address = server.address()
  if (address === null || typeof address === 'string') throw new Error('the proxy has no port')
  const url = new URL(databaseUrl)
  url.hostname = '127.0.0.1'
  url.port = String(address.port)
  // Encrypted, there would be nothing to count.
  url.searchParams.set('sslmode', 'disable')
  return {
    url: url.href,
    counts: () => new Map(counts),
    reset: () => counts.clear(),
    close: () =>
      new Promise((resolve) => {
        server.close(() => resolve())
        for (const socket of sockets) socket.destroy()
      }),
  }
}

function join(from: Socket, to: Socket): void {
  from.pipe(to)
  // Either end may be killed: then the other one is of no use.
  from.on('error', () => to.destroy())
  from.on('close', () => to.destroy())
}

function listening(server: Server): Promise<void> {
  return new Promise((resolve, reject) => {
    server.once('error', reject)
    server.listen(0, '127.0.0.1', resolve)
  })
}

const startupHeaderBytes = 4
const messageHeaderBytes = 5

/**
 * One connection's messages. Startup messages have no type byte; after the first real one (not a request for encryption,
 * whose code is 1234 in the upper half) all have: type, length, content.
 */
export class FrontendReader {
  readonly #count: (statement: string) => void
  readonly #prepared = new Map<string, string>()
  readonly #portals = new Map<string, string>()
  #left = Buffer.alloc(0)
  #isStarted = false

  constructor(count: (statement: string) => void) {
    this.#count = count
  }

  read(chunk: Buffer): void {
    let data = this.#left.length === 0 ? chunk : Buffer.concat([this.#left, chunk])
    for (;;) {
      const header = this.#isStarted ? messageHeaderBytes : startupHeaderBytes
      if (data.length < header) break
      const size = data.readUInt32BE(header - 4) + (header - 4)
      if (data.length < size) break
      this.#message(data.subarray(0, size), header)
      data = data.subarray(size)
    }
    this.#left = Buffer.from(data)
  }

  #message(message: Buffer, header: number): void {
    const content = message.subarray(header)
    if (!this.#isStarted) {
      this.#isStarted = content.readUInt16BE(0) !== 1_234
      return
    }
    switch (String.fromCharCode(message[0] ?? 0)) {
      case 'Q':
        this.#count(text(content, 0).value)
        return
      case 'P': {
        const name = text(content, 0)
        this.#prepared.set(name.value, text(content, name.end).value)
        return
      }
      case 'B': {
        const portal = text(content, 0)
        this.#portals.set(portal.value, this.#prepared.get(text(content, portal.end).value) ?? 'unknown')
        return
      }
      case 'E':
        this.#count(this.#portals.get(text(content, 0).value) ?? 'unknown')
        return
      default:
    }
  }
}

/** A string of the protocol ends with a zero byte. */
function text(content: Buffer, from: number): { value: string; end: number } {
  const end = content.indexOf(0, from)
  return { value: content.toString('utf8', from, end), end: end + 1 }
}
