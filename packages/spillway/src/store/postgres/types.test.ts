import { describe, expect, it } from 'vitest'
import { parseInt8, parseInt8Array, parseTextArray } from './types.js'

describe('parseInt8', () => {
  it('gives numbers up to the safe limit and throws beyond it', () => {
    expect(parseInt8('-9007199254740991')).toBe(-Number.MAX_SAFE_INTEGER)
    expect(() => parseInt8('9007199254740992')).toThrow(RangeError)
  })
})

describe('parseInt8Array', () => {
  it.each([
    ['{}', []],
    ['{7}', [7]],
    ['{1,-3,0}', [1, -3, 0]],
    ['{NULL}', [null]],
    ['{1,NULL,-3,NULL}', [1, null, -3, null]],
    [
      '{{1,2},{3,NULL}}',
      [
        [1, 2],
        [3, null],
      ],
    ],
    ['[0:1]={1,2}', [1, 2]],
    ['{9007199254740991,-9007199254740991}', [Number.MAX_SAFE_INTEGER, -Number.MAX_SAFE_INTEGER]],
  ])('reads %s', (text, values) => {
    expect(parseInt8Array(text)).toEqual(values)
  })

  it.each(['{9007199254740992}', '{1,-9007199254740992}', '{NULL,9223372036854775807}', '{{1},{9007199254740992}}'])(
    'throws %s rather than to round it',
    (text) => {
      expect(() => parseInt8Array(text)).toThrow(RangeError)
    },
  )
})

describe('parseTextArray', () => {
  it.each([
    ['{}', []],
    ['{a}', ['a']],
    ['{a,b,c}', ['a', 'b', 'c']],
    ['{NULL}', [null]],
    ['{a,NULL,b}', ['a', null, 'b']],
    // Only the bare word is NULL; a text that reads the same is quoted.
    ['{NULLS,xNULL,NULL}', ['NULLS', 'xNULL', null]],
    ['{"NULL",NULL,"null"}', ['NULL', null, 'null']],
    ['{""}', ['']],
    ['{"",a,""}', ['', 'a', '']],
    ['{"b c",a,NULL}', ['b c', 'a', null]],
    ['{"a,b","{c}",d}', ['a,b', '{c}', 'd']],
    [String.raw`{"say \"no\"","back\\slash"}`, ['say "no"', String.raw`back\slash`]],
    [
      '{{a,b},{c,NULL}}',
      [
        ['a', 'b'],
        ['c', null],
      ],
    ],
    ['[0:1]={a,b}', ['a', 'b']],
    ['{"two\nlines",ä€😀}', ['two\nlines', 'ä€😀']],
  ])('reads %s', (text, values) => {
    expect(parseTextArray(text)).toEqual(values)
  })
})
