import { describe, expect, it } from 'vitest'
import { forwardResult, type ResponseHeaders, readBounded } from './target-response.js'

const json = { 'content-type': 'application/json; charset=utf-8' }
const bodyOf = (text: string | Buffer, headers: ResponseHeaders = json, truncated = false) =>
  forwardResult(200, headers, { bytes: Buffer.from(text as string), truncated }).body

describe('the stored part of an answer', () => {
  it('parses JSON, by its media type only', () => {
    expect(bodyOf('{"a":[1]}')).toEqual({ a: [1] })
    expect(bodyOf('{"a":[1]}', { 'content-type': 'application/problem+json' })).toEqual({ a: [1] })
    expect(bodyOf('{"a":[1]}', { 'content-type': 'text/plain' })).toBe('{"a":[1]}')
    expect(bodyOf('{"a":[1]}', {})).toBe('{"a":[1]}')
    expect(bodyOf('')).toBeNull()
  })

  it('keeps malformed, truncated, deep and overflowing JSON as text', () => {
    expect(bodyOf('{"a":')).toBe('{"a":')
    expect(bodyOf('{"a":1}', json, true)).toBe('{"a":1}')
    const deep = '['.repeat(30_000) + ']'.repeat(30_000)
    expect(bodyOf(deep)).toBe(deep)
    expect(bodyOf('[1e999]')).toBe('[1e999]')
  })

  it('replaces what jsonb cannot hold', () => {
    expect(bodyOf('{"a\\u0000":["x\\u0000","\\ud800"]}')).toEqual({ 'a\ufffd': ['x\ufffd', '\ufffd'] })
    expect(bodyOf('a\0b', { 'content-type': 'text/plain' })).toBe('a\ufffdb')
    expect(bodyOf(Buffer.from([0x61, 0xff]), {})).toBe('a\ufffd')
    const proto = bodyOf('{"__proto__":{"x":1}}') as object
    expect(Object.keys(proto)).toEqual(['__proto__'])
    expect(JSON.stringify(proto)).toBe('{"__proto__":{"x":1}}')
  })

  it('leaves out a character that the limit cut in two', () => {
    expect(bodyOf(Buffer.from('aé').subarray(0, 2), {}, true)).toBe('a')
  })

  it('bounds headers and drops cookies', () => {
    const headers: ResponseHeaders = {
      'set-cookie': ['a=b'],
      connection: 'close',
      huge: 'x'.repeat(5_000),
      'x-a': ['1', '2'],
    }
    for (let n = 0; n < 100; n++) headers[`h${n}`] = 'v'.repeat(500)
    const { headers: kept } = forwardResult(200, headers, { bytes: Buffer.alloc(0), truncated: false })
    expect(kept['x-a']).toBe('1, 2')
    expect(Object.keys(kept)).not.toEqual(expect.arrayContaining(['set-cookie']))
    expect(kept).not.toHaveProperty('connection')
    expect(kept).not.toHaveProperty('huge')
    expect(Object.keys(kept).length).toBeLessThanOrEqual(32)
    expect(JSON.stringify(kept).length).toBeLessThan(10_000)
  })

  it('reads up to the limit and leaves the rest', async () => {
    let asked = 0
    async function* endless() {
      for (;;) {
        asked++
        yield Buffer.alloc(1000, 'x')
      }
    }
    const { bytes, truncated } = await readBounded(endless(), 2500)
    expect({ length: bytes.length, truncated, asked }).toEqual({ length: 2500, truncated: true, asked: 3 })
    async function* exact() {
      yield Buffer.alloc(2500)
    }
    expect((await readBounded(exact(), 2500)).truncated).toBe(false)
  })
})
