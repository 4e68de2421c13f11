import { describe, expect, it } from 'vitest'
import { bySqlState, StoreFault, toStoreFault } from './faults.js'

function serverError(code: string): Error {
  return Object.assign(new Error('secret detail'), { code, severity: 'ERROR', constraint: 'ops_id_key' })
}

function systemError(code: string): Error {
  return Object.assign(new Error('connect failed to secret host'), { code, errno: -1, syscall: 'connect' })
}

describe('toStoreFault', () => {
  it.each([
    ['57P01', 'unavailable'],
    ['57P02', 'unavailable'],
    ['57P03', 'unavailable'],
    ['08006', 'unavailable'],
    ['53300', 'unavailable'],
    ['25006', 'unavailable'],
    ['57014', 'timeout'],
    ['55P03', 'timeout'],
    ['53100', 'disk_full'],
    ['22P02', 'data'],
    ['23505', 'data'],
    ['P0001', 'data'],
    ['40001', 'conflict'],
    ['40P01', 'conflict'],
    ['42P01', 'other'],
    ['28P01', 'other'],
    ['XX000', 'other'],
  ] as const)('takes SQLSTATE %s as %s', (state, code) => {
    expect(bySqlState(state)).toBe(code)
    const fault = toStoreFault(serverError(state))
    expect(fault).toMatchObject({ code, sqlState: state, constraint: 'ops_id_key' })
    expect(fault.message).not.toContain('secret')
  })

  it.each([
    ['ECONNREFUSED', 'unavailable'],
    ['ECONNRESET', 'unavailable'],
    ['EPIPE', 'unavailable'],
    ['ENOTFOUND', 'unavailable'],
    ['ENOSPC', 'disk_full'],
  ] as const)('takes errno %s as %s', (errno, code) => {
    const fault = toStoreFault(systemError(errno))
    expect(fault).toMatchObject({ code, sqlState: undefined })
    expect(fault.message).not.toContain('secret')
  })

  it('takes an attempt on several addresses as its first failure', () => {
    const both = new AggregateError([systemError('ECONNREFUSED'), systemError('ECONNREFUSED')])
    expect(toStoreFault(both)).toMatchObject({ code: 'unavailable', cause: both })
  })

  it.each([
    ['Query read timeout', 'timeout'],
    ['timeout exceeded when trying to connect', 'unavailable'],
    ['Connection terminated unexpectedly', 'unavailable'],
    ['Connection terminated due to connection timeout', 'unavailable'],
    ['Client has encountered a connection error and is not queryable', 'unavailable'],
    ['Cannot use a pool after calling end on the pool', 'unavailable'],
    ['something else', 'other'],
  ] as const)("takes the driver's own %j as %s", (message, code) => {
    expect(toStoreFault(new Error(message)).code).toBe(code)
  })

  it('keeps a fault as it is and wraps what is no error', () => {
    const fault = new StoreFault('conflict')
    expect(toStoreFault(fault)).toBe(fault)
    expect(toStoreFault('text')).toMatchObject({ code: 'other', cause: 'text' })
  })

  it('shows messages of our own functions only', () => {
    const raised = (code: string) => Object.assign(new Error('queue_full'), { code, severity: 'ERROR' })
    expect(toStoreFault(raised('SP001'))).toMatchObject({ code: 'data', message: 'queue_full' })
    expect(toStoreFault(raised('P0001')).message).not.toContain('queue_full')
  })
})
