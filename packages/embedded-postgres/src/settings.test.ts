import { describe, expect, it } from 'vitest'
import { serverSettings, toArguments, walSizes } from './settings.js'

const GIB = 1024 ** 3
const machine = { port: 5000, freeBytes: 100 * GIB, totalMemoryBytes: 8 * GIB }

describe('walSizes', () => {
  it('never keeps more than a tenth of the free disk, above the smallest that PostgreSQL takes', () => {
    const bytes = (size: string) => Number.parseInt(size, 10) * (size.endsWith('GB') ? GIB : 1024 ** 2)
    for (const free of [5, 19, 20, 39, 40, 1000]) {
      expect(bytes(walSizes(free * GIB).max)).toBeLessThanOrEqual((free * GIB) / 9.7)
    }
    expect(walSizes(0)).toEqual({ min: '80MB', max: '256MB' })
    expect(walSizes(80 * GIB)).toEqual({ min: '2GB', max: '4GB' })
  })
})

describe('serverSettings', () => {
  it('takes overrides, but none that would break durability or the starter', () => {
    const settings = serverSettings({
      ...machine,
      overrides: { max_connections: '7', fsync: 'off', synchronous_commit: 'off', port: '1', listen_addresses: '*' },
    })
    expect(settings).toMatchObject({
      max_connections: '7',
      fsync: 'on',
      synchronous_commit: 'on',
      port: '5000',
      listen_addresses: '127.0.0.1',
    })
  })

  it('takes less memory on a small machine', () => {
    expect(serverSettings(machine).shared_buffers).toBe('256MB')
    expect(serverSettings({ ...machine, totalMemoryBytes: 2 * GIB }).shared_buffers).toBe('128MB')
  })

  it('becomes arguments that need no shell', () => {
    expect(toArguments({ log_line_prefix: '%m [%p] ' })).toEqual(['-c', 'log_line_prefix=%m [%p] '])
  })
})
