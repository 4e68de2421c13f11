import { describe, expect, it } from 'vitest'
import { SseParser } from './upstream-sse.js'

function parsed(pieces: readonly (string | Buffer)[], charactersMax?: number) {
  const parser = new SseParser(charactersMax)
  const events = pieces.flatMap((piece) => parser.push(Buffer.from(piece)))
  return [...events, ...parser.end()]
}

const data = (...texts: string[]) => texts.map((text) => ({ name: '', data: text }))

describe('server-sent events out of bytes', () => {
  it('takes events at their blank line', () => {
    expect(parsed(['data: a\n\ndata: b\n\n'])).toEqual(data('a', 'b'))
  })

  it('gives an event as soon as its blank line arrives', () => {
    const parser = new SseParser()
    expect(parser.push(Buffer.from('data: a\n'))).toEqual([])
    expect(parser.push(Buffer.from('\ndata: b'))).toEqual(data('a'))
  })

  it.each([
    ['CRLF', '\r\n'],
    ['CR', '\r'],
  ])('takes %s as line end', (_, end) => {
    expect(parsed([`data: a${end}${end}data: b${end}${end}`])).toEqual(data('a', 'b'))
  })

  it('takes CR and LF in two pieces as one line end', () => {
    expect(parsed(['data: a\r', '\ndata: b\r', '\n\r', '\n'])).toEqual(data('a\nb'))
  })

  it('joins several data lines', () => {
    expect(parsed(['data: {\ndata:  "a": 1\ndata:}\n\n'])).toEqual(data('{\n "a": 1\n}'))
  })

  it('passes over comments, ids, retry and unknown fields', () => {
    expect(parsed([': alive\n\n:\nid: 7\nretry: 10\nwhat: ever\ndata: a\n\n'])).toEqual(data('a'))
  })

  it('names an event for its own block only', () => {
    expect(parsed(['event: error\ndata: a\n\ndata: b\n\n'])).toEqual([{ name: 'error', data: 'a' }, ...data('b')])
  })

  it('leaves out an event without data', () => {
    expect(parsed(['event: ping\n\ndata:\n\ndata: b\n\n'])).toEqual(data('b'))
  })

  it('comes to the same events wherever the bytes are cut', () => {
    const bytes = Buffer.from(
      '\ufeffevent: x\r\ndata: zwölf 🎈 …\r\n\r\n: c\r\ndata: é\ndata: ü\r\n\r\ndata: [DONE]\n\n',
    )
    const whole = parsed([bytes])
    expect(whole).toEqual([{ name: 'x', data: 'zwölf 🎈 …' }, ...data('é\nü', '[DONE]')])
    for (let cut = 1; cut < bytes.length; cut++) {
      expect(parsed([bytes.subarray(0, cut), bytes.subarray(cut)]), `cut at ${cut}`).toEqual(whole)
    }
    expect(parsed(Array.from(bytes, (byte) => Buffer.of(byte)))).toEqual(whole)
  })

  it('counts an event whose blank line is missing at the end', () => {
    expect(parsed(['data: a\n\ndata: [DONE]'])).toEqual(data('a', '[DONE]'))
  })

  it('takes a line of just the limit', () => {
    expect(parsed([`data: ${'x'.repeat(94)}\n\n`], 100)).toEqual(data('x'.repeat(94)))
  })

  it.each([
    ['a whole line', [`data: ${'x'.repeat(95)}\n\n`]],
    ['a line that never ends', ['data: ', ...Array.from({ length: 95 }, () => 'x')]],
    ['data lines that never end', Array.from({ length: 20 }, () => 'data: xxxxxx\n')],
  ])('refuses %s over the limit', (_, pieces) => {
    expect(() => parsed(pieces, 100)).toThrow(expect.objectContaining({ code: 'upstream_malformed' }))
  })
})
