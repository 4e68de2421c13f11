import { describe, expect, it } from 'vitest'
import { parseOptions, UsageError } from './options.js'

describe('the command line', () => {
  it('takes all options', () => {
    const line =
      '--seed 9 --seconds 60 --kills 200 --servers 2 --workers 3 --lanes 40 --rate 300 --lease 4 --keep --report x.json'
    expect(parseOptions(line.split(' '))).toEqual({
      ...{ seed: 9, seconds: 60, kills: 200, servers: 2, workers: 3, lanes: 40, rate: 300, leaseMs: 4_000 },
      ...{ keep: true, breakage: null, routing: false, streams: null, hostile: null, reportFile: 'x.json' },
    })
  })

  it('makes up a seed when none is given', () => {
    expect(parseOptions([])?.seed).toEqual(expect.any(Number))
  })

  it('is shorter with --quick, and other options still apply', () => {
    const quick = parseOptions(['--quick', '--kills', '3'])
    expect(quick?.kills).toBe(3)
    expect(quick?.seconds).toBeLessThan(parseOptions([])?.seconds ?? 0)
  })

  it('takes the overloads of the router, and where the report goes', () => {
    expect(parseOptions(['--routing', '--report', 'x.json'])).toMatchObject({ routing: true, reportFile: 'x.json' })
  })

  it('takes streams, fewer of them with --quick', () => {
    const [usual, quick] = [parseOptions(['--streams', '--seed', '5']), parseOptions(['--streams', '--quick'])]
    expect(usual).toMatchObject({ streams: 500, seed: 5 })
    expect(quick?.streams).toBeLessThan(usual?.streams ?? 0)
    expect(parseOptions([])?.streams).toBeNull()
  })

  it('takes hostile callers, fewer of them with --quick', () => {
    expect(parseOptions(['--hostile'])?.hostile).toEqual({ quick: false })
    expect(parseOptions(['--hostile', '--quick'])?.hostile).toEqual({ quick: true })
  })

  it.each([
    ['--routing', '--kills', '3'],
    ['--streams', '--rate', '3'],
    ['--streams', '--routing'],
    ['--hostile', '--streams'],
    ['--hostile', '--seed', '5'],
    ['--seconds', '0'],
    ['--kills', '1.5'],
    ['--rate', 'fast'],
    ['--break', 'everything'],
    ['--what'],
  ])('refuses %s %s', (...args) => {
    expect(() => parseOptions(args)).toThrow(UsageError)
  })

  it('shows its help', () => {
    expect(parseOptions(['--help'])).toBeNull()
  })
})
