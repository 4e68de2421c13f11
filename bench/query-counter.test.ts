import { describe, expect, it } from 'vitest'
import { FrontendReader } from './query-counter.js'

const text = (value: string): Buffer => Buffer.from(`${value}\0`)

function message(type: string, ...content: Buffer[]): Buffer {
  const body = Buffer.concat(content)
  const head = Buffer.alloc(5)
  head.write(type)
  head.writeUInt32BE(body.length + 4, 1)
  return Buffer.concat([head, body])
}

function startup(code: number): Buffer {
  const head = Buffer.alloc(8)
  head.writeUInt32BE(8, 0)
  head.writeUInt32BE(code, 4)
  return head
}

const protocol3 = startup(3 << 16)
const encryptionWish = startup((1_234 << 16) | 5_679)

/** Prepares, binds and executes, as node-postgres does for a named statement. */
const extended = (name: string, sql: string | null): Buffer =>
  Buffer.concat([
    ...(sql === null ? [] : [message('P', text(name), text(sql), Buffer.alloc(2))]),
    message('B', text(''), text(name), Buffer.alloc(6)),
    message('D', Buffer.from('P'), text('')),
    message('E', text(''), Buffer.alloc(4)),
    message('S'),
  ])

function counted(...chunks: Buffer[]): Record<string, number> {
  const counts: Record<string, number> = {}
  const reader = new FrontendReader((statement) => {
    counts[statement] = (counts[statement] ?? 0) + 1
  })
  for (const chunk of chunks) reader.read(chunk)
  return counts
}

describe('FrontendReader', () => {
  it('counts simple queries, not the start of the session nor the password', () => {
    const counts = counted(
      protocol3,
      message('p', text('secret')),
      message('Q', text('BEGIN')),
      message('Q', text('BEGIN')),
    )
    expect(counts).toEqual({ BEGIN: 2 })
  })

  it('counts executions of a prepared statement by its text, also when it is not prepared again', () => {
    expect(counted(protocol3, extended('accept', 'SELECT accept($1)'), extended('accept', null))).toEqual({
      'SELECT accept($1)': 2,
    })
  })

  it('is not confused by a wish for encryption before the session', () => {
    expect(counted(encryptionWish, protocol3, message('Q', text('SELECT 1')))).toEqual({ 'SELECT 1': 1 })
  })

  it('counts the same however the bytes are cut', () => {
    const whole = Buffer.concat([
      protocol3,
      extended('a', 'SELECT 1'),
      message('Q', text('COMMIT')),
      extended('a', null),
    ])
    const bytes = [...whole].map((byte) => Buffer.from([byte]))
    expect(counted(...bytes)).toEqual(counted(whole))
    expect(counted(whole)).toEqual({ 'SELECT 1': 2, COMMIT: 1 })
  })
})
