import { describe, expect, it } from 'vitest'
import { planFaults } from './plan.js'
import { behaviourOf, laneKinds, lanesOf, usualTemper } from './workload.js'

const options = { seed: 3, seconds: 60, kills: 200, slots: 6, leaseMs: 3_000 }
const isKill = ({ kind }: { kind: string }): boolean => ['kill', 'vanish', 'postgres', 'backend'].includes(kind)

describe('the plan', () => {
  it('is the same for the same seed, and another for another', () => {
    expect(planFaults(options)).toEqual(planFaults(options))
    expect(planFaults(options)).not.toEqual(planFaults({ ...options, seed: 4 }))
  })

  it.each([1, 7, 60, 200])('has %i kills when so many are asked for, some of PostgreSQL', (kills) => {
    const plan = planFaults({ ...options, kills })
    expect(plan.filter(isKill)).toHaveLength(kills)
    const ofPostgres = plan.filter(({ kind }) => kind === 'postgres' || kind === 'backend')
    expect(ofPostgres).toHaveLength(Math.max(1, Math.round(kills * 0.05)))
  })

  it('plays every kind of fault, however few there are', () => {
    const kinds = new Set(planFaults({ ...options, kills: 1 }).map(({ kind }) => kind))
    for (const kind of ['pause', 'term', 'cut', 'delay', 'half-open', 'black-hole']) expect(kinds).toContain(kind)
  })

  it('is in order of time, within its time, and hits only existing slots', () => {
    const plan = planFaults(options)
    expect(plan.map(({ atMs }) => atMs)).toEqual(plan.map(({ atMs }) => atMs).sort((a, b) => a - b))
    for (const { atMs, victim } of plan) {
      expect(atMs).toBeLessThanOrEqual(options.seconds * 1_000)
      expect(victim).toBeGreaterThanOrEqual(0)
      expect(victim).toBeLessThan(options.slots)
    }
  })

  it('stops processes for longer than their lease', () => {
    const pauses = planFaults(options).filter(({ kind }) => kind === 'pause')
    expect(pauses.length).toBeGreaterThan(0)
    for (const { forMs } of pauses) expect(forMs).toBeGreaterThan(options.leaseMs)
  })

  it.each([8, 60, 200])('aims most of %i kills, whatever the seed, and leaves some to any moment', (kills) => {
    for (let seed = 0; seed < 50; seed++) {
      const ofProcesses = planFaults({ ...options, seed, kills }).filter(
        ({ kind }) => kind === 'kill' || kind === 'vanish',
      )
      const aimed = ofProcesses.filter((fault) => fault.aimed).length
      expect(aimed / kills).toBeGreaterThanOrEqual(0.75)
      expect(aimed).toBeLessThan(kills)
    }
  })
})

describe('the workload', () => {
  it('is the same for the same seed, lane and number', () => {
    const [lane] = lanesOf(1)
    if (lane === undefined) throw new Error('no lane')
    expect(behaviourOf(1, lane, 5)).toEqual(behaviourOf(1, lane, 5))
    expect(behaviourOf(1, lane, 5).token).not.toBe(behaviourOf(1, lane, 6).token)
  })

  it('has every kind of lane, and in them slow, failing and poisoned operations, direct and queued', () => {
    const lanes = lanesOf(laneKinds)
    expect(new Set(lanes.map((lane) => lane.name.replace(/-\d+$/, ''))).size).toBe(laneKinds)
    const all = lanes.flatMap((lane) => Array.from({ length: 100 }, (_, n) => behaviourOf(1, lane, n)))
    expect(all.some((b) => b.runMs >= usualTemper.slowMs[0])).toBe(true)
    expect(all.some((b) => b.failures > 0)).toBe(true)
    expect(all.some((b) => b.poison)).toBe(true)
    expect(all.some((b) => b.cutAfterMs !== null)).toBe(true)
    expect(new Set(all.map((b) => b.prefer)).size).toBe(3)
  })

  it('fails nothing that is applied at once: there is no second attempt at that', () => {
    for (const lane of lanesOf(1, ['apply'])) {
      for (let n = 1; n < 300; n++) expect(behaviourOf(1, lane, n)).toMatchObject({ failures: 0, poison: false })
    }
  })
})
