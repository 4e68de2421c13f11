import { describe, expect, it } from 'vitest'
import { checkList, checksumOf, compare, lockKey, type Migration } from './migrate.js'

const migration = (version: number, sql = 'SELECT 1'): Migration => ({ version, name: `m${version}`, sql })
const record = (of: Migration) => ({ version: of.version, name: of.name, checksum: checksumOf(of) })

describe('checkList', () => {
  it('asks for 1, 2, 3, …', () => {
    expect(() => checkList([migration(1), migration(2)])).not.toThrow()
    for (const list of [[migration(2)], [migration(1), migration(3)], [migration(1), migration(1)]]) {
      expect(() => checkList(list)).toThrow(expect.objectContaining({ code: 'bad_list' }))
    }
  })
})

describe('compare', () => {
  const list = [migration(1), migration(2)]

  it('accepts a record that is a beginning of the list', () => {
    expect(() => compare([], list)).not.toThrow()
    expect(() => compare(list.map(record), list)).not.toThrow()
  })

  it('finds a newer schema, an edited migration and a missing one', () => {
    expect(() => compare([...list, migration(3)].map(record), list)).toThrow(expect.objectContaining({ code: 'newer' }))
    expect(() => compare([record(migration(1, 'SELECT 2'))], list)).toThrow(expect.objectContaining({ code: 'edited' }))
    expect(() => compare([record(migration(2))], list)).toThrow(expect.objectContaining({ code: 'edited' }))
  })
})

describe('lockKey', () => {
  it('is a bigint that differs by schema', () => {
    expect(lockKey('a')).not.toBe(lockKey('b'))
    expect(BigInt.asIntN(64, BigInt(lockKey('a')))).toBe(BigInt(lockKey('a')))
  })
})
