import { describe, expect, it } from 'vitest'
import { FailOperation, OperationAborted, RetryOperation } from './outcome.js'

describe('what handlers throw', () => {
  it('RetryOperation carries when, what and why', () => {
    const cause = new Error('429')
    const fault = new RetryOperation('later', { afterMs: 5, result: { seen: 1 }, cause })
    expect(fault).toMatchObject({ code: 'retry', afterMs: 5, result: { seen: 1 }, message: 'later', cause })
    expect(new RetryOperation('later').afterMs).toBeUndefined()
  })

  it('FailOperation carries what and why', () => {
    expect(new FailOperation('never', { result: 1 })).toMatchObject({
      code: 'operation_failed',
      status: 500,
      result: 1,
      message: 'never',
    })
    expect(new FailOperation('never').result).toBeUndefined()
  })
})

describe('OperationAborted', () => {
  it.each(['timeout', 'cancelled', 'lease_lost', 'stopping'] as const)('%s has a text of its own', (code) => {
    const fault = new OperationAborted(code)
    expect(fault.code).toBe(code)
    expect(fault.message).not.toBe('')
  })
})
