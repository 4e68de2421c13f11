import { describe, expect, it } from 'vitest'
import { isTransient } from './readiness.js'

const sent = (code: string) => Object.assign(new Error('from the server'), { code, severity: 'FATAL' })
const failed = (code: string) => Object.assign(new Error('from the system'), { code })

describe('isTransient', () => {
  it.each(['57P03', '57P01', '53300', '53200', '08006', '58030', '57014'])(
    'waits for a server that says %s',
    (code) => {
      expect(isTransient(sent(code))).toBe(true)
    },
  )

  it.each(['28P01', '28000', '3D000', '42601', '53100', 'EPIPE'])('does not wait for a server that says %s', (code) => {
    expect(isTransient(sent(code))).toBe(false)
  })

  it('waits for a port that does not answer', () => {
    for (const code of ['ECONNREFUSED', 'ECONNRESET', 'EPIPE']) expect(isTransient(failed(code))).toBe(true)
    for (const code of ['ENOSPC', '57P03']) expect(isTransient(failed(code))).toBe(false)
  })

  it('knows the errors of the driver by their texts', () => {
    const texts = [
      'timeout expired',
      'Query read timeout',
      'Connection terminated unexpectedly',
      'Connection terminated due to connection timeout',
      'Client has encountered a connection error and is not queryable',
    ]
    for (const text of texts) expect(isTransient(new Error(text))).toBe(true)
    expect(isTransient(new Error('SASL: SCRAM-SERVER-FINAL-MESSAGE: server signature is missing'))).toBe(false)
    expect(isTransient('timeout expired')).toBe(false)
  })
})
