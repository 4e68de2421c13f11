import Type from 'typebox'
import { afterEach, beforeEach, describe, expect, it } from 'vitest'
import { type AdmissionAnswer, capacity, connections, halt, rate } from '../../src/index.js'
import type { Store } from '../../src/store/port.js'
import { type Bench, bench, overriding } from '../pipeline-fixture.js'

let b: Bench
beforeEach(async () => {
  b = await bench()
})
afterEach(() => b.close())

const ann = { identity: 'ann', clientAddress: '10.0.0.1' }
const count = (answers: readonly AdmissionAnswer[], kind: AdmissionAnswer['kind']): number =>
  answers.filter((answer) => answer.kind === kind).length

/** Counts calls of the store's admit. */
const counting = (calls: { admit: number }) => (store: Store) =>
  overriding(store, {
    admit: (items) => {
      calls.admit++
      return store.admit(items)
    },
  })

describe('an admission', () => {
  it('admits exactly its limit over four instances with 2,000 at once, and writes no operation', async () => {
    const calls = { admit: 0 }
    const intakes = await Promise.all(Array.from({ length: 4 }, () => b.intake({ wrap: counting(calls) })))
    const answers = await Promise.all(
      intakes.flatMap((intake) => {
        const admission = intake.admission('calls', { gates: [rate({ limit: 100, per: '1h' })] })
        return Array.from({ length: 500 }, () => admission.admit(ann, null))
      }),
    )
    expect(count(answers, 'admitted')).toBe(100)
    expect(count(answers, 'refused')).toBe(1_900)
    // Requests that arrive together share a transaction.
    expect(calls.admit).toBeLessThan(100)
    expect(await b.sql('SELECT sums[cardinality(sums)]::int AS used FROM spillway.rates')).toEqual([{ used: 100 }])
    expect(await b.sql('SELECT 1 FROM spillway.ops UNION ALL SELECT 1 FROM spillway.history')).toEqual([])
    expect(await b.audit()).toEqual([])
  })

  it('reports the remaining count, and refuses with the exhausted tier', async () => {
    const intake = await b.intake()
    const admission = intake.admission<{ tenant: string }>('calls', {
      gates: [
        rate({ limit: 5, per: '1h', name: 'hour' }),
        rate<{ tenant: string }>({ limit: 2, per: '1m', name: 'tenant', by: (_, { tenant }) => tenant }),
      ],
    })
    expect(await admission.admit(ann, { tenant: 'a' })).toMatchObject({
      kind: 'admitted',
      rate: { name: 'tenant', limit: 2, windowSeconds: 60, left: 1 },
    })
    await admission.admit(ann, { tenant: 'a' })
    expect(await admission.admit(ann, { tenant: 'a' })).toMatchObject({
      kind: 'refused',
      refusal: { code: 'rate_limited', gate: 'rate', rate: { name: 'tenant', left: 0 } },
    })
    // The refused request took nothing from the other tier.
    for (const tenant of ['b', 'b', 'c'])
      expect(await admission.admit(ann, { tenant })).toMatchObject({ kind: 'admitted' })
    expect(await admission.admit(ann, { tenant: 'd' })).toMatchObject({ refusal: { rate: { name: 'hour' } } })
  })

  it('shares a rate with operations of the same name', async () => {
    const intake = await b.intake()
    const shared = () => rate({ limit: 2, per: '1h', name: 'shared' })
    const op = intake.define('op', { body: Type.Object({}), gates: [shared()], run: () => 1 })
    const admission = intake.admission('calls', { gates: [shared()] })
    expect(await intake.submit(op, {}, { identity: 'ann' })).toMatchObject({ kind: 'done' })
    expect(await admission.admit(ann, null)).toMatchObject({ kind: 'admitted', rate: { left: 0 } })
    expect(await intake.submit(op, {}, { identity: 'ann' })).toMatchObject({ kind: 'refused' })
  })

  it('refuses a known key without the store', async () => {
    const calls = { admit: 0 }
    const intake = await b.intake({ wrap: counting(calls) })
    const admission = intake.admission('calls', { gates: [rate({ limit: 1, per: '1h' })] })
    await admission.admit(ann, null)
    await admission.admit(ann, null)
    const before = calls.admit
    expect(await admission.admit(ann, null)).toMatchObject({ refusal: { code: 'rate_limited' } })
    expect(calls.admit).toBe(before)
  })

  it('asks the store for nothing when no gate counts', async () => {
    const calls = { admit: 0 }
    const intake = await b.intake({ wrap: counting(calls) })
    const gates = [rate<string | null>({ limit: 1, per: '1h', by: (_, key) => key })]
    const admission = intake.admission<string | null>('calls', { gates })
    expect(await admission.admit(ann, null)).toEqual({ kind: 'admitted' })
    expect(calls.admit).toBe(0)
  })

  it('refuses while its scope is halted, and takes no rate then', async () => {
    const [intake, other] = await Promise.all([b.intake(), b.intake()])
    const gates = [halt(), rate({ limit: 3, per: '1h' })]
    const admission = other.admission('calls', { gates })
    await intake.halt('drill')
    // The other instance may not know yet: then the database refuses.
    expect(await admission.admit(ann, null)).toMatchObject({ refusal: { code: 'halted' } })
    await intake.resume()
    await other.refresh()
    expect(await admission.admit(ann, null)).toMatchObject({ kind: 'admitted', rate: { left: 2 } })
  })

  it('refuses while the intake drains', async () => {
    const intake = await b.intake()
    const admission = intake.admission('calls', { gates: [] })
    await intake.close()
    expect(await admission.admit(ann, null)).toMatchObject({ refusal: { code: 'draining' } })
  })

  it('needs a free name, and gates that hold nothing', async () => {
    const intake = await b.intake()
    intake.admission('calls', { gates: [] })
    expect(() => intake.admission('calls', { gates: [] })).toThrow('calls is defined already')
    expect(() => intake.admission('a b', { gates: [] })).toThrow('the name must be 1 to 100 letters')
    expect(() => intake.admission('full', { gates: [capacity({ limit: 1 })] })).toThrow('a capacity gate')
    expect(() => intake.admission('open', { gates: [connections({ perIdentity: 1, total: 1 })] })).toThrow(
      'a connections gate',
    )
  })
})
