import { chmod, mkdtemp, rm } from 'node:fs/promises'
import { tmpdir } from 'node:os'
import { join } from 'node:path'
import { startEmbedded } from '@spillway/embedded-postgres'
import Type from 'typebox'
import { afterEach, beforeEach, describe, expect, it } from 'vitest'
import { type ConnectionPool, connections, type Permit, postgres } from '../../src/index.js'
import type { Intake } from '../../src/intake/intake.js'
import { openIntake } from '../../src/intake/open-intake.js'
import type { Store } from '../../src/store/port.js'
import { type Bench, bench, eventually, overriding, signal } from '../pipeline-fixture.js'

let b: Bench
beforeEach(async () => {
  b = await bench()
})
afterEach(() => b.close())

const away = () => Object.assign(new Error('the connection was lost'), { code: 'unavailable' })
const name = 'streams'

/** What the store counts, by identity. */
async function counted(sql: Bench['sql'] = b.sql): Promise<Record<string, number>> {
  const rows = await sql<{ identity: string; held: number }>(
    'SELECT identity, sum(held)::int AS held FROM spillway.connections GROUP BY identity',
  )
  return Object.fromEntries(rows.map(({ identity, held }) => [identity, held]))
}

const counts = (what: Record<string, number>, ms?: number) =>
  eventually(
    async () => (JSON.stringify(sorted(await counted())) === JSON.stringify(sorted(what)) ? true : undefined),
    `the store to count ${JSON.stringify(what)}`,
    ms,
  )
const sorted = (what: Record<string, number>) => Object.entries(what).sort(([a], [z]) => (a < z ? -1 : 1))

async function granted(taken: ReturnType<ConnectionPool['take']>): Promise<Permit> {
  const outcome = await taken
  if (typeof outcome === 'string') throw new Error(`expected a place, not ${outcome}`)
  return outcome
}

/** The others have given it up; it notices with its next heartbeat. */
async function giveUp(intake: Intake): Promise<void> {
  const before = intake.instance
  await b.sql('SELECT spillway.worker_forget($1)', [before])
  await intake.refresh()
  expect(intake.instance).not.toBe(before)
}

describe('places of a pool', () => {
  it.each([
    { what: 'in all', perIdentity: 1_000, total: 137, expected: 137 },
    { what: 'per identity', perIdentity: 3, total: 1_000, expected: 60 },
  ])(
    'are granted to exactly as many as may, $what, of a thousand at once on four instances',
    async (limits) => {
      const { perIdentity, total, expected } = limits
      const intakes = await Promise.all([1, 2, 3, 4].map(() => b.intake()))
      const pools = intakes.map((intake) => intake.pool({ name, perIdentity, total }))
      const taken = await Promise.all(
        Array.from({ length: 1_000 }, (_, i) => pools[i % 4]?.take(`user ${Math.floor(i / 4) % 20}`)),
      )
      expect(taken.filter((outcome) => typeof outcome === 'object')).toHaveLength(expected)
      const held = await counted()
      expect(Object.values(held).reduce((sum, n) => sum + n, 0)).toBe(expected)
      expect(Math.max(...Object.values(held))).toBeLessThanOrEqual(perIdentity)
    },
    30_000,
  )

  it('say which limit was met, the identity’s own before that of all', async () => {
    const pool = (await b.intake()).pool({ name, perIdentity: 1, total: 2 })
    await granted(pool.take('ann'))
    expect(await pool.take('ann')).toBe('identity_full')
    await granted(pool.take('bob'))
    expect(await pool.take('cid')).toBe('pool_full')
    expect(await pool.take('ann')).toBe('identity_full')
  })

  it('are free again when they are released, once however often that is', async () => {
    const pool = (await b.intake()).pool({ name, perIdentity: 2, total: 9 })
    const [first] = [await granted(pool.take('ann')), await granted(pool.take('ann'))]
    first.release()
    first.release()
    await counts({ ann: 1 })
    await granted(pool.take('ann'))
    expect(await pool.take('ann')).toBe('identity_full')
  })

  it('are counted over all instances with their heartbeats', async () => {
    const [one, two] = [await b.intake(), await b.intake()]
    const pools = [one, two].map((intake) => intake.pool({ name, perIdentity: 5, total: 9 }))
    await Promise.all(pools.map((pool) => granted(pool.take('ann'))))
    await eventually(() => (pools.every((pool) => pool.held === 2) ? true : undefined), 'both to know of both')
    expect(pools[0]?.total).toBe(9)
  })

  it('are those of the gates that name the pool', async () => {
    const intake = await b.intake()
    const pool = intake.pool({ name, perIdentity: 1, total: 1 })
    const gates = [connections({ perIdentity: 1, total: 1, pool: name })]
    const op = intake.define('op', { body: Type.Object({}), gates, run: () => 1 })
    const permit = await granted(pool.take('ann'))
    expect(await intake.submit(op, {}, { identity: 'ann' })).toMatchObject({ refusal: { code: 'connection_limit' } })
    permit.release()
    await counts({})
    expect(await intake.submit(op, {}, { identity: 'ann' })).toMatchObject({ kind: 'done' })
  })

  it('are kept for any identity that is a text', async () => {
    const pool = (await b.intake()).pool({ name, perIdentity: 1, total: 9 })
    for (const identity of ['', '{"a",\\', '日本', '\ud800']) (await granted(pool.take(identity))).release()
    await counts({})
    await expect(pool.take('a\0b')).rejects.toThrow(RangeError)
  })
})

/** Of the changes, `lose` says which are not answered, and whether they happen. */
const losing =
  (lose: (n: number) => 'before' | 'after' | null) =>
  (store: Store): Store => {
    let n = 0
    return overriding(store, {
      changeConnections: async (worker, pool, change) => {
        const lost = lose(n++)
        if (lost === 'before') throw away()
        const outcomes = await store.changeConnections(worker, pool, change)
        if (lost === 'after') throw away()
        return outcomes
      },
    })
  }

describe('an answer that was lost', () => {
  it('of a taken permit: no process holds it', async () => {
    const intake = await b.intake({ wrap: losing((n) => (n === 0 ? 'after' : null)) })
    const pool = intake.pool({ name, perIdentity: 1, total: 1 })
    await expect(pool.take('ann')).rejects.toThrow('lost')
    expect(await counted()).toEqual({ ann: 1 })
    await counts({})
  })

  it('of a place that was given back: it is not given twice', async () => {
    const intake = await b.intake({ wrap: losing((n) => (n === 2 ? 'after' : null)) })
    const pool = intake.pool({ name, perIdentity: 9, total: 9 })
    const first = await granted(pool.take('ann'))
    await granted(pool.take('ann'))
    first.release()
    await eventually(() => (b.logged.some((l) => l.message.includes('retrying')) ? true : undefined), 'the fault')
    await granted(pool.take('bob'))
    expect(await counted()).toEqual({ ann: 1, bob: 1 })
  })

  it('of one that is carried out later yet: it comes too late', async () => {
    const late = signal()
    const done = signal<unknown>()
    let first = true
    const intake = await b.intake({
      wrap: (store) =>
        overriding(store, {
          changeConnections: (worker, pool, change) => {
            if (!first) return store.changeConnections(worker, pool, change)
            first = false
            void late.promise.then(async () => done.fire(await store.changeConnections(worker, pool, change)))
            return Promise.reject(away())
          },
        }),
    })
    const pool = intake.pool({ name, perIdentity: 9, total: 9 })
    await expect(pool.take('ann')).rejects.toThrow('lost')
    await granted(pool.take('bob'))
    late.fire()
    expect(await done.promise).toBeNull()
    expect(await counted()).toEqual({ bob: 1 })
  })

  it('of a place that is given back, again and again: it is given back in the end', async () => {
    const intake = await b.intake({ wrap: losing((n) => (n > 0 && n < 4 ? 'before' : null)) })
    const permit = await granted(intake.pool({ name, perIdentity: 1, total: 1 }).take('ann'))
    permit.release()
    await counts({})
  })
})

describe('a process that lost its lease', () => {
  it('has lost its permits, and releasing an old one releases no new one', async () => {
    const intake = await b.intake()
    const pool = intake.pool({ name, perIdentity: 9, total: 9 })
    const [lost, other] = [await granted(pool.take('ann')), await granted(pool.take('ann'))]
    await giveUp(intake)
    expect(await counted()).toEqual({})
    lost.release()
    const kept = await granted(pool.take('ann'))
    other.release()
    const more = await granted(pool.take('ann'))
    expect(await counted()).toEqual({ ann: 2 })
    kept.release()
    more.release()
    await counts({})
  })

  it('does not get a place that it took under its old id', async () => {
    const asked = signal()
    const answer = signal()
    const intake = await b.intake({
      wrap: (store) =>
        overriding(store, {
          changeConnections: async (worker, pool, change) => {
            const outcomes = await store.changeConnections(worker, pool, change)
            asked.fire()
            await answer.promise
            return outcomes
          },
        }),
    })
    const taken = intake.pool({ name, perIdentity: 1, total: 1 }).take('ann')
    const outcome = expect(taken).rejects.toThrow('enlisted again')
    await asked.promise
    await giveUp(intake)
    answer.fire()
    await outcome
  })

  it('leaves its places to the others, when it was killed, as soon as its lease has run out', async () => {
    const living = await b.intake()
    const pool = living.pool({ name, perIdentity: 1, total: 1 })
    const dead = '00000000-0000-4000-8000-000000000001'
    await living.store.enlist(dead, 'dead', 1)
    await b.sql("INSERT INTO spillway.connections (pool, identity, worker, held) VALUES ($1, 'ann', $2, 1)", [
      name,
      dead,
    ])
    await eventually(async () => (typeof (await pool.take('ann')) === 'object' ? true : undefined), 'the place')
  })
})

/** Numbers that look random and are the same each time. */
function dice(seed: number): (below: number) => number {
  let state = seed
  return (below) => {
    state = (Math.imul(state, 1_664_525) + 1_013_904_223) >>> 0
    return Math.floor((state / 2 ** 32) * below)
  }
}

interface Open {
  permit: Permit
  identity: string
  intake: Intake
  instance: string
}

/** Takes and releases at random; answers what must be held. */
async function play(
  intakes: readonly Intake[],
  steps: number,
  seed: number,
  meanwhile: (step: number, roll: (below: number) => number) => Promise<void> = async () => undefined,
): Promise<Record<string, number>> {
  const roll = dice(seed)
  const pools = intakes.map((intake) => intake.pool({ name, perIdentity: 6, total: 40 }))
  const open: Open[] = []
  const asked: Promise<void>[] = []
  for (let step = 0; step < steps; step++) {
    const at = roll(intakes.length)
    const [intake, pool] = [intakes[at], pools[at]]
    if (intake === undefined || pool === undefined) throw new RangeError(`no intake ${at}`)
    if (roll(5) < 2) open.splice(roll(open.length), 1)[0]?.permit.release()
    else {
      const identity = `user ${roll(12)}`
      const taking = pool.take(identity).then(
        (outcome) => {
          if (typeof outcome === 'object') open.push({ permit: outcome, identity, intake, instance: intake.instance })
        },
        (fault: unknown) => expect(fault).toHaveProperty('message'),
      )
      asked.push(taking)
    }
    if (roll(4) === 0) await Promise.all(asked.splice(0))
    await meanwhile(step, roll)
  }
  await Promise.all(asked)
  const held: Record<string, number> = {}
  for (const { identity, intake, instance } of open) {
    if (intake.instance === instance) held[identity] = (held[identity] ?? 0) + 1
  }
  return held
}

describe('a thousand takes and releases at random', () => {
  it('leave exactly the open permits counted, whichever answers are lost and whichever process loses its lease', async () => {
    const roll = dice(7)
    const lose = () => (['before', 'after', null, null, null, null, null, null] as const)[roll(8)] ?? null
    const intakes = await Promise.all([1, 2, 3].map(() => b.intake({ wrap: losing(lose) })))
    const held = await play(intakes, 1_000, 11, async (_, rolled) => {
      const victim = intakes[rolled(120)]
      if (victim !== undefined) await giveUp(victim)
    })
    expect(Object.keys(held).length).toBeGreaterThan(0)
    await counts(held, 15_000)
  }, 60_000)
})

describe('a database that is killed', () => {
  it('counts exactly the open ones after it is back', async () => {
    const dir = await mkdtemp(join(tmpdir(), 'spillway-pool-'))
    await chmod(dir, 0o755)
    const log = { info: () => undefined, warn: () => undefined, error: () => undefined }
    const server = await startEmbedded({ dataDir: join(dir, 'data'), log, settings: { min_wal_size: '80MB' } })
    const intakes: Intake[] = []
    try {
      for (const _ of [1, 2]) intakes.push(await openIntake({ store: postgres({ url: server.url }) }))
      const killed = server.pid
      const held = await play(intakes, 400, 3, async (step) => {
        if (step === 150) process.kill(killed, 'SIGKILL')
        if (step === 250) await eventually(() => (server.pid !== killed ? true : undefined), 'the restart', 30_000)
      })
      const looker = intakes[0]
      const sql = async <Row extends Record<string, unknown>>(text: string) =>
        (await looker?.read<Row>(text))?.rows ?? []
      await eventually(
        async () => {
          const now = await counted(sql).catch(() => null)
          return now !== null && JSON.stringify(sorted(now)) === JSON.stringify(sorted(held)) ? true : undefined
        },
        `the store to count ${JSON.stringify(held)}`,
        30_000,
      )
    } finally {
      await Promise.all(intakes.map((intake) => intake.close()))
      await server.stop()
      await rm(dir, { recursive: true, force: true })
    }
  }, 90_000)
})
