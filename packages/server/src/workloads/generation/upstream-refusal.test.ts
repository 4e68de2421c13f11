import { errors } from 'undici'
import { describe, expect, it } from 'vitest'
import { networkFault, refusalFault } from './upstream-refusal.js'

const conceal = (text: string) => text.replaceAll('10.0.0.7', '***')

function refused(status: number, body: unknown = {}, retryAfter?: string) {
  return refusalFault({ status, retryAfter, body: JSON.stringify(body), conceal })
}

describe('an answer that is no 2xx', () => {
  it.each([
    [400, 'upstream_rejected', false],
    [401, 'upstream_error', false],
    [403, 'upstream_error', false],
    [404, 'upstream_rejected', false],
    [408, 'upstream_error', true],
    [409, 'upstream_error', true],
    [422, 'upstream_rejected', false],
    [429, 'upstream_overloaded', true],
    [500, 'upstream_error', true],
    [503, 'upstream_overloaded', true],
    [302, 'upstream_error', false],
  ])('%i is %s, retryable: %s', (status, code, retryable) => {
    expect(refused(status)).toMatchObject({ status, code, retryable })
  })

  it('hands on what the upstream says of a request it refuses, without its address', () => {
    const error = { message: 'bad at 10.0.0.7', type: 'invalid_request_error', param: 'messages', code: 'x', hint: 'y' }
    expect(refused(400, { error }).error).toEqual({
      message: 'bad at ***',
      type: 'invalid_request_error',
      param: 'messages',
      code: 'x',
    })
  })

  it('has words of its own for a body that is no JSON', () => {
    const { error } = refusalFault({ status: 404, retryAfter: undefined, body: '<html>', conceal })
    expect(error).toMatchObject({ type: 'invalid_request_error', code: 'upstream_rejected' })
  })

  it('says nothing of what the upstream says about our key', () => {
    const { error } = refused(401, { error: { message: 'Incorrect API key provided: sk-1234' } })
    expect(JSON.stringify(error)).not.toContain('sk-1234')
  })

  it('reports a body that is too long', () => {
    const fault = refusalFault({ status: 500, retryAfter: undefined, body: null, conceal })
    expect(fault).toMatchObject({ code: 'upstream_malformed', status: 500, retryable: true })
  })

  it('waits as long as Retry-After says', () => {
    expect(refused(429, {}, '7').retryAfterMs).toBe(7_000)
    expect(refused(429, {}, '999999').retryAfterMs).toBe(86_400_000)
  })
})

describe('a connection that failed', () => {
  const cause = (code: string) => Object.assign(new Error('connect 10.0.0.7'), { code })

  it('is unreachable before an answer', () => {
    const fault = networkFault(cause('ECONNREFUSED'), false)
    expect(fault).toMatchObject({ code: 'upstream_unreachable', retryable: true })
    expect(fault.error.message).toBe('the upstream cannot be reached (ECONNREFUSED)')
  })

  it('is an incomplete answer within one', () => {
    expect(networkFault(cause('ECONNRESET'), true)).toMatchObject({ code: 'upstream_incomplete', retryable: true })
  })

  it('is malformed where no HTTP was spoken', () => {
    expect(networkFault(new errors.HTTPParserError('no HTTP'), false)).toMatchObject({ code: 'upstream_malformed' })
  })
})
