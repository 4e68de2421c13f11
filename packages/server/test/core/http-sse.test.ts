import { once } from 'node:events'
import { createServer, request as httpRequest, type IncomingMessage, type ServerResponse } from 'node:http'
import { type AddressInfo, connect, type Socket } from 'node:net'
import { afterEach, describe, expect, it, vi } from 'vitest'
import { eventually } from '../../../spillway/test/pipeline-fixture.js'
import { type SseConnection, SseHub } from '../../src/traffic/sse.js'

const closers: (() => void)[] = []
afterEach(() => {
  for (const close of closers.splice(0).reverse()) close()
  vi.useRealTimers()
})

/** A server of which each request is an SSE answer, in the hands of the test. */
async function serving(options: { heartbeatMs?: number; stallMs?: number; timeoutMs?: number; host?: string } = {}) {
  const onStalled = vi.fn()
  const hub = new SseHub({ heartbeatMs: options.heartbeatMs ?? 60_000, stallMs: options.stallMs ?? 60_000, onStalled })
  const opened: { connection: SseConnection; raw: ServerResponse }[] = []
  const server = createServer((_request, raw) => {
    opened.push({ connection: hub.open(raw, { 'x-stream-id': 'abc' }), raw })
  })
  if (options.timeoutMs !== undefined) server.setTimeout(options.timeoutMs)
  server.listen(0, options.host ?? '127.0.0.1')
  await once(server, 'listening')
  const { port } = server.address() as AddressInfo
  closers.push(() => {
    hub.close()
    server.close()
    server.closeAllConnections()
  })
  const nth = (n: number) => eventually(() => opened[n], `connection ${n}`)
  return { hub, port, onStalled, nth, server }
}

interface Client {
  response: IncomingMessage
  text(): string
  isOver(): 'ended' | 'broken' | undefined
  leave(): void
}

/** A client that reads all it gets. */
async function reading(port: number): Promise<Client> {
  const request = httpRequest({ port, host: '127.0.0.1', agent: false })
  closers.push(() => request.destroy())
  request.end()
  const [response] = (await once(request, 'response')) as [IncomingMessage]
  let text = ''
  let over: 'ended' | 'broken' | undefined
  response.setEncoding('utf8')
  response.on('data', (part: string) => {
    text += part
  })
  response.on('end', () => {
    over = 'ended'
  })
  response.on('error', () => {
    over = 'broken'
  })
  return { response, text: () => text, isOver: () => over, leave: () => request.destroy() }
}

/** A client that reads nothing until it is resumed. */
async function silent(port: number): Promise<Socket> {
  const socket = connect({ port, host: '127.0.0.1' })
  closers.push(() => socket.destroy())
  socket.on('error', () => undefined)
  socket.pause()
  await once(socket, 'connect')
  socket.write('GET / HTTP/1.1\r\nhost: x\r\n\r\n')
  return socket
}

const block = `data: ${'x'.repeat(32_000)}\n\n`

/** Writes until the socket is full, beyond what the kernel takes. */
async function fill(connection: SseConnection): Promise<{ full: Promise<'open' | 'closed'> }> {
  for (;;) {
    const written = connection.write(block)
    if (written === 'closed') throw new Error('closed while it was filled')
    if (written === 'open') continue
    // The kernel may take it after all; when it does not within a turn or two of the loop, it is full.
    let isDone = false
    void written.then(() => {
      isDone = true
    })
    for (let turn = 0; turn < 20 && !isDone; turn++) await new Promise((resolve) => setImmediate(resolve))
    if (!isDone) return { full: written }
  }
}

describe('SSE', () => {
  it('sends the head at once, before anything is written', async () => {
    const { port, hub } = await serving()
    const { response } = await reading(port)
    expect(response.statusCode).toBe(200)
    expect(response.headers).toMatchObject({
      'content-type': 'text/event-stream; charset=utf-8',
      'cache-control': 'no-cache, no-transform',
      'x-accel-buffering': 'no',
      'x-stream-id': 'abc',
    })
    expect(hub.size).toBe(1)
  })

  it('returns all records, then ends', async () => {
    const { port, nth, hub } = await serving()
    const client = await reading(port)
    const { connection } = await nth(0)
    expect(connection.write('data: ä\n\n')).toBe('open')
    connection.end()
    await eventually(() => client.isOver(), 'the end')
    expect(client.isOver()).toBe('ended')
    expect(client.text()).toBe('data: ä\n\n')
    expect(connection.write('data: late\n\n')).toBe('closed')
    await eventually(() => hub.size === 0, 'the hub to let go')
  })

  it('beats with a colon and one newline when nothing was written for a while', async () => {
    vi.useFakeTimers({ toFake: ['setInterval', 'clearInterval', 'setTimeout', 'clearTimeout'] })
    const { port } = await serving({ heartbeatMs: 12_000 })
    const client = await reading(port)
    vi.advanceTimersByTime(11_900)
    expect(client.text()).toBe('')
    vi.advanceTimersByTime(1_000)
    await eventually(() => client.text() === ':\n', 'a heartbeat')
    vi.advanceTimersByTime(13_000)
    await eventually(() => client.text() === ':\n:\n', 'another')
  })

  it('does not beat where something was written meanwhile', async () => {
    vi.useFakeTimers({ toFake: ['setInterval', 'clearInterval', 'setTimeout', 'clearTimeout'] })
    const { port, nth } = await serving({ heartbeatMs: 12_000 })
    const client = await reading(port)
    const { connection } = await nth(0)
    for (let n = 0; n < 6; n++) {
      vi.advanceTimersByTime(9_000)
      connection.write(`data: ${n}\n\n`)
    }
    await eventually(() => client.text().includes('data: 5') || undefined, 'the last block')
    expect(client.text()).not.toContain(':\n')
    vi.advanceTimersByTime(13_000)
    await eventually(() => client.text().endsWith('data: 5\n\n:\n'), 'a heartbeat behind it')
  })

  it('beats while only comment lines were written, and never within a block', async () => {
    vi.useFakeTimers({ toFake: ['setInterval', 'clearInterval', 'setTimeout', 'clearTimeout'] })
    const { port, nth } = await serving({ heartbeatMs: 12_000 })
    const client = await reading(port)
    const { connection } = await nth(0)
    connection.write(': position 3\n')
    await eventually(() => client.text() === ': position 3\n', 'the comment')
    vi.advanceTimersByTime(13_000)
    await eventually(() => client.text() === ': position 3\n:\n', 'a heartbeat')
    connection.write('id: 1\n')
    await eventually(() => client.text().endsWith('id: 1\n'), 'half a block')
    vi.advanceTimersByTime(60_000)
    connection.write('data: x\n\n')
    await eventually(() => client.text().endsWith('data: x\n\n'), 'the block')
    expect(client.text()).toBe(': position 3\n:\nid: 1\ndata: x\n\n')
  })

  it('is not cut by the timeout of the server', async () => {
    const { port } = await serving({ timeoutMs: 100, heartbeatMs: 400 })
    const client = await reading(port)
    await eventually(() => client.text() === ':\n' || client.isOver(), 'a heartbeat')
    expect(client.isOver()).toBeUndefined()
  })

  it('makes the writer wait while the socket is full, and continue when it is read', async () => {
    const { port, nth, hub } = await serving()
    const socket = await silent(port)
    const { connection, raw } = await nth(0)
    const { full } = await fill(connection)
    // What waits here is bounded by what was written in one go.
    expect(raw.writableLength).toBeLessThan(2 * block.length)
    socket.resume()
    expect(await full).toBe('open')
    expect(hub.size).toBe(1)
  })

  it('closes a reader that takes nothing for the stall limit, heartbeats or not', async () => {
    const { port, nth, onStalled, hub } = await serving({ stallMs: 400, heartbeatMs: 50 })
    await silent(port)
    const { connection } = await nth(0)
    const closed = vi.fn()
    connection.onClosed(closed)
    const { full } = await fill(connection)
    const since = performance.now()
    expect(await full).toBe('closed')
    expect(performance.now() - since).toBeGreaterThan(300)
    expect(connection.wasStalled).toBe(true)
    expect(connection.isClosed).toBe(true)
    expect(onStalled).toHaveBeenCalledTimes(1)
    expect(closed).toHaveBeenCalledTimes(1)
    expect(hub.size).toBe(0)
  })

  it('closes a reader that does not take the rest of an answer that was ended', async () => {
    const { port, nth, onStalled, hub } = await serving({ stallMs: 200 })
    await silent(port)
    const { connection } = await nth(0)
    await fill(connection)
    connection.end()
    expect(hub.size).toBe(1)
    await eventually(() => hub.size === 0, 'the stall limit')
    expect(onStalled).toHaveBeenCalledTimes(1)
  })

  it.each(['127.0.0.1', '::'])('does not close a slow reader that the kernel hides (listening on %s)', async (host) => {
    const stallMs = 1_000
    const { port, nth, onStalled } = await serving({ stallMs, host })
    const socket = await silent(port)
    const { connection } = await nth(0)
    let received = 0
    socket.on('data', (part: Buffer) => {
      received += part.length
      socket.pause()
    })
    const { full } = await fill(connection)
    let isFull = true
    void full.then(() => {
      isFull = false
    })
    const since = performance.now()
    const pace = setInterval(() => socket.resume(), stallMs / 4)
    closers.push(() => clearInterval(pace))
    await eventually(() => performance.now() - since > 2.5 * stallMs || !isFull, 'twice the stall limit')
    // Else this has proven nothing: here something was seen to be taken.
    expect(isFull).toBe(true)
    expect(received).toBeGreaterThan(0)
    expect(onStalled).not.toHaveBeenCalled()
    expect(connection.isClosed).toBe(false)
    clearInterval(pace)
    expect(await full).toBe('closed')
    expect(connection.wasStalled).toBe(true)
  })

  it('calls its listeners when the client leaves', async () => {
    const { port, nth, hub } = await serving()
    const client = await reading(port)
    const { connection } = await nth(0)
    const closed = vi.fn()
    connection.onClosed(closed)
    connection.onClosed(closed)
    client.leave()
    await eventually(() => hub.size === 0, 'the client to be gone')
    expect(closed).toHaveBeenCalledTimes(2)
    expect(connection.write('data: x\n\n')).toBe('closed')
    expect(connection.wasStalled).toBe(false)
  })

  it('ends the wait for a full socket when the client leaves', async () => {
    const { port, nth } = await serving()
    const socket = await silent(port)
    const { connection } = await nth(0)
    const { full } = await fill(connection)
    socket.destroy()
    expect(await full).toBe('closed')
  })

  it('calls a listener that is added after it closed', async () => {
    const { port, nth, hub } = await serving()
    const client = await reading(port)
    const { connection } = await nth(0)
    client.leave()
    await eventually(() => hub.size === 0, 'the client to be gone')
    await new Promise<void>((resolve) => connection.onClosed(resolve))
    expect(connection.isClosed).toBe(true)
  })

  it('breaks connections without an end event when it closes', async () => {
    const { port, nth, hub } = await serving()
    const [open, ended] = [await reading(port), await reading(port)]
    const { connection } = await nth(1)
    connection.write('data: [DONE]\n\n')
    connection.end()
    hub.close()
    await eventually(() => (open.isOver() && ended.isOver()) || undefined, 'both to be over')
    expect([open.isOver(), ended.isOver()]).toEqual(['broken', 'ended'])
    expect(ended.text()).toBe('data: [DONE]\n\n')
  })

  it('runs no timer of the stall limit when nothing waits any more', async () => {
    vi.useFakeTimers({ toFake: ['setInterval', 'clearInterval', 'setTimeout', 'clearTimeout'] })
    const { port, nth, hub } = await serving({ stallMs: 8_000 })
    const socket = await silent(port)
    const { connection } = await nth(0)
    const { full } = await fill(connection)
    expect(vi.getTimerCount()).toBe(2)
    socket.resume()
    await full
    vi.advanceTimersByTime(2_000)
    expect(vi.getTimerCount()).toBe(1)
    hub.close()
    expect(vi.getTimerCount()).toBe(0)
  })
})
