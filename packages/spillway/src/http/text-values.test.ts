import Type from 'typebox'
import { describe, expect, it } from 'vitest'
import { convertTexts } from './text-values.js'

const schema = Type.Object({
  n: Type.Integer(),
  b: Type.Boolean(),
  either: Type.Union([Type.Literal('all'), Type.Number()]),
  list: Type.Array(Type.Integer()),
  s: Type.String(),
})

describe('values that come as text', () => {
  it.each([
    [{ n: '5' }, { n: 5 }],
    [{ n: '-5' }, { n: -5 }],
    [{ n: '1.5' }, { n: 1.5 }],
    [{ n: '' }, { n: '' }],
    [{ n: '0x10' }, { n: '0x10' }],
    [{ n: '1e3' }, { n: '1e3' }],
    [{ n: ' 1' }, { n: ' 1' }],
    [{ n: ['1', '2'] }, { n: ['1', '2'] }],
    [{ b: 'true' }, { b: true }],
    [{ b: '1' }, { b: '1' }],
    [{ either: 'all' }, { either: 'all' }],
    [{ either: '0.5' }, { either: 0.5 }],
    [{ list: '1' }, { list: [1] }],
    [{ list: ['1', 'x'] }, { list: [1, 'x'] }],
    [
      { s: '5', other: '5' },
      { s: '5', other: '5' },
    ],
  ])('%j → %j', (given, expected) => {
    expect(convertTexts(schema, given)).toEqual(expected)
  })
})
