import { once } from 'node:events'
import { type AddressInfo, connect, createServer, type Server, type Socket } from 'node:net'
import { afterEach, beforeEach, describe, expect, it } from 'vitest'
import { type FaultProxy, startFaultProxy } from './fault-proxy.js'

/** Says everything back. */
let echo: Server
let proxy: FaultProxy
const atEcho = new Set<Socket>()
const opened = new Set<Socket>()

beforeEach(async () => {
  echo = createServer((socket) => {
    atEcho.add(socket)
    socket.on('close', () => atEcho.delete(socket))
    socket.on('error', () => socket.destroy())
    socket.pipe(socket)
  })
  echo.listen(0, '127.0.0.1')
  await once(echo, 'listening')
  proxy = await startFaultProxy({ host: '127.0.0.1', port: (echo.address() as AddressInfo).port })
})

afterEach(async () => {
  for (const socket of opened) socket.destroy()
  opened.clear()
  await proxy.close()
  for (const socket of atEcho) socket.destroy()
  const closed = once(echo, 'close')
  echo.close()
  await closed
})

async function open(): Promise<Socket> {
  const socket = connect(proxy.port, '127.0.0.1')
  opened.add(socket)
  socket.setEncoding('utf8')
  socket.on('error', () => socket.destroy())
  await once(socket, 'connect')
  return socket
}

async function say(socket: Socket, text: string): Promise<string> {
  const heard = once(socket, 'data')
  socket.write(text)
  return String((await heard)[0])
}

/** Not `once`, which would take the reset that comes before the close for a failure. */
const gone = (socket: Socket): Promise<void> => new Promise((resolve) => socket.on('close', () => resolve()))

/** Nothing was heard by the time that another connection, opened later, has been answered. */
async function staysSilent(socket: Socket, ask: () => Promise<string>): Promise<boolean> {
  let heard = false
  socket.on('data', () => {
    heard = true
  })
  socket.write('is anybody there?')
  await ask()
  return !heard && !socket.destroyed
}

describe('the fault proxy', () => {
  it('passes data unchanged, both ways', async () => {
    expect(await say(await open(), 'hello')).toBe('hello')
  })

  it('cuts: connections are reset, new ones pass', async () => {
    const socket = await open()
    await say(socket, 'hello')
    const closed = gone(socket)
    proxy.cut()
    await closed
    expect(await say(await open(), 'again')).toBe('again')
  })

  it('delays, and keeps the order', async () => {
    const socket = await open()
    await say(socket, 'hello')
    proxy.delay(60)
    const began = performance.now()
    socket.write('a')
    socket.write('b')
    let heard = ''
    socket.on('data', (text) => {
      heard += text
    })
    while (heard.length < 2) await once(socket, 'data')
    expect(heard).toBe('ab')
    expect(performance.now() - began).toBeGreaterThanOrEqual(110)
    proxy.restore()
    expect(await say(await open(), 'quick')).toBe('quick')
  })

  it('half-opens: nothing arrives, new connections are accepted and silent; afterwards they are reset', async () => {
    const [before, bystander] = [await open(), await open()]
    await say(before, 'hello')
    await say(bystander, 'hello')
    proxy.halfOpen()
    const during = await open()
    before.write('is anybody there?')
    during.write('is anybody there?')
    const closed = Promise.all([gone(before), gone(during), gone(bystander)])
    proxy.restore()
    await closed
    expect(await say(await open(), 'again')).toBe('again')
  })

  it('black-holes: open connections are silent for ever and neither end hears of the other, new ones pass', async () => {
    const socket = await open()
    await say(socket, 'hello')
    const [far] = atEcho
    proxy.blackHole()
    expect(await staysSilent(socket, async () => say(await open(), 'new'))).toBe(true)
    proxy.restore()
    proxy.cut()
    socket.destroy()
    expect(await say(await open(), 'still')).toBe('still')
    expect(far?.destroyed).toBe(false)
  })
})
