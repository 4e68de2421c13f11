import { randomUUID } from 'node:crypto'
import { problems, type RouteTask, routingCodes, routingProblemCode, routingStatus } from '@spillway/protocol/wire'
import fc from 'fast-check'
import { describe, expect, it } from 'vitest'
import { checkTask, readTask, taskDigest } from './envelope.js'

const limits = { bytesMax: 10_000 }
const requestId = '0192f0c1-2b5a-7c3d-8e4f-5a6b7c8d9e0f'
const valid = {
  ...{ version: '1', request_id: requestId, tenant_id: 'acme' },
  task: { type: 'chat', payload: { text: 'hello' } },
}
const read = (value: unknown) => readTask(Buffer.from(JSON.stringify(value)), limits)
const codeOf = (value: unknown) => {
  const checked = read(value)
  return checked.ok ? 'ok' : checked.code
}
const pathsOf = (value: unknown) => {
  const checked = read(value)
  return checked.ok ? [] : checked.errors?.map(({ path }) => path)
}
const without = (name: string) => Object.fromEntries(Object.entries(valid).filter(([key]) => key !== name))

describe('a task', () => {
  it('is taken as it came', () => {
    const full = {
      ...valid,
      ...{ policy_id: 'p', constraints: { max_latency_ms: 0.5, max_cost: 0 }, metadata: { user: 'u' } },
      ...{ trace_id: 'a'.repeat(32), idempotency_key: 'k' },
    }
    expect(read(full)).toEqual({ ok: true, task: full, text: JSON.stringify(full) })
  })

  it.each([
    ['a payload by reference', { task: { type: 'chat', payload_ref: 's3://bucket/key' } }],
    ['a payload of null', { task: { type: 'chat', payload: null } }],
    ['a request id in capitals', { request_id: requestId.toUpperCase() }],
    ['a trace id that is a UUID', { trace_id: requestId }],
    ['a tenant of 255 code points beyond the basic plane', { tenant_id: '😀'.repeat(255) }],
    ['no constraint among the constraints', { constraints: {} }],
  ])('may have %s', (_, changes) => {
    expect(codeOf({ ...valid, ...changes })).toBe('ok')
  })

  it('is refused when it is empty', () => {
    expect(readTask(new Uint8Array(), limits)).toMatchObject({ ok: false, code: 'PAYLOAD_TOO_SMALL', correlation: {} })
  })

  it('may have as many bytes as are taken, and not one more', () => {
    const data = Buffer.from(JSON.stringify(valid))
    expect(readTask(data, { bytesMax: data.byteLength }).ok).toBe(true)
    expect(readTask(data, { bytesMax: data.byteLength - 1 })).toMatchObject({ code: 'PAYLOAD_TOO_LARGE' })
  })

  it('is read from its own bytes of a larger buffer', () => {
    const text = JSON.stringify(valid)
    const around = Buffer.from(`xx${text}yy`)
    expect(readTask(new Uint8Array(around.buffer, around.byteOffset + 2, text.length), limits).ok).toBe(true)
  })

  it.each([
    ['garbage', Buffer.from([0xff, 0xfe, 0x00])],
    ['half of it', Buffer.from('{"version":"1"')],
    ['spaces', Buffer.from('   ')],
    ['nesting without end', Buffer.from('['.repeat(9_000))],
    ['a NUL character', Buffer.from(JSON.stringify({ ...valid, tenant_id: 'a\0b' }))],
    ['a member that would change the prototype', Buffer.from('{"__proto__":{}}')],
  ])('is refused when it is %s', (_, data) => {
    expect(readTask(data, limits)).toMatchObject({ ok: false, code: 'SCHEMA_VALIDATION_FAILED' })
  })

  it.each([
    ['no object', null, ['']],
    ['a list', [valid], ['']],
    ['without a version', without('version'), ['/version']],
    ['without a request id', without('request_id'), ['/request_id']],
    ['without a tenant', without('tenant_id'), ['/tenant_id']],
    ['without a task', without('task'), ['/task']],
    ['with an unknown member', { ...valid, extra: 1 }, ['/extra']],
    ['with an unknown member of its task', { ...valid, task: { ...valid.task, extra: 1 } }, ['/task/extra']],
    ['with a request id of a wrong type', { ...valid, request_id: 7 }, ['/request_id']],
    ['with a tenant of a wrong type', { ...valid, tenant_id: {} }, ['/tenant_id']],
    ['with an empty task type', { ...valid, task: { type: '', payload: 1 } }, ['/task/type']],
    ['with a task type that is too long', { ...valid, task: { type: 'x'.repeat(256), payload: 1 } }, ['/task/type']],
    ['with neither payload', { ...valid, task: { type: 'chat' } }, ['/task']],
    ['with both payloads', { ...valid, task: { type: 'chat', payload: 1, payload_ref: 'r' } }, ['/task']],
    [
      'with a reference that is too long',
      { ...valid, task: { type: 'chat', payload_ref: 'r'.repeat(2_049) } },
      ['/task/payload_ref'],
    ],
    ['with a cost below 0', { ...valid, constraints: { max_cost: -1 } }, ['/constraints/max_cost']],
    ['with a latency of 0', { ...valid, constraints: { max_latency_ms: 0 } }, ['/constraints/max_latency_ms']],
    ['with an unknown constraint', { ...valid, constraints: { max: 1 } }, ['/constraints/max']],
    ['with metadata that is no object', { ...valid, metadata: [] }, ['/metadata']],
    ['with an empty policy', { ...valid, policy_id: '' }, ['/policy_id']],
    ['with an empty key', { ...valid, idempotency_key: '' }, ['/idempotency_key']],
    ['with a key that is too long', { ...valid, idempotency_key: 'k'.repeat(256) }, ['/idempotency_key']],
  ])('is not valid %s', (_, value, paths) => {
    expect(codeOf(value)).toBe('SCHEMA_VALIDATION_FAILED')
    expect(pathsOf(value)).toEqual(paths)
  })

  it.each([['2'], [1], [null], ['']])('is not spoken in version %j, whatever else is wrong', (version) => {
    expect(codeOf({ version, nonsense: true })).toBe('VERSION_UNSUPPORTED')
  })

  it.each([
    [{ request_id: 'r-1' }, '/request_id'],
    [{ request_id: '' }, '/request_id'],
    [{ request_id: requestId.replaceAll('-', '') }, '/request_id'],
    [{ trace_id: 'a'.repeat(31) }, '/trace_id'],
    [{ trace_id: 'g'.repeat(32) }, '/trace_id'],
    [{ tenant_id: '' }, '/tenant_id'],
    [{ tenant_id: ' \t' }, '/tenant_id'],
    [{ tenant_id: 't'.repeat(256) }, '/tenant_id'],
  ])('cannot be correlated with %j', (changes, path) => {
    expect(codeOf({ ...valid, ...changes })).toBe('CORRELATION_FIELDS_INVALID')
    expect(pathsOf({ ...valid, ...changes })).toEqual([path])
  })

  it('reports an invalid one with an id to find it by', () => {
    const trace_id = 'b'.repeat(32)
    expect(read({ ...valid, trace_id, extra: 1 })).toMatchObject({ correlation: { request_id: requestId, trace_id } })
    expect(read({ ...valid, trace_id: 'x', request_id: 'y' })).toMatchObject({ correlation: {} })
  })

  it('never throws, whatever the bytes', () => {
    const mutated = fc.tuple(fc.nat(), fc.uint8Array({ maxLength: 4 })).map(([at, bytes]) => {
      const data = Buffer.from(JSON.stringify(valid))
      data.set(bytes.subarray(0, data.length - (at % data.length)), at % data.length)
      return new Uint8Array(data)
    })
    fc.assert(
      fc.property(fc.oneof(fc.uint8Array({ maxLength: 200 }), mutated), (data) => {
        const checked = readTask(data, limits)
        expect(checked.ok || checked.code in routingCodes).toBe(true)
      }),
      { numRuns: 500 },
    )
  })

  it('never throws, whatever the value', () => {
    const member = fc.constantFrom('version', 'request_id', 'tenant_id', 'task', 'constraints', 'metadata', 'trace_id')
    fc.assert(
      fc.property(fc.oneof(fc.jsonValue(), fc.dictionary(member, fc.jsonValue())), (value) => {
        const checked = checkTask(value)
        expect(checked.ok).toBe(false)
        expect(checkTask({ ...valid, ...(typeof value === 'object' ? value : {}) })).toHaveProperty('ok')
      }),
      { numRuns: 500 },
    )
  })
})

describe('the digest of a task', () => {
  const checked = { ...valid, version: '1' } as RouteTask
  const digest = (task: object): string => taskDigest(JSON.stringify(task))

  it('is the same for a retry with a new id, trace and key, and for members in another order', () => {
    const retry = { ...checked, request_id: randomUUID(), trace_id: 'c'.repeat(32), idempotency_key: 'k' }
    expect(digest(retry)).toBe(digest(checked))
    const turned = Object.fromEntries(Object.entries(checked).reverse())
    expect(digest(turned)).toBe(digest(checked))
  })

  it.each([
    [{ tenant_id: 'other' }],
    [{ policy_id: 'p' }],
    [{ metadata: {} }],
    [{ constraints: { max_cost: 1 } }],
    [{ task: { type: 'chat', payload: { text: 'hullo' } } }],
  ])('is another with %j', (changes) => {
    expect(digest({ ...checked, ...changes })).not.toBe(digest(checked))
  })

  it('is of the text: numbers that are the same double differ', () => {
    const of = (payload: string) => taskDigest(`{"version":"1","task":{"type":"chat","payload":${payload}}}`)
    expect(of('9007199254740993')).not.toBe(of('9007199254740992'))
    expect(of('-0')).not.toBe(of('0'))
    expect(of('{"a":1,"a":2}')).not.toBe(of('{"a":2}'))
  })
})

describe('a routing code', () => {
  it('has the status that callers expect', () => {
    expect(Object.fromEntries(Object.keys(routingCodes).map((code) => [code, routingStatus(code)]))).toEqual({
      ...{ SCHEMA_VALIDATION_FAILED: 400, VERSION_UNSUPPORTED: 400, CORRELATION_FIELDS_INVALID: 400 },
      ...{ PAYLOAD_TOO_SMALL: 400, PAYLOAD_TOO_LARGE: 413, TENANT_FORBIDDEN: 403, POLICY_NOT_FOUND: 404 },
      ...{
        IDEMPOTENCY_VIOLATION: 422,
        NO_PROVIDER: 422,
        DEADLINE_EXPIRED: 503,
        service_overloaded: 503,
        store_unavailable: 503,
      },
    })
  })

  it.each([['NEW_CODE'], [''], ['toString'], ['constructor']])('that is unknown (%s) is never a success', (code) => {
    expect(routingStatus(code)).toBe(500)
    expect(problems[routingProblemCode(code)].status).toBe(500)
  })
})
