/** Processes and the database die during many streams: nothing is lost, repeated, mixed up or left without an end. */
import { mkdtemp, rm } from 'node:fs/promises'
import { tmpdir } from 'node:os'
import { join } from 'node:path'
import { afterAll, beforeAll, describe, expect, it } from 'vitest'
import { type EmbeddedServer, startEmbedded } from '../src/store/embedded/index.js'
import { type GenerationFleet, leaseSeconds, marginMs, startGenerationFleet } from './generation-faults-fleet.js'
import { killed, pausedPastLease, wave } from './generation-faults-wave.js'

const boundMs = leaseSeconds * 1_000 + marginMs

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

const small = { streams: 24, users: 8, tokens: 30, everyMs: 60 }

describe('a worker that is killed', () => {
  it('leaves streams that are whole or end with an explicit error', async () => {
    const seen = await wave(fleet, { ...small, name: 'worker', happens: () => killed(fleet, 'worker') })
    console.log('worker', { ...seen, all: undefined })
    expect(seen.findings).toEqual([])
    expect(seen.errors).toEqual({ stream_interrupted: seen.failed })
    expect(seen.failed).toBeGreaterThan(0)
    expect(seen.lateMs).toBeLessThan(boundMs)
  })
})
describe('a gateway that is killed', () => {
  it('x', async () => {
    const seen = await wave(fleet, { ...small, name: 'gateway', happens: () => killed(fleet, 'gateway') })
    console.log('gateway', { ...seen, all: undefined })
    expect(seen.findings).toEqual([])
  })
})
describe('a zombie', () => {
  it('x', async () => {
    const seen = await wave(fleet, { ...small, name: 'zombie', happens: () => pausedPastLease(fleet, 'worker') })
    console.log('zombie', { ...seen, all: undefined })
    expect(seen.findings).toEqual([])
  })
})
describe('postgres', () => {
  it('x', async () => {
    const seen = await wave(fleet, {
      ...small,
      name: 'postgres',
      happens: async () => {
        process.kill(embedded.pid, 'SIGKILL')
      },
    })
    console.log('postgres', { ...seen, all: undefined })
    expect(seen.findings).toEqual([])
  })
})
