/** Readers that are slower than what is generated: nothing of the backlog is held in memory, and none of it is lost. */
import { once } from 'node:events'
import { readFile } from 'node:fs/promises'
import { connect, type Socket } from 'node:net'
import { afterAll, beforeAll, describe, expect, it, vi } from 'vitest'
import { freshDatabase, type TestDatabase } from '../../../spillway/test/setup/database.js'
import { type GenerationFleet, startGenerationFleet } from '../generation-faults-fleet.js'
import { EventParser } from '../generation-faults-reader.js'
import { get, until } from '../server-process.js'

const megabyte = 1_048_576
const readersCount = 14
/** 8 MB each. */
const tokens = 1_024
const pad = 8_192
const stallSeconds = 2

vi.setConfig({ testTimeout: 120_000, hookTimeout: 120_000 })

let database: TestDatabase
let fleet: GenerationFleet

beforeAll(async () => {
  database = await freshDatabase()
  const env = { STREAM_STALL_SECONDS: String(stallSeconds), CONNECTION_POOL_MAX_PER_USER: '100' }
  fleet = await startGenerationFleet({ url: database.url, roles: ['all'], env })
})

afterAll(async () => {
  await fleet?.close()
  await database?.drop()
})

/** What the process has in memory, pages of files not counted. */
async function anonymousBytes(): Promise<number> {
  const status = await readFile(`/proc/${fleet.of('all').process.pid}/status`, 'utf8')
  return Number(/RssAnon:\s+(\d+)/.exec(status)?.[1]) * 1_024
}

/** Sends the request and reads nothing of the answer by itself. */
async function ask(marker: string, count: number): Promise<Socket> {
  const { port } = fleet.of('all').process
  const body = JSON.stringify({
    ...{ model: 'scripted', query: `script: marker=${marker} tokens=${count} pad=${pad}` },
  })
  const socket = connect(port, '127.0.0.1')
  await once(socket, 'connect')
  socket.on('error', () => undefined)
  socket.write(
    `POST /api/v1/stream HTTP/1.1\r\nhost: localhost\r\ncontent-type: application/json\r\nx-user-id: ${marker}\r\ncontent-length: ${Buffer.byteLength(body)}\r\n\r\n${body}`,
  )
  return socket
}

const streamOf = (marker: string) =>
  until(`${marker} has a stream`, async () => {
    const [found] = await fleet.sql<{ id: string; ended: string | null }>(
      'SELECT id, ended FROM spillway.streams WHERE identity = $1',
      [marker],
    )
    return found
  })

const ended = (marker: string) =>
  until(
    `${marker} is generated`,
    async () => {
      const { ended: how } = await streamOf(marker)
      if (how !== null) expect(how, marker).toBe('done')
      return how !== null
    },
    60_000,
  )

/** A kilobyte a second, in ten parts. */
function trickle(socket: Socket): NodeJS.Timeout {
  socket.pause()
  return setInterval(() => void socket.read(100), 100)
}

describe('readers at a kilobyte a second of eight megabytes each', () => {
  it('do not make the server hold unread data', async () => {
    const first = await ask('warm-up', tokens)
    first.resume()
    await ended('warm-up')
    first.destroy()
    const before = await anonymousBytes()
    const names = Array.from({ length: readersCount }, (_, n) => `slow-${n}`)
    const sockets = await Promise.all(names.map((name) => ask(name, tokens)))
    const trickles = sockets.map(trickle)
    await Promise.all(names.map(ended))
    // Of 112 MB. What it took to generate them is given back by the collector, in its own time.
    const isBack = async (): Promise<boolean> => (await anonymousBytes()) - before < 40 * megabyte
    await until('no more is held than one generation takes', isBack, 20_000)
    expect(sockets.filter(({ destroyed }) => destroyed)).toEqual([])
    for (const timer of trickles) clearInterval(timer)
    for (const socket of sockets) socket.destroy()
  })
})

describe('a reader that takes nothing', () => {
  it('is closed after the stall limit, counted, and gets the rest by resuming', async () => {
    const count = 2_000
    const closedBefore = await fleet.sum('sse_slow_reader_closed_total')
    const socket = await ask('stalled', count)
    let taken = ''
    const parsed: { id: string | null; data: string }[] = []
    const parser = new EventParser((event) => parsed.push(event))
    // As much as one read gives, and then never again: what the kernel has of it is lost with the connection.
    socket.once('data', (bytes: Buffer) => {
      taken = bytes.toString()
      socket.pause()
    })
    await ended('stalled')
    await until('it is closed', async () => (await fleet.sum('sse_slow_reader_closed_total')) > closedBefore, 20_000)
    socket.destroy()
    parser.push(taken.slice(taken.indexOf('\r\n\r\n') + 4).replace(/(^|\r\n)[\da-f]+\r\n/g, ''))
    const last = Number(parsed.findLast(({ id }) => id !== null)?.id ?? 0)
    const { id } = await streamOf('stalled')
    const rest = await get(fleet.of('all').process, `/api/v1/streams/${id}?starting_after=${last}`, {
      'x-user-id': 'stalled',
    })
    const numbers = [...rest.text.matchAll(/^id: (\d+)$/gm)].map(([, number]) => Number(number))
    // Its tokens, the chunk with its finish_reason, and its end.
    expect(numbers).toEqual(Array.from({ length: count + 2 - last }, (_, n) => last + 1 + n))
    expect(rest.text).toContain('event: complete')
  })
})
