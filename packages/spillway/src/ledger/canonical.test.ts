import fc from 'fast-check'
import { describe, expect, it } from 'vitest'
import { canonicalJson } from './canonical.js'

describe('canonicalJson', () => {
  it('writes the example of RFC 8785, section 3.2.2', () => {
    const value = {
      numbers: [Number('333333333.33333329'), 1e30, 4.5, 2e-3, 0.000000000000000000000000001],
      string: '€$\u000f\nA\'B"\\\\"/',
      literals: [null, true, false],
    }
    expect(canonicalJson(value)).toBe(
      '{"literals":[null,true,false],"numbers":[333333333.3333333,1e+30,4.5,0.002,1e-27],"string":"€$\\u000f\\nA\'B\\"\\\\\\\\\\"/"}',
    )
  })

  it('sorts members by UTF-16 code units, as in section 3.2.3', () => {
    const value = { '€': 1, '\r': 2, '\ufb33': 3, '1': 4, '😀': 5, '\u0080': 6, ö: 7 }
    expect([...canonicalJson(value).matchAll(/:(\d)/g)].map((m) => Number(m[1]))).toEqual([2, 4, 6, 7, 1, 5, 3])
  })

  it('gives equal text for equal values, and the text is their JSON', () => {
    fc.assert(
      fc.property(fc.jsonValue(), (value) => {
        const text = canonicalJson(value)
        expect(JSON.parse(text)).toEqual(JSON.parse(JSON.stringify(value)))
        expect(canonicalJson(JSON.parse(text))).toBe(text)
      }),
    )
  })

  it('leaves out undefined members, and refuses values that JSON cannot express', () => {
    expect(canonicalJson({ b: undefined, a: 1 })).toBe('{"a":1}')
    for (const value of [undefined, Number.NaN, Number.POSITIVE_INFINITY, () => 1, [undefined]]) {
      expect(() => canonicalJson(value)).toThrow(TypeError)
    }
  })
})
