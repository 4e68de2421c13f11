import fc from 'fast-check'
import { describe, expect, it } from 'vitest'
import { SseParser } from './parser.js'

const parse = (...pieces: string[]) => {
  const parser = new SseParser()
  return pieces.flatMap((piece) => parser.push(piece))
}

describe('server-sent events', () => {
  it('have an id, a name and data', () => {
    expect(parse('id: 7\nevent: chunk\ndata: {"a":1}\n\n')).toEqual([{ id: '7', event: 'chunk', data: '{"a":1}' }])
  })

  it('without a name are messages; data of several lines is one', () => {
    expect(parse('data: a\ndata:b\ndata\n\n')).toEqual([{ id: null, event: 'message', data: 'a\nb\n' }])
  })

  it('keep the last id, and lose their name', () => {
    expect(parse('id: 1\nevent: x\ndata: a\n\ndata: b\n\n')).toEqual([
      { id: '1', event: 'x', data: 'a' },
      { id: '1', event: 'message', data: 'b' },
    ])
  })

  it('are not made by comments, or by blocks without data', () => {
    expect(parse(':\n: hello\n\nevent: x\n\nid: 3\n\n')).toEqual([])
  })

  it('that are incomplete are not reported', () => {
    expect(parse('data: a\n\ndata: b\n')).toEqual([{ id: null, event: 'message', data: 'a' }])
  })

  it('mean the same however they are cut, with any line ends', () => {
    const text = '\uFEFFid: 1\r\nevent: chunk\r\ndata: a\r\n\r\n:\ndata: b\n\nid: 2\rdata: c\rdata: d\r\rdata: e\r\n\n'
    const whole = parse(text)
    expect(whole.map(({ data }) => data)).toEqual(['a', 'b', 'c\nd', 'e'])
    fc.assert(
      fc.property(fc.array(fc.integer({ min: 0, max: text.length }), { maxLength: 12 }), (cuts) => {
        const places = [0, ...cuts.sort((a, b) => a - b), text.length]
        expect(parse(...places.slice(1).map((end, i) => text.slice(places[i], end)))).toEqual(whole)
      }),
    )
  })

  it('may not grow without bound', () => {
    const piece = 'x'.repeat(1_048_576)
    expect(() => parse('data: ', piece, piece, piece, piece, piece)).toThrow(/more than/)
    expect(() => parse(...new Array(5).fill(`data: ${piece}\n`))).toThrow(/more than/)
  })
})
