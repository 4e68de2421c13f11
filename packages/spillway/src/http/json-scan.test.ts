import fc from 'fast-check'
import { describe, expect, it } from 'vitest'
import { CarriedJson, carry, each, jsonOf, memberTexts, withoutRepeated } from './carried-json.js'
import { eachElement, eachMember, skipSpace, stringAt, valueEnd } from './json-scan.js'

/** JSON with white space wherever it may be, and names that are escaped or not. */
function spaced(value: unknown, space: string, escapes: boolean): string {
  const text = (string: string) =>
    escapes
      ? `"${[...string].map((c) => (c.length === 1 ? `\\u${c.charCodeAt(0).toString(16).padStart(4, '0')}` : c)).join('')}"`
      : JSON.stringify(string)
  const write = (v: unknown): string => {
    if (typeof v === 'string') return text(v)
    if (Array.isArray(v)) return `[${space}${v.map((e) => `${write(e)}${space}`).join(`,${space}`)}]`
    if (typeof v !== 'object' || v === null) return JSON.stringify(v)
    const members = Object.entries(v).map(([n, m]) => `${text(n)}${space}:${space}${write(m)}${space}`)
    return `{${space}${members.join(`,${space}`)}}`
  }
  return `${space}${write(value)}${space}`
}

const spaces = fc.constantFrom('', ' ', '\n\t', '\r\n ')

describe('a scan', () => {
  it('finds every member and element of any text', () => {
    fc.assert(
      fc.property(fc.jsonValue({ maxDepth: 6 }), spaces, fc.boolean(), (value, space, escapes) => {
        const bytes = Buffer.from(spaced(value, space, escapes))
        const walk = (at: number, expected: unknown): number => {
          const end = valueEnd(bytes, at)
          expect(JSON.parse(bytes.toString('utf8', at, end))).toEqual(JSON.parse(JSON.stringify(expected)))
          let count = 0
          if (Array.isArray(expected)) {
            const elements = (index: number, place: number): number => {
              count++
              return walk(place, expected[index])
            }
            expect(eachElement(bytes, at, elements)).toBe(end)
            expect(count).toBe(expected.length)
          } else if (typeof expected === 'object' && expected !== null) {
            const members = Object.entries(expected)
            const next = (nameAt: number, nameEnd: number, place: number): number => {
              expect(stringAt(bytes, nameAt, nameEnd)).toBe(members[count]?.[0])
              return walk(place, members[count++]?.[1])
            }
            expect(eachMember(bytes, at, next)).toBe(end)
            expect(count).toBe(members.length)
          }
          return end
        }
        walk(skipSpace(bytes, 0), value)
      }),
    )
  })

  it('of something else finds nothing, and its end', () => {
    const never = (): number => {
      throw new Error('there is nothing')
    }
    expect(eachMember(Buffer.from('[1,{}] '), 0, never)).toBe(6)
    expect(eachElement(Buffer.from('{"a":[1]}'), 0, never)).toBe(9)
    expect(eachMember(Buffer.from('{ }'), 0, never)).toBe(3)
    expect(eachElement(Buffer.from('[ ]'), 0, never)).toBe(3)
  })

  it('ends with an error where the text does not', () => {
    for (const text of ['"a', '"a\\"', '[1', '{"a":"b', '{"a":['])
      expect(() => valueEnd(Buffer.from(text), 0)).toThrow(SyntaxError)
  })
})

describe('carried JSON', () => {
  const path = ['items', each, 'payload'] as const
  const carried = (text: string): unknown => {
    const value = JSON.parse(text)
    carry(value, text, path)
    return value
  }
  const texts = (text: string): unknown[] =>
    (carried(text) as { items: { payload?: unknown }[] }).items.map(({ payload }) =>
      payload instanceof CarriedJson ? payload.text : payload,
    )

  it('keeps the text of each, wherever it is', () => {
    expect(texts('{"items":[{"payload": 1.0 },{"q":1},{"payload":{"a":1,"a":-0}},{"payload":null}]}')).toEqual([
      '1.0',
      undefined,
      '{"a":1,"a":-0}',
      'null',
    ])
    expect(texts(' {"x":{"items":[{"payload":1}]},"\\u0069tems":[{"p\\u0061yload":"\\\\\\"}"}]}')).toEqual([
      '"\\\\\\"}"',
    ])
  })

  it('keeps texts that are no ASCII', () => {
    expect(texts('{"é":"😀","items":[{"ü":1,"payload":"é😀\\u00e9"},{"payload":{"ß":1.0}}]}')).toEqual([
      '"é😀\\u00e9"',
      '{"ß":1.0}',
    ])
    expect([...memberTexts('{"é":"ü","\\u00e9":1.0}')]).toEqual([['é', '1.0']])
  })

  it('has the last of repeated members, as JSON.parse has', () => {
    expect(texts('{"items":[{"payload":1,"payload":2}]}')).toEqual(['2'])
    expect(texts('{"items":[{"payload":1},{"payload":2}],"items":[{"payload":3}]}')).toEqual(['3'])
    expect(texts('{"items":[{"payload":1}],"items":[{"q":3}]}')).toEqual([undefined])
    expect(texts('{"items":[[{"payload":1}],4,"x"],"items":[{"payload":3.0}]}')).toEqual(['3.0'])
    expect(carried('{"items":[{"payload":1}],"items":5}')).toEqual({ items: 5 })
  })

  it('is written as it came', () => {
    const value = { a: new CarriedJson('[1.0, -0]'), b: [new CarriedJson('"$&"'), 'x'], c: 1 }
    expect(jsonOf(value)).toBe('{"a":[1.0, -0],"b":["$&","x"],"c":1}')
    expect(jsonOf(new CarriedJson('1E2'))).toBe('1E2')
    expect(jsonOf({ a: 'x' })).toBe('{"a":"x"}')
    expect(JSON.stringify(value)).toBe('{"a":[1,0],"b":["$&","x"],"c":1}')
    const fails = {
      toJSON: () => {
        throw new Error('no')
      },
    }
    expect(() => jsonOf([value.a, fails])).toThrow('no')
    expect(JSON.stringify(value.a)).toBe('[1,0]')
  })

  it('returns members by name, and leaves out repeated ones', () => {
    expect([...memberTexts('{"a":1.0,"b": [ 2 ] ,"a":3E1}')]).toEqual([
      ['a', '3E1'],
      ['b', '[ 2 ]'],
    ])
    expect(withoutRepeated(' {"a":1.0, "b":2}')).toBe(' {"a":1.0, "b":2}')
    expect(withoutRepeated('{"a":1, "b":{"c":1,"c":2},"\\u0061" : 1.0}')).toBe('{"\\u0061" : 1.0,"b":{"c":1,"c":2}}')
  })
})
