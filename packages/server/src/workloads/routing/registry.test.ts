import { describe, expect, it } from 'vitest'
import { checkBlock } from './registry.js'

const given = { type: 'http', version: '1.0.0' }
const faults = (...args: Parameters<typeof checkBlock>) => {
  const checked = checkBlock(...args)
  return checked.ok ? [] : checked.errors.map(({ path }) => path)
}

describe('a block', () => {
  it('is active unless it says otherwise', () => {
    expect(checkBlock(given)).toEqual({ ok: true, block: { ...given, status: 'active' } })
    expect(checkBlock({ ...given, status: 'deprecated' })).toMatchObject({ block: { status: 'deprecated' } })
  })

  it.each([['1'], ['1.2'], ['1.2.3'], ['1.2.3-rc.1'], ['1.2.3+build-7'], ['1.2.3-a+b']])(
    'may have version %s',
    (version) => {
      expect(faults({ ...given, version })).toEqual([])
    },
  )

  it.each([[''], ['v1'], ['1.'], ['1.2.3.4'], ['1.2.3-'], ['latest'], [`1.0.0-${'a'.repeat(64)}`]])(
    'may not have version %j',
    (version) => {
      // A value that is both too long and malformed has two faults at the same path.
      expect(new Set(faults({ ...given, version }))).toEqual(new Set(['/version']))
    },
  )

  it.each([
    ['an unknown member', { ...given, extra: 1 }, ['/extra']],
    ['a status of its own', { ...given, status: 'new' }, ['/status']],
    ['an input schema that is no object', { ...given, input_schema: [] }, ['/input_schema']],
    ['an input schema that is too large', { ...given, input_schema: { a: 'x'.repeat(65_536) } }, ['/input_schema']],
    ['metadata that is too large', { ...given, metadata: { a: 'ü'.repeat(32_768) } }, ['/metadata']],
    ['one capability twice', { ...given, capabilities: ['a', 'b', 'a'] }, ['/capabilities/2']],
    ['no object', 'block', ['']],
  ])('is refused with %s', (_, value, paths) => {
    expect(faults(value)).toEqual(paths)
  })

  it('takes its name from the path, and may repeat it but not contradict it', () => {
    expect(checkBlock({ description: 'd' }, given)).toEqual({
      ok: true,
      block: { ...given, description: 'd', status: 'active' },
    })
    expect(faults({ ...given }, given)).toEqual([])
    expect(faults({ type: 'other', version: '2' }, given)).toEqual(['/type', '/version'])
  })
})
