import { describe, expect, it } from 'vitest'
import { checkList, digestOf, lockKey, pendingSteps, type Recorded, type SqlModule } from './migrate.js'

const tables = (...ids: string[]): SqlModule['tables'] => ids.map((id) => ({ id, sql: `SELECT '${id}'` }))
const module = (name: string, ids: string[], functions = 'SELECT 1'): SqlModule => ({
  name,
  tables: tables(...ids),
  functions: [{ name: 'all', sql: functions }],
})
const recordOf = (of: SqlModule, release = '1.2.3'): Recorded[] => [
  ...of.tables.map(({ id, sql }) => ({ owner: of.name, id, checksum: digestOf(sql), release })),
  { owner: of.name, id: 'functions', checksum: digestOf(of.functions[0]?.sql ?? ''), release },
]
const idsOf = (recorded: readonly Recorded[], modules: readonly SqlModule[], release = '1.2.3'): string[] =>
  pendingSteps(recorded, modules, release).map(({ owner, id }) => `${owner} ${id}`)

describe('checkList', () => {
  it('requires 0001, 0002, … and each owner once', () => {
    expect(() => checkList([module('core', ['0001-a', '0002-b']), module('more', ['0001-c'])])).not.toThrow()
    for (const ids of [['0002-a'], ['0001-a', '0003-b'], ['0001-a', '0001-b']]) {
      expect(() => checkList([module('core', ids)])).toThrow(expect.objectContaining({ code: 'bad_list' }))
    }
    expect(() => checkList([module('core', []), module('core', [])])).toThrow(
      expect.objectContaining({ code: 'bad_list' }),
    )
  })
})

describe('pendingSteps', () => {
  const core = module('core', ['0001-a', '0002-b'])
  const more = module('more', ['0001-c'])

  it('is what the record lacks, per owner, tables before functions', () => {
    expect(idsOf([], [core, more])).toEqual([
      'core 0001-a',
      'core 0002-b',
      'core functions',
      'more 0001-c',
      'more functions',
    ])
    expect(idsOf(recordOf(core), [core, more])).toEqual(['more 0001-c', 'more functions'])
    expect(idsOf([...recordOf(core), ...recordOf(more)], [core, more])).toEqual([])
  })

  it('ignores the tables of workloads that are off', () => {
    expect(idsOf([...recordOf(core), ...recordOf(more)], [core])).toEqual([])
  })

  it('installs changed functions again, but never those of an older release', () => {
    const changed = module('core', ['0001-a', '0002-b'], 'SELECT 2')
    expect(idsOf(recordOf(core), [changed])).toEqual(['core functions'])
    expect(idsOf(recordOf(core), [changed], '1.3.0')).toEqual(['core functions'])
    expect(idsOf(recordOf(core), [changed], '1.2.2')).toEqual([])
    expect(idsOf(recordOf(core, '1.10.0'), [changed], '1.9.9')).toEqual([])
  })

  it('finds a newer schema, an edited step and a missing one', () => {
    const newer = module('core', ['0001-a', '0002-b', '0003-c'])
    expect(() => pendingSteps(recordOf(newer), [core])).toThrow(expect.objectContaining({ code: 'newer' }))
    const edited = recordOf(core).map((row) => (row.id === '0001-a' ? { ...row, checksum: 'x' } : row))
    expect(() => pendingSteps(edited, [core])).toThrow(expect.objectContaining({ code: 'edited' }))
    const gap = recordOf(core).filter(({ id }) => id !== '0001-a')
    expect(() => pendingSteps(gap, [core])).toThrow(expect.objectContaining({ code: 'edited' }))
  })
})

describe('lockKey', () => {
  it('is a bigint that differs by schema', () => {
    expect(lockKey('a')).not.toBe(lockKey('b'))
    expect(BigInt.asIntN(64, BigInt(lockKey('a')))).toBe(BigInt(lockKey('a')))
  })
})
