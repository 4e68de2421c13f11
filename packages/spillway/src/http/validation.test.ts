import Type from 'typebox'
import { describe, expect, it } from 'vitest'
import { compileValidator, validatorCompiler } from './validation.js'
import './typebox.js'

const Order = Type.Object({
  id: Type.String({ minLength: 1 }),
  count: Type.Optional(Type.Integer({ minimum: 1, maximum: 10 })),
  kind: Type.Optional(Type.Enum(['a', 'b'])),
  lines: Type.Optional(Type.Array(Type.Object({ sku: Type.String() }))),
  open: Type.Optional(Type.Object({ known: Type.Optional(Type.Number()) }, { additionalProperties: true })),
})

describe('validation', () => {
  const validate = compileValidator(Order)

  it('accepts what fits and leaves it as it is', () => {
    const order = { id: 'x', count: 3, lines: [{ sku: 's' }], open: { other: 1 } }
    expect(validate(order)).toEqual({ ok: true, value: order })
  })

  it.each([
    [{}, '/id', 'is required'],
    [{ id: 'x', extra: 1 }, '/extra', 'is not a known member'],
    [{ id: 'x', 'a/b': 1 }, '/a~1b', 'is not a known member'],
    [{ id: 'x', lines: [{ sku: 's' }, { sku: 's', z: 1 }] }, '/lines/1/z', 'is not a known member'],
    [{ id: 7 }, '/id', 'must be string'],
    [{ id: 'x', count: 1.5 }, '/count', 'must be integer'],
    [{ id: 'x', kind: 'c' }, '/kind', 'must be one of "a", "b"'],
  ])('%j → %s', (value, path, message) => {
    const result = validate(value)
    expect(result.ok ? [] : result.errors).toContainEqual({ path, message })
  })

  it('bounds the list of faults', () => {
    const many = Object.fromEntries(Array.from({ length: 1000 }, (_, n) => [`m${n}`, n]))
    const result = validate({ id: 'x', ...many })
    expect(result.ok ? 0 : result.errors.length).toBeLessThanOrEqual(20)
  })

  it('leaves the members of an intersection to each other', () => {
    const both = compileValidator(
      Type.Intersect([Type.Object({ a: Type.Number() }), Type.Object({ b: Type.Number() })]),
    )
    expect(both({ a: 1, b: 2 }).ok).toBe(true)
  })

  it('converts query parameters and lets unknown ones pass', () => {
    const schema = Type.Object({ limit: Type.Integer({ maximum: 200 }) })
    const check = validatorCompiler({ schema, httpPart: 'querystring', method: 'GET', url: '/' })
    expect(check({ limit: '10', _: '1' })).toEqual({ value: { limit: 10, _: '1' } })
    expect(check({ limit: 'ten' })).toHaveProperty('error')
  })

  it('asks for a body that is missing', () => {
    const check = validatorCompiler({ schema: Order, httpPart: 'body', method: 'POST', url: '/' })
    expect(check(undefined)).toMatchObject({ error: { errors: [{ path: '', message: 'a JSON body is required' }] } })
  })
})
