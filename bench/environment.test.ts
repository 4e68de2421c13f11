import { describe, expect, it } from 'vitest'
import { busyPercentOf, type Environment, mountOf, publishingFault } from './environment.js'
import { isNewEnough } from './peer-node.js'
import { parseCpuTime } from './process-usage.js'

describe('mountOf', () => {
  const mounts = ['/dev/vda / ext4 rw 0 0', 'tmpfs /tmp tmpfs rw 0 0', '/dev/vdb /tmp/data xfs rw 0 0', ''].join('\n')

  it('finds the mount that is nearest above', () => {
    expect(mountOf('/tmp/data/x', mounts)).toEqual({ device: '/dev/vdb', type: 'xfs' })
    expect(mountOf('/tmp/other', mounts)).toEqual({ device: 'tmpfs', type: 'tmpfs' })
    expect(mountOf('/srv', mounts)).toEqual({ device: '/dev/vda', type: 'ext4' })
  })

  it('does not take a folder for another that its name begins with', () => {
    expect(mountOf('/tmp/database', mounts)).toEqual({ device: 'tmpfs', type: 'tmpfs' })
  })
})

describe('publishingFault', () => {
  const durable = { fsync: 'on', synchronous_commit: 'on', full_page_writes: 'on' }
  const fault = (settings: Record<string, string>) =>
    publishingFault({ postgres: { version: '18', settings } } as unknown as Environment, null)

  it('has nothing against a durable PostgreSQL', () => {
    expect(fault(durable)).toBeNull()
  })

  it.each(['fsync', 'synchronous_commit', 'full_page_writes'])('refuses %s off', (name) => {
    expect(fault({ ...durable, [name]: 'off' })).toContain(name)
  })
})

describe('busyPercentOf', () => {
  const cpu = (user: number, idle: number) => ({ times: { user, nice: 0, sys: 0, idle, irq: 0 } })

  it('is the share of all cores that was not idle meanwhile', () => {
    expect(busyPercentOf([cpu(100, 0), cpu(0, 500)], [cpu(400, 700), cpu(100, 1_400)])).toBe(20)
  })

  it('is nothing when no time has passed', () => {
    expect(busyPercentOf([cpu(1, 1)], [cpu(1, 1)])).toBe(0)
  })
})

describe('isNewEnough', () => {
  it.each([
    ['20.20.2', false],
    ['22.17.9', false],
    ['22.18.0', true],
    ['24.0.0', true],
  ])('%s: %s', (version, expected) => {
    expect(isNewEnough(version)).toBe(expected)
  })
})

describe('parseCpuTime', () => {
  it.each([
    ['0:01.50', 1.5],
    ['01:02:03', 3_723],
    ['2-00:00:01', 172_801],
  ])('%s is %s s', (text, seconds) => {
    expect(parseCpuTime(text)).toBe(seconds)
  })
})
