/** Policies, known to all processes, and the registry of blocks. */
import { randomUUID } from 'node:crypto'
import type { Policy } from '@spillway/protocol/wire'
import { afterAll, afterEach, beforeAll, describe, expect, it } from 'vitest'
import type { Intake } from '../../../spillway/src/intake/intake.js'
import {
  type Bench,
  bench,
  eventually,
  type Logged,
  loggingTo,
  overriding,
} from '../../../spillway/test/pipeline-fixture.js'
import { decide } from '../../src/workloads/routing/decision.js'
import { Policies, type PoliciesOptions } from '../../src/workloads/routing/policies.js'
import { Registry } from '../../src/workloads/routing/registry.js'

const schema = '"spillway"'
/** The poll never runs, so every change that is seen came by notification. */
const never = 3_600_000

let b: Bench
let here: Intake
let there: Intake
const opened: { close(): Promise<void> }[] = []

beforeAll(async () => {
  b = await bench()
  here = await b.intake()
  there = await b.intake()
})
afterEach(async () => {
  await Promise.all(opened.splice(0).map((one) => one.close()))
  await b.sql('TRUNCATE spillway.rt_policies, spillway.rt_blocks')
  await b.sql('UPDATE spillway.rt_state SET policies = 0, blocks = 0, change = change + 1, removals = removals + 1')
})
afterAll(() => b.close())

/** Closed when the test ends. */
function opening<T extends { close(): Promise<void> }>(one: T): T {
  opened.push(one)
  return one
}

async function policiesOf(intake: Intake, options: Partial<PoliciesOptions> = {}, logged: Logged[] = []) {
  const policies = opening(new Policies({ intake, schema, log: loggingTo(logged), pollMs: never, ...options }))
  await policies.start()
  return policies
}

const policy = (id: string, provider = 'a', changes: Partial<Policy> = {}): Policy => ({
  ...{ policy_id: id, strategy: 'weighted', score: { latency_weight: 0.5, cost_weight: 0.5 } },
  providers: [
    { provider_id: provider, weight: 1, priority: 50, expected_latency_ms: 1, expected_cost: 1, enabled: true },
  ],
  ...changes,
})
/** What a process decides by this policy, as it knows it. */
const chosen = (policies: Policies, policy_id: string, tenant_id = 'acme') => {
  const decided = decide(policies.book, { request_id: randomUUID(), tenant_id, policy_id, task: { type: 'chat' } })
  return 'code' in decided ? decided.code : decided.provider_id
}

describe('policies', () => {
  it('are created and replaced, with a version that grows', async () => {
    const policies = await policiesOf(here)
    const first = await policies.put(policy('p', 'a'))
    expect(first).toMatchObject({ kind: 'created', policy: { policy_id: 'p', version: 1 } })
    expect(await policies.put(policy('p', 'b'))).toMatchObject({ kind: 'replaced', policy: { version: 2 } })
    expect(await policies.get({ policyId: 'p' })).toMatchObject({ ...policy('p', 'b'), version: 2 })
  })

  it('are decided by at once where they were put', async () => {
    const policies = await policiesOf(here)
    expect(chosen(policies, 'p')).toBe('POLICY_NOT_FOUND')
    await policies.put(policy('p', 'a'))
    expect(chosen(policies, 'p')).toBe('a')
    await policies.remove({ policyId: 'p' })
    expect(chosen(policies, 'p')).toBe('POLICY_NOT_FOUND')
  })

  it('of a tenant and of all are two, with one id', async () => {
    const policies = await policiesOf(here)
    await policies.put(policy('p', 'shared'))
    expect(await policies.put(policy('p', 'own', { tenant_id: 'acme' }))).toMatchObject({ kind: 'created' })
    expect([chosen(policies, 'p'), chosen(policies, 'p', 'other')]).toEqual(['own', 'shared'])
    expect(await policies.remove({ tenantId: 'acme', policyId: 'p' })).toBe(true)
    expect(chosen(policies, 'p')).toBe('shared')
    expect(await policies.get({ tenantId: 'acme', policyId: 'p' })).toBeNull()
  })

  it('are not there to be removed twice', async () => {
    const policies = await policiesOf(here)
    await policies.put(policy('p'))
    expect(await policies.remove({ policyId: 'p' })).toBe(true)
    expect(await policies.remove({ policyId: 'p' })).toBe(false)
  })

  it('are heard of by another process, replaced and removed ones too', async () => {
    const [mine, theirs] = [await policiesOf(here), await policiesOf(there)]
    const known = (expected: string) =>
      eventually(() => (chosen(theirs, 'p') === expected ? true : undefined), `the other process to choose ${expected}`)
    await mine.put(policy('p', 'a'))
    await known('a')
    await mine.put(policy('p', 'b'))
    await known('b')
    await mine.remove({ policyId: 'p' })
    await known('POLICY_NOT_FOUND')
  })

  it('are looked for, in case that nothing was heard', async () => {
    const theirs = await policiesOf(there, { pollMs: 20 })
    there.onNotice('rtpol', () => undefined)
    const mine = await policiesOf(here)
    await mine.put(policy('p', 'a'))
    await eventually(() => (chosen(theirs, 'p') === 'a' ? true : undefined), 'the change to be found')
    await mine.remove({ policyId: 'p' })
    await eventually(() => (chosen(theirs, 'p') === 'POLICY_NOT_FOUND' ? true : undefined), 'the removal to be found')
  })

  it('are all loaded by a process that starts, however many', async () => {
    await b.sql(
      `INSERT INTO spillway.rt_policies (tenant, id, body, change, updated_at)
       SELECT '', 'p' || n, replace($1, '#', 'p' || n)::json, s.change + n, now() FROM spillway.rt_state s, generate_series(1, 1201) n`,
      [JSON.stringify(policy('#'))],
    )
    await b.sql('UPDATE spillway.rt_state SET change = change + 1201, policies = 1201')
    const policies = await policiesOf(here)
    expect(policies.isLoaded).toBe(true)
    expect(policies.book.size).toBe(1_201)
    expect(chosen(policies, 'p1201')).toBe('a')
  })

  it('of two processes that write at once are all known to both', async () => {
    const both = [await policiesOf(here), await policiesOf(there)]
    await Promise.all(
      both.flatMap((policies, n) => Array.from({ length: 25 }, (_, i) => policies.put(policy(`p${n}-${i}`)))),
    )
    await Promise.all(both.map((policies) => policies.refresh()))
    expect(both.map((policies) => policies.book.size)).toEqual([50, 50])
  })

  it('are bounded, exactly, and can be replaced at the bound', async () => {
    const policies = await policiesOf(here, { policiesMax: 5 })
    const outcomes = await Promise.all(Array.from({ length: 12 }, (_, n) => policies.put(policy(`p${n}`))))
    expect(outcomes.filter(({ kind }) => kind === 'created')).toHaveLength(5)
    expect(outcomes.filter(({ kind }) => kind === 'full')).toHaveLength(7)
    const [there] = (await policies.list({ limit: 1, bytesMax: 1_000_000 })).rows
    expect(await policies.put(policy(there?.policy_id ?? ''))).toMatchObject({ kind: 'replaced' })
    await policies.remove({ policyId: there?.policy_id ?? '' })
    expect(await policies.put(policy('new'))).toMatchObject({ kind: 'created' })
  })

  it('are listed page by page', async () => {
    const policies = await policiesOf(here)
    for (const id of ['c', 'a', 'b']) await policies.put(policy(id))
    await policies.put(policy('a', 'x', { tenant_id: 'acme' }))
    const name = (p: { tenant_id?: string; policy_id: string } | undefined) => `${p?.tenant_id ?? ''}/${p?.policy_id}`
    const seen: string[] = []
    for (let after: { tenantId?: string | undefined; policyId: string } | undefined; ; ) {
      const [one] = (await policies.list({ limit: 1, bytesMax: 1_000_000 }, { after })).rows
      if (one === undefined) break
      seen.push(name(one))
      after = { tenantId: one.tenant_id, policyId: one.policy_id }
    }
    expect(seen).toEqual(['/a', '/b', '/c', 'acme/a'])
    expect((await policies.list({ limit: 9, bytesMax: 1_000_000 }, { tenantId: 'acme' })).rows.map(name)).toEqual([
      'acme/a',
    ])
    expect((await policies.list({ limit: 9, bytesMax: 1_000_000 }, { tenantId: null })).rows.map(name)).toEqual([
      '/a',
      '/b',
      '/c',
    ])
  })

  it('that cannot be understood do not keep the others back', async () => {
    const logged: Logged[] = []
    const policies = await policiesOf(here, {}, logged)
    await b.sql(`SELECT spillway.rt_policy_put('', 'odd', '{"of":"the future"}', 10)`)
    await policies.put(policy('p', 'a'))
    expect(chosen(policies, 'p')).toBe('a')
    expect(logged.filter(({ level }) => level === 'error').map(({ fields }) => fields.policy)).toEqual(['odd'])
  })

  it('are those of a restored database', async () => {
    const policies = await policiesOf(here)
    await policies.put(policy('old', 'a'))
    await b.sql(`DELETE FROM spillway.rt_policies`)
    await b.sql(`UPDATE spillway.rt_state SET change = 0`)
    await b.sql(`SELECT spillway.rt_policy_put('', 'restored', $1, 10)`, [JSON.stringify(policy('restored', 'b'))])
    await policies.refresh()
    expect([chosen(policies, 'old'), chosen(policies, 'restored')]).toEqual(['POLICY_NOT_FOUND', 'b'])
  })

  it('stay as they were while the store is away, which is said once', async () => {
    let isAway = false
    const logged: Logged[] = []
    const intake = await b.intake({
      wrap: (store) =>
        overriding(store, {
          read: (text, values) => (isAway ? Promise.reject(new Error('away')) : store.read(text, values)),
        }),
    })
    const policies = await policiesOf(intake, {}, logged)
    await policies.put(policy('p', 'a'))
    isAway = true
    await policies.refresh()
    await policies.refresh()
    expect(chosen(policies, 'p')).toBe('a')
    expect(logged.map(({ level }) => level)).toEqual(['warn'])
    isAway = false
    await policies.refresh()
    expect(logged.map(({ level }) => level)).toEqual(['warn', 'info'])
  })
})

describe('the registry', () => {
  const block = (type: string, version = '1.0.0') => ({ type, version, status: 'active' as const })
  const registry = (blocksMax?: number) => new Registry({ intake: here, schema, ...(blocksMax && { blocksMax }) })

  it('keeps a block as it was created', async () => {
    const full = {
      ...block('http'),
      ...{ description: 'd', input_schema: { type: 'object' }, capabilities: ['x'], metadata: { n: 1 } },
    }
    const created = await registry().create(full)
    expect(created).toMatchObject({ kind: 'created', block: full })
    expect(await registry().get(full)).toEqual('block' in created ? created.block : null)
  })

  it('creates a block once, of however many at once', async () => {
    const outcomes = await Promise.all(Array.from({ length: 8 }, () => registry().create(block('once'))))
    expect(outcomes.map(({ kind }) => kind).sort()).toEqual(['created', ...Array.from({ length: 7 }, () => 'exists')])
  })

  it('puts a block whether it exists or not, and keeps its creation time', async () => {
    const first = await registry().put(block('b'))
    const second = await registry().put({ ...block('b'), status: 'deprecated' })
    expect([first.kind, second.kind]).toEqual(['created', 'replaced'])
    const found = await registry().get(block('b'))
    expect(found?.status).toBe('deprecated')
    expect(found?.created_at).toBe('block' in first ? first.block.created_at : null)
  })

  it('removes a block once', async () => {
    await registry().create(block('gone'))
    expect(await registry().remove(block('gone'))).toBe(true)
    expect(await registry().remove(block('gone'))).toBe(false)
    expect(await registry().get(block('gone'))).toBeNull()
  })

  it('lists by type, page by page', async () => {
    for (const [type, version] of [
      ['b', '1.0.0'],
      ['a', '2.0.0'],
      ['a', '1.0.0'],
      ['a', '1.0.1'],
    ] as const) {
      await registry().create(block(type, version))
    }
    const names = async (limit: number, filter?: Parameters<Registry['list']>[1]) =>
      (await registry().list({ limit, bytesMax: 1_000_000 }, filter)).rows.map(
        ({ type, version }) => `${type}@${version}`,
      )
    expect(await names(2)).toEqual(['a@1.0.0', 'a@1.0.1'])
    expect(await names(2, { after: block('a', '1.0.1') })).toEqual(['a@2.0.0', 'b@1.0.0'])
    expect(await names(9, { type: 'a', after: block('a', '1.0.0') })).toEqual(['a@1.0.1', 'a@2.0.0'])
    expect(await names(9, { type: 'none' })).toEqual([])
  })

  it('is bounded', async () => {
    const outcomes = await Promise.all(Array.from({ length: 9 }, (_, n) => registry(4).put(block(`t${n}`))))
    expect(outcomes.filter(({ kind }) => kind === 'created')).toHaveLength(4)
    expect(outcomes.filter(({ kind }) => kind === 'full')).toHaveLength(5)
    expect(await registry(4).put(block('t0'))).toMatchObject({ kind: 'replaced' })
  })

  it('is bounded exactly: one that comes while the last place is being taken waits to see', async () => {
    const late = await here.transaction(async (tx) => {
      await tx.query(`SELECT spillway.rt_block_put('first', '1', '{}', false, 1)`)
      const waiting = registry(1).put(block('second'))
      await eventually(
        async () =>
          (await b.sql(`SELECT FROM pg_stat_activity WHERE datname = current_database() AND wait_event_type = 'Lock'`))
            .length > 0,
        'the second one to wait',
      )
      return { waiting }
    })
    expect(await late.waiting).toMatchObject({ kind: 'full' })
  })
})
