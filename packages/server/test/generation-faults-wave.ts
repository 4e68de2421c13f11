/**
 * Many streams at once, of both forms and many users, and something that happens to them half-way: the upstream keeps the
 * end of each to itself until then.
 */
import { setTimeout as delay } from 'node:timers/promises'
import { monotonicMs } from '../../spillway/test/setup/scripted-upstream.js'
import { type FleetMember, type GenerationFleet, leaseSeconds, marginMs, type Role } from './generation-faults-fleet.js'
import { type Ask, Reader, type Transcript } from './generation-faults-reader.js'
import { type Judged, judge } from './generation-faults-verdict.js'
import { get, until } from './server-process.js'

export interface WaveOptions {
  name: string
  streams: number
  users: number
  tokens: number
  everyMs: number
  script?: string
  /** Of each reader, from its request on. Default 60 s. */
  patienceMs?: number
  /** Of the streams that had their first token when it happened; those that wait are in the queue. Default 0.5. */
  begunShare?: number
  /** Runs the fault and waits for recovery. `release`: the upstream ends its streams from now on; by default after the fault. */
  happens(release: () => void): Promise<void>
}

const releaseMs = 50

export interface WaveResult extends Judged {
  all: Transcript[]
  /** The longest time from the fault to an end; for streams that completed, from when the upstream ended them. */
  lateMs: number
  /** How many streams had begun and not ended when it happened. */
  hit: number
}

export async function wave(fleet: GenerationFleet, options: WaveOptions): Promise<WaveResult> {
  const { name, streams, users, tokens, everyMs, script } = options
  const readers = Array.from({ length: streams }, (_, n) => {
    const ask: Ask = {
      ...{ format: n % 2 === 0 ? 'native' : 'openai', marker: `${name}-${n}`, user: `${name}-user-${n % users}` },
      ...{ tokens, everyMs, script: `end=hang ${script ?? ''}` },
    }
    const { patienceMs } = options
    return new Reader(fleet.origins, ask, { turn: n >> 1, ...(patienceMs !== undefined && { patienceMs }) })
  })
  await Promise.all(readers.map(({ promised }) => promised))
  await isBegun(readers, Math.ceil(streams * (options.begunShare ?? 0.5)))
  const hit = readers.filter(
    ({ transcript }) => transcript.firstTokenMs !== null && transcript.ends.length === 0,
  ).length
  const happenedMs = monotonicMs()
  // One that is run again comes later, to be released as well.
  let releasing: NodeJS.Timeout | undefined
  let releasedMs = Number.NaN
  const release = (): void => {
    if (releasing === undefined) releasedMs = monotonicMs()
    releasing ??= setInterval(() => fleet.upstream.release(), releaseMs)
  }
  const over = Promise.all(readers.map((reader) => reader.over))
  await options.happens(release)
  release()
  const all = await over
  clearInterval(releasing)
  const judged = judge(all, fleet.upstream.requests)
  const lateMs = Math.max(
    ...all.map(({ overMs, ends }) => overMs - (ends.at(-1)?.kind === 'done' ? releasedMs : happenedMs)),
  )
  judged.findings.push(...(await settled(fleet)))
  return { ...judged, all, hit, lateMs }
}

async function isBegun(readers: readonly Reader[], count: number): Promise<void> {
  let begun = 0
  await new Promise<void>((resolve) => {
    if (count === 0) resolve()
    for (const reader of readers) {
      void reader.begun.then(() => {
        if (++begun === count) resolve()
      })
    }
  })
}

/** What is still there a lease after everyone has gone. */
export async function settled(fleet: GenerationFleet): Promise<string[]> {
  const deadline = performance.now() + leaseSeconds * 1_000 + marginMs
  for (;;) {
    const left = await fleet.leftovers()
    if (left.length === 0 || performance.now() > deadline) return left
    await delay(50)
  }
}

/** SIGKILL of one, by default of the one that runs most, and a successor. */
export async function killed(fleet: GenerationFleet, role: Role, one?: FleetMember): Promise<void> {
  const member = one ?? (role === 'gateway' ? fleet.of(role) : await fleet.busiest(role))
  await member.process.kill()
  await fleet.restart(member)
}

/** Pauses a process until its lease is lost and others have ended its streams, then resumes it. */
export async function pausedPastLease(fleet: GenerationFleet, role: Role): Promise<void> {
  const member = await fleet.busiest(role)
  const { pid } = member.process
  const workers = () => fleet.sql<{ id: string }>('SELECT id FROM spillway.workers WHERE name LIKE $1', [`%:${pid}`])
  const [before] = await workers()
  process.kill(pid, 'SIGSTOP')
  try {
    const begun = (await fleet.heldBy(member)).filter((held) => held.begun)
    const isGivenUp = async (): Promise<boolean> => !(await workers()).some(({ id }) => id === before?.id)
    await until('the paused process loses its lease', isGivenUp, leaseSeconds * 1_000 + marginMs)
    // Else it may still be the first to write: it wakes up with what the upstream sent meanwhile.
    const ids = begun.map(({ id }) => id)
    const open = () => fleet.sql('SELECT FROM spillway.streams WHERE id = ANY ($1) AND ended IS NULL', [ids])
    await until('what it had begun is ended', async () => (await open()).length === 0, marginMs)
  } finally {
    process.kill(pid, 'SIGCONT')
  }
}

/** SIGTERM of the one that runs most, and a successor; its exit code. `release`: once it has begun to stop. */
export async function stopped(fleet: GenerationFleet, role: Role, release: () => void): Promise<number | null> {
  const member = role === 'gateway' ? fleet.of(role) : await fleet.busiest(role)
  const stopping = member.process.stop()
  await until('it takes nothing new', async () => {
    const ready = await get(member.process, '/health/ready').catch(() => null)
    return ready?.status !== 200
  })
  release()
  const { code } = await stopping
  await fleet.restart(member)
  return code
}
