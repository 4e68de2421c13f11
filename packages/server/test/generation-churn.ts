/** Clients that come, read, leave and cancel at random while processes are killed: what is counted, and what is held at the end. */
import { setTimeout as delay } from 'node:timers/promises'
import type { SeenRequest } from '../../spillway/test/setup/scripted-upstream.js'
import type { GenerationFleet } from './generation-faults-fleet.js'
import { Reader, type Transcript } from './generation-faults-reader.js'
import { post } from './server-process.js'

export interface ChurnOptions {
  clients: number
  /** At once. */
  width: number
  users: number
  /** SIGKILL of each process in turn, so often in all, evenly spread. */
  crashes: number
  seed: number
}

export interface Churned {
  transcripts: Transcript[]
  left: number
  cancelled: number
  read: number
  crashes: number
  /** The most that ran at once on the direct path, by user. */
  directAtOnce: Map<string, number>
}

/** A generator of our own, so that a run can be repeated. */
export function randomOf(seed: number): () => number {
  let state = seed >>> 0
  return () => {
    state = (Math.imul(state, 1_664_525) + 1_013_904_223) >>> 0
    return state / 2 ** 32
  }
}

export async function churn(fleet: GenerationFleet, o: ChurnOptions): Promise<Churned> {
  fleet.upstream.forget()
  const random = randomOf(o.seed)
  const result: Churned = { transcripts: [], left: 0, cancelled: 0, read: 0, crashes: 0, directAtOnce: new Map() }
  let next = 0
  let crashing: Promise<void> = Promise.resolve()
  const every = Math.ceil(o.clients / (o.crashes + 1))
  const client = async (): Promise<void> => {
    while (next < o.clients) {
      const n = next++
      if (n > 0 && n % every === 0 && result.crashes < o.crashes) {
        const member = fleet.members[result.crashes++ % fleet.members.length]
        if (member !== undefined) {
          crashing = crashing.then(async () => {
            await member.process.kill()
            await fleet.restart(member)
          })
        }
      }
      await one(fleet, n, o, random, result)
    }
  }
  await Promise.all(Array.from({ length: o.width }, client))
  await crashing
  result.directAtOnce = directAtOnce(result.transcripts, fleet.upstream.requests)
  return result
}

async function one(
  fleet: GenerationFleet,
  n: number,
  o: ChurnOptions,
  random: () => number,
  result: Churned,
): Promise<void> {
  const reader = new Reader(
    fleet.origins,
    {
      ...{ format: random() < 0.5 ? 'native' : 'openai', marker: `churn-${n}`, user: `user-${n % o.users}` },
      ...{ tokens: 20, everyMs: 5 + Math.floor(random() * 20) },
    },
    { turn: n },
  )
  const what = random()
  const afterMs = random() * 300
  // Now and then before it has an answer at all.
  if (random() < 0.8) await reader.promised
  if (what < 0.25) {
    result.read++
  } else {
    await Promise.race([delay(afterMs), reader.over])
    const id = reader.transcript.streamId
    if (what < 0.5 && id !== null) {
      result.cancelled++
      const origin = fleet.origins()[n % fleet.origins().length] ?? ''
      // This instance may be the one that is killed.
      await post({ origin }, `/api/v1/streams/${id}/cancel`, undefined, { 'x-user-id': `user-${n % o.users}` }).catch(
        () => undefined,
      )
    } else {
      result.left++
      reader.leave()
    }
  }
  result.transcripts.push(await reader.over)
}

/** That a client is gone is seen here a moment after the server has seen it, when its successor may have begun. */
const noticeMs = 250

export function directAtOnce(all: readonly Transcript[], requests: readonly SeenRequest[]): Map<string, number> {
  const first = new Map<string, SeenRequest>()
  for (const seen of requests) if (!first.has(seen.marker)) first.set(seen.marker, seen)
  const steps = new Map<string, { atMs: number; by: number }[]>()
  for (const { ask, layer } of all) {
    const seen = first.get(ask.marker)
    if (layer !== '1-Direct' || seen === undefined) continue
    const own = steps.get(ask.user) ?? []
    const endMs = (seen.endedMs ?? Number.POSITIVE_INFINITY) - (seen.outcome === 'aborted' ? noticeMs : 0)
    if (endMs > seen.beganMs) own.push({ atMs: seen.beganMs, by: 1 }, { atMs: endMs, by: -1 })
    steps.set(ask.user, own)
  }
  return new Map(
    [...steps].map(([user, own]) => {
      let open = 0
      let most = 0
      for (const { by } of own.sort((a, b) => a.atMs - b.atMs || a.by - b.by)) {
        open += by
        most = Math.max(most, open)
      }
      return [user, most]
    }),
  )
}
