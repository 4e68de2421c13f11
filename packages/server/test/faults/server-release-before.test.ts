/**
 * An upgrade without a pause: the release before serves, this build migrates its database and serves beside it, then the
 * old one stops. Callers go on all the time. Nothing that was accepted is lost, done twice or out of order.
 */
import { randomUUID } from 'node:crypto'
import { afterAll, afterEach, beforeAll, describe, expect, it } from 'vitest'
import { freshDatabase, type TestDatabase } from '../../../spillway/test/setup/database.js'
import { configure, dataOf, push, takeAll } from '../message-calls.js'
import { petitionsPath, submitPetition } from '../petition-calls.js'
import {
  type Answer,
  allFinish,
  endAll,
  get,
  type ServerProcess,
  startServer,
  startTarget,
  submit,
  type Target,
  until,
} from '../server-process.js'
import { buildReleaseBefore, type ReleaseBefore } from '../setup/release-before.js'

const lanes = ['a', 'b', 'c', 'd']
/** Accepted by each server in each phase, for each kind of work, before the next phase begins. */
const enough = 40
const buildMs = 240_000

let before: ReleaseBefore
let database: TestDatabase
let target: Target

beforeAll(async () => {
  before = await buildReleaseBefore()
  database = await freshDatabase({ empty: true })
  target = await startTarget()
}, buildMs)
afterEach(endAll)
afterAll(async () => {
  await target.close()
  await before.remove()
})

/** Callers of one kind of work, one per lane. Each sends its next request when the last one was accepted. */
class Callers {
  readonly accepted: { lane: string; n: number; by: ServerProcess; answer: Answer }[] = []
  readonly refused: Answer[] = []
  #stopped = false
  readonly #running: Promise<void>[]

  constructor(
    readonly servers: () => readonly ServerProcess[],
    readonly send: (server: ServerProcess, lane: string, n: number, headers: Record<string, string>) => Promise<Answer>,
  ) {
    this.#running = lanes.map((lane) => this.#call(lane))
  }

  by(server: ServerProcess): number {
    return this.accepted.filter(({ by }) => by === server).length
  }

  async stop(): Promise<void> {
    this.#stopped = true
    await Promise.all(this.#running)
  }

  async #call(lane: string): Promise<void> {
    for (let n = 0; !this.#stopped; n++) {
      const headers = { 'idempotency-key': randomUUID() }
      // Refused or cut off: the same request again with its key, as a client would send it.
      for (let tried = 0; !(await this.#accept(lane, n, tried, headers)); tried++) if (this.#stopped) return
    }
  }

  async #accept(lane: string, n: number, tried: number, headers: Record<string, string>): Promise<boolean> {
    const servers = this.servers()
    const by = servers[(n + tried) % servers.length]
    if (by === undefined) throw new Error('no server')
    const answer = await this.send(by, lane, n, headers).catch(() => null)
    if (answer === null) return false
    if (answer.status === 201 || answer.status === 202) this.accepted.push({ lane, n, by, answer })
    else this.refused.push(answer)
    return answer.status < 300
  }
}

describe('this build beside the release before', () => {
  it('migrates and takes over under load: nothing is lost, done twice or out of order', {
    timeout: 120_000,
  }, async () => {
    const env = {
      DATABASE_URL: database.url,
      SPILLWAY_FORWARD_ALLOW: target.origin,
      PETITION_RATE_LIMIT_PER_HOUR: '100000',
    }
    const old = await startServer(env, { program: before.program })
    await configure(old, 'upgrade')
    let servers: readonly ServerProcess[] = [old]
    const current = (): readonly ServerProcess[] => servers
    const operations = new Callers(current, (server, lane, n, headers) =>
      submit(server, `${target.origin}/${lane}/${n}`, { queue: 'upgrade', partition: lane }, headers),
    )
    const pushes = new Callers(current, (server, lane, n, headers) =>
      push(server, [{ queue: 'upgrade', partition: lane, payload: n, transactionId: `${lane}/${n}` }], headers),
    )
    const petitions = new Callers(current, (server, lane, n, headers) =>
      submitPetition(server, { text: `${lane}/${n}`, submitter_id: randomUUID() }, headers),
    )
    const all = [operations, pushes, petitions]
    const served = async (server: ServerProcess): Promise<void> => {
      const from = all.map((callers) => callers.by(server))
      await until(
        'both kinds of servers accept work',
        () => all.every((callers, i) => callers.by(server) >= (from[i] ?? 0) + enough),
        60_000,
      )
    }

    await served(old)
    const next = await startServer(env)
    servers = [old, next]
    await Promise.all([served(old), served(next)])
    servers = [next]
    expect(await old.stop()).toEqual({ code: 0, signal: null })
    await served(next)
    await Promise.all(all.map((callers) => callers.stop()))

    // Not now (503) is an honest answer to a caller of a server that stops; an error is not.
    expect(all.flatMap(({ refused }) => refused).filter(({ status }) => status !== 503 && status !== 429)).toEqual([])
    const finished = await allFinish(
      next,
      operations.accepted.map(({ answer }) => answer.body.operationId),
    )
    expect(finished.filter(({ status }) => status !== 'completed')).toEqual([])
    const messages = await takeAll(next, 'upgrade', pushes.accepted.length)
    for (const lane of lanes) {
      const numbers = (of: Callers): number[] => of.accepted.filter((one) => one.lane === lane).map(({ n }) => n)
      const called = target.calls.flatMap(({ path }) => (path.startsWith(`/${lane}/`) ? [Number(path.slice(3))] : []))
      expect(called).toEqual(numbers(operations))
      expect(dataOf(messages.filter(({ partition }) => partition === lane))).toEqual(numbers(pushes))
    }
    const { body } = await get(next, `${petitionsPath}?state=RECEIVED&limit=1`)
    expect(body.total).toBe(petitions.accepted.length)
  })
})
