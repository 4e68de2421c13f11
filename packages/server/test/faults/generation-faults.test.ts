/** Processes and the database die during many streams: nothing is lost, repeated, mixed up or left without an end. */
import { randomUUID } from 'node:crypto'
import { mkdtemp, rm } from 'node:fs/promises'
import { tmpdir } from 'node:os'
import { join } from 'node:path'
import { type EmbeddedServer, startEmbedded } from '@spillway/embedded-postgres'
import { afterAll, beforeAll, describe, expect, it, vi } from 'vitest'
import { type GenerationFleet, leaseSeconds, marginMs, startGenerationFleet } from '../generation-faults-fleet.js'
import { Reader } from '../generation-faults-reader.js'
import { killed, pausedPastLease, stopped, type WaveResult, wave } from '../generation-faults-wave.js'
import { get, until } from '../server-process.js'

const boundMs = leaseSeconds * 1_000 + marginMs
/** Half of them find a place in the pool of three for each user. */
const small = { streams: 24, users: 4, tokens: 40, everyMs: 40 }

vi.setConfig({ testTimeout: 60_000, hookTimeout: 120_000 })

let fleet: GenerationFleet
let embedded: EmbeddedServer
let folder: string

beforeAll(async () => {
  folder = await mkdtemp(join(tmpdir(), 'spillway-generation-'))
  const log = { info: () => undefined, warn: () => undefined, error: () => undefined }
  embedded = await startEmbedded({ dataDir: join(folder, 'data'), log })
  fleet = await startGenerationFleet({ url: embedded.url, roles: ['gateway', 'gateway', 'worker', 'worker'] })
})

afterAll(async () => {
  await fleet?.close()
  await embedded?.stop()
  await rm(folder, { recursive: true, force: true })
})

function expectExplicit(seen: WaveResult): void {
  expect(seen.findings).toEqual([])
  expect(seen.hit).toBeGreaterThan(0)
  expect(seen.lateMs).toBeLessThan(boundMs)
}

const asked = (name: string): number => fleet.upstream.requests.filter(({ marker }) => marker.startsWith(name)).length

describe('a worker', () => {
  it('that is killed leaves its streams with an explicit end, and all others intact', async () => {
    const seen = await wave(fleet, { ...small, name: 'worker', happens: () => killed(fleet, 'worker') })
    expectExplicit(seen)
    expect(seen.failed).toBeGreaterThan(0)
    expect(seen.errors).toEqual({ stream_interrupted: seen.failed })
  })

  it('that is killed before the first token costs its clients nothing', async () => {
    const seen = await wave(fleet, {
      ...{ ...small, name: 'early', begunShare: 0, script: 'first=hang role=0', tokens: 5 },
      happens: async () => {
        await until('half of them are asked for', () => asked('early') >= small.streams / 2)
        const worker = await until('one that runs some has asked for them', async () => {
          const busiest = await fleet.busiest('worker')
          const ids = (await fleet.heldBy(busiest)).map(({ id }) => id)
          return fleet.upstream.requests.some(({ idempotencyKey }) => ids.includes(idempotencyKey ?? '')) && busiest
        })
        await killed(fleet, 'worker', worker)
      },
    })
    expect(seen.findings).toEqual([])
    expect(seen.done).toBe(small.streams)
    expect(asked('early')).toBeGreaterThan(small.streams)
  })

  it('that was paused past its lease writes nothing when it resumes', async () => {
    const seen = await wave(fleet, { ...small, name: 'zombie', happens: () => pausedPastLease(fleet, 'worker') })
    expectExplicit(seen)
    expect(seen.errors).toEqual({ stream_interrupted: seen.failed })
    expect(seen.failed).toBeGreaterThan(0)
  })

  it('that gets SIGTERM lets its streams end and exits with 0', async () => {
    let code: number | null = null
    const seen = await wave(fleet, {
      ...{ ...small, name: 'drain' },
      happens: async (release) => {
        code = await stopped(fleet, 'worker', release)
      },
    })
    expect(seen.findings).toEqual([])
    expect({ code, done: seen.done }).toEqual({ code: 0, done: small.streams })
  })
})

describe('a gateway', () => {
  it('that is killed costs its clients nothing that they do not get by resuming elsewhere', async () => {
    const seen = await wave(fleet, { ...small, name: 'gateway', happens: () => killed(fleet, 'gateway') })
    expectExplicit(seen)
    expect(seen.cuts).toBeGreaterThan(small.streams / 4)
    // What it generated itself: one slot.
    expect(seen.failed).toBeLessThanOrEqual(1)
  })

  it('that gets SIGTERM sends its clients elsewhere and exits with 0', async () => {
    const gateway = fleet.of('gateway')
    await gateway.process.kill()
    await fleet.restart(gateway, { SPILLWAY_DRAIN_SECONDS: '1' })
    let code: number | null = null
    const seen = await wave(fleet, {
      ...{ ...small, name: 'leaving' },
      happens: async () => {
        code = await stopped(fleet, 'gateway', () => undefined)
      },
    })
    expect(seen.findings).toEqual([])
    const codes = seen.all.flatMap(({ ends }) => ends.map((end) => end.code))
    expect(codes).toContain('draining')
    expect({ code, cuts: seen.cuts }).toEqual({ code: 0, cuts: 0 })
    expect(seen.failed).toBeLessThanOrEqual(1)
  })
})

describe('a stream', () => {
  it('ends with an error if a worker that lost its lease wrote to it before the first token', async () => {
    const ask = {
      format: 'native',
      marker: 'late',
      user: 'late',
      tokens: 5,
      everyMs: 10,
      script: 'first=1500',
    } as const
    const reader = new Reader(fleet.origins, ask)
    await reader.promised
    await until('it is asked for', () => asked('late') === 1)
    const text = JSON.stringify({ content: ' late#1', chunk_index: 0, finish_reason: null })
    await fleet.sql(
      `INSERT INTO spillway.stream_chunks (stream, born_at, first, last, writer, chunks)
       SELECT id, born_at, 1, 1, $2, $3 FROM spillway.streams WHERE id = $1`,
      [reader.transcript.streamId, randomUUID(), text],
    )
    const { ends, numbers, text: read } = await reader.over
    expect(numbers).toEqual([1, 2])
    expect(read).toBe(' late#1')
    expect(ends.map(({ kind, code }) => [kind, code])).toEqual([['error', 'stream_interrupted']])
  })
})

describe('a stream without an end', () => {
  it('whose operation is gone is ended, explicitly', async () => {
    const id = randomUUID()
    // As a process leaves it that dies behind the cancel, or that takes back what it believes not to have opened.
    await fleet.sql(
      `SELECT FROM spillway.stream_open(ARRAY[$1::uuid], '{left}', '{native}', '{thread}', '{postgres}', '{f}', ARRAY[$2::uuid], '{0}')`,
      [id, randomUUID()],
    )
    const open = () => fleet.sql('SELECT FROM spillway.streams WHERE id = $1 AND ended IS NULL', [id])
    await until('it has an end', async () => (await open()).length === 0, boundMs)
    const { text } = await get(fleet.of('gateway').process, `/api/v1/streams/${id}`, { 'x-user-id': 'left' })
    expect(text).toContain('"code":"stream_interrupted"')
  })
})

describe('PostgreSQL', () => {
  it('that is killed and restarts delays its streams, and no more', async () => {
    const seen = await wave(fleet, {
      ...{ ...small, name: 'postgres' },
      happens: async () => {
        process.kill(embedded.pid, 'SIGKILL')
      },
    })
    expect(seen.findings).toEqual([])
    expect(seen.hit).toBeGreaterThan(0)
  })
})
