import { describe, expect, it } from 'vitest'
import { createLogger, type Logger } from './logs.js'

function lineOf(
  write: (log: Logger) => void,
  level: 'info' | 'warn' = 'info',
): { text: string; json: Record<string, unknown> } {
  let text = ''
  write(
    createLogger({
      level,
      destination: {
        write: (line) => {
          text += line
        },
      },
    }),
  )
  return { text, json: text === '' ? {} : JSON.parse(text) }
}

describe('createLogger', () => {
  it('writes one JSON line with a named level and an ISO time', () => {
    const { text, json } = lineOf((log) => log.info({ lane: 'orders' }, 'accepted'))
    expect(text.endsWith('}\n')).toBe(true)
    expect(json).toMatchObject({ level: 'info', lane: 'orders', msg: 'accepted' })
    expect(json.time).toMatch(/^\d{4}-\d\d-\d\dT.*Z$/u)
  })

  it('writes nothing below its level', () => {
    expect(lineOf((log) => log.info('quiet'), 'warn').text).toBe('')
  })

  it.each<[string, (log: Logger) => void]>([
    ['a header', (log) => log.info({ req: { headers: { Authorization: 'Bearer s3cret' } } }, 'x')],
    ['a payload', (log) => log.info({ operation: { payload: { card: 's3cret' } } }, 'x')],
    ['a payload in a list', (log) => log.info({ operations: [{ body: 's3cret' }] }, 'x')],
    ['a binding', (log) => log.child({ password: 's3cret' }).info('x')],
    ['the message', (log) => log.info('cannot reach postgres://u:s3cret@db/app')],
    ['a message argument', (log) => log.info('cannot reach %s', 'postgres://u:s3cret@db/app')],
    ['a member', (log) => log.info({ store: { url: 'postgres://u:s3cret@db/app' } }, 'x')],
    ['an error', (log) => log.error(new Error('no postgres://u:s3cret@db/app'), 'x')],
    [
      'the cause of an error',
      (log) => log.error({ err: new Error('no', { cause: new Error('redis://:s3cret@c') }) }, 'x'),
    ],
    ["a driver's detail", (log) => log.error({ err: Object.assign(new Error('no'), { detail: 'Key (s3cret)' }) }, 'x')],
    ['an error under another name', (log) => log.error({ failure: { why: new Error('redis://:s3cret@c') } }, 'x')],
  ])('does not write the secret of %s', (_where, write) => {
    const { text } = lineOf(write)
    expect(text).not.toBe('')
    expect(text).not.toContain('s3cret')
  })

  it('keeps the code, the stack and the cause of an error', () => {
    const cause = Object.assign(new Error('refused'), { code: 'ECONNREFUSED' })
    const { json } = lineOf((log) => log.error({ err: new Error('store', { cause }) }, 'x'))
    expect(json.err).toMatchObject({ message: 'store', cause: { message: 'refused', code: 'ECONNREFUSED' } })
    expect(JSON.stringify(json.err)).toContain('logs.test')
  })
})
