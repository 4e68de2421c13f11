import fc from 'fast-check'
import { describe, expect, it } from 'vitest'
import { parseStrictJson } from './strict-json.js'

const parse = (text: string) => parseStrictJson(Buffer.from(text))

describe('strict JSON', () => {
  it('parses what JSON.parse parses', () => {
    fc.assert(
      fc.property(fc.json({ maxDepth: 10 }), (text) => {
        fc.pre(!text.includes('__proto__'))
        const parsed = parse(text)
        expect(parsed).toMatchObject({ ok: true, value: JSON.parse(text) })
      }),
    )
  })

  it('accepts nesting of 64 and refuses 65, brackets inside strings not counted', () => {
    const nested = (depth: number) => `${'['.repeat(depth)}${']'.repeat(depth)}`
    expect(parse(nested(64)).ok).toBe(true)
    expect(parse(nested(65))).toMatchObject({ ok: false, reason: 'nesting' })
    expect(parse(`{"a":"\\"${'['.repeat(1000)}"}`).ok).toBe(true)
    expect(parse(`[${Array.from({ length: 1000 }, () => '{}').join(',')}]`).ok).toBe(true)
  })

  it('refuses half a million open brackets without parsing them', () => {
    const started = performance.now()
    expect(parse('['.repeat(500_000))).toMatchObject({ ok: false, reason: 'nesting' })
    expect(parse('{"a":'.repeat(200_000))).toMatchObject({ ok: false, reason: 'nesting' })
    expect(performance.now() - started).toBeLessThan(500)
  })

  it.each([
    ['{"a":"x\\u0000"}', '/a'],
    ['{"a":["b","\\u0000"]}', '/a/1'],
    ['{"a":"\\ud800"}', '/a'],
    ['{"a":"\\uDC00\\uD800"}', '/a'],
    ['{"a":{"k\\u0000":1}}', '/a/k\ufffd'],
    ['{"\\udfff":1}', '/\ufffd'],
  ])('refuses NUL and lone surrogates: %s', (text, path) => {
    expect(parse(text)).toMatchObject({ ok: false, reason: 'character', fault: { path } })
  })

  it('accepts escaped pairs, escaped control characters and an escaped backslash before u', () => {
    expect(parse('{"a":"\\ud83d\\ude00 \\u0001 \\\\u0000"}')).toMatchObject({
      ok: true,
      value: { a: '😀 \u0001 \\u0000' },
    })
  })

  it.each(['{"__proto__":1}', '{"a":[{"__proto__":{}}]}', '{"\\u005f_proto__":1}'])('refuses %s', (text) => {
    expect(parse(text)).toMatchObject({ ok: false, reason: 'member' })
  })

  it('accepts __proto__ as a value and a longer name', () => {
    expect(parse('{"a":"__proto__","x__proto__":1}').ok).toBe(true)
  })

  it.each(['1e999', '[-1E+400]', `[${'9'.repeat(400)}]`, `[${'9'.repeat(230)}e99]`])('refuses a number: %s', (text) => {
    expect(parse(text)).toMatchObject({ ok: false, reason: 'number' })
  })

  it.each([
    ['{"a":[1,1e999],"a":1}', 'number', '/a/1'],
    ['{"a":{"b":"\\u0000"},"a":1}', 'character', '/a/b'],
    ['[{"a":{"\\udc00":1},"a":1}]', 'character', '/0/a/\ufffd'],
    ['{"b":[],"a":{"__proto__":1},"a":1}', 'member', '/a/__proto__'],
    ['{"a":{"\\u005F_proto__":1},"a":1}', 'member', '/a/__proto__'],
    ['{"a":{"__prot\\u006f__":1},"a":1}', 'member', '/a/__proto__'],
  ])('refuses what a later member of the same name hides: %s', (text, reason, path) => {
    expect(parse(text)).toMatchObject({ ok: false, reason, fault: { path } })
  })

  it('finds an escaped __proto__ however it is escaped', () => {
    fc.assert(
      fc.property(fc.array(fc.boolean(), { minLength: 9, maxLength: 9 }), fc.boolean(), (escaped, upper) => {
        const code = (c: string) => `\\u00${c.charCodeAt(0).toString(16)}`
        const hex = (c: string) => (upper ? code(c).replace(/[a-f]/g, (d) => d.toUpperCase()) : code(c))
        const name = [...'__proto__'].map((c, i) => (escaped[i] === true ? hex(c) : c)).join('')
        expect(parse(`{"${name}":1}`)).toMatchObject({ ok: false, reason: 'member' })
      }),
    )
  })

  it('accepts large finite numbers and underflow', () => {
    expect(parse(`[1e308, 1e-999, ${'9'.repeat(300)}]`).ok).toBe(true)
  })

  it.each(['', '{', '{"a":1,}', '\ufeff{}', '"\u0000"', 'nul', '1 2', '{"a":"\\'])('refuses malformed %j', (text) => {
    expect(parse(text)).toMatchObject({ ok: false, reason: 'syntax', fault: { path: '' } })
  })

  it('refuses invalid UTF-8, encoded surrogates too', () => {
    expect(parseStrictJson(Buffer.from([0x22, 0xff, 0x22]))).toMatchObject({ ok: false, reason: 'encoding' })
    expect(parseStrictJson(Buffer.from([0x22, 0xed, 0xa0, 0x80, 0x22]))).toMatchObject({ reason: 'encoding' })
  })

  it('escapes and bounds the pointer', () => {
    expect(parse('{"a/b~c":1e999}')).toMatchObject({ fault: { path: '/a~1b~0c' } })
    const long = parse(`{"${'k'.repeat(10_000)}":1e999}`)
    expect(long.ok ? 0 : long.fault.path.length).toBeLessThan(300)
  })
})
