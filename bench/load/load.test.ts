import { describe, expect, it } from 'vitest'
import { type Load, toResult } from './load.js'
import { requestMaker, uniquePrefix } from './requests.js'

const load: Load = { origin: 'http://127.0.0.1:1', path: '/p', connections: 64, seconds: 1, lanes: 200 }
const counted = { requests: 100, seconds: 2, failed: 0, p50Ms: 1, p99Ms: 2 }

describe('toResult', () => {
  it('is requests over the time that passed', () => {
    expect(toResult(load, counted)).toEqual({ perSecond: 50, requests: 100, p50Ms: 1, p99Ms: 2 })
  })

  it('is no result when one answer was not 2xx, or none came', () => {
    expect(() => toResult(load, { ...counted, failed: 1 })).toThrow(/1 of 100/)
    expect(() => toResult(load, { ...counted, requests: 0 })).toThrow(/worthless/)
  })
})

describe('requestMaker', () => {
  it('makes requests of one length, none like another, over all lanes', () => {
    const next = requestMaker({ ...load, keyed: true })
    const made = Array.from({ length: 400 }, () => next())
    const lanes = new Set(made.map(({ body }) => (JSON.parse(body) as { partition: string }).partition))
    expect(lanes.size).toBe(200)
    expect(new Set(made.map(({ body }) => body)).size).toBe(400)
    expect(new Set(made.map(({ body }) => body.length)).size).toBe(1)
    expect(new Set(made.map(({ headers }) => headers['idempotency-key'])).size).toBe(400)
  })

  it('asks for nothing that was not wanted', () => {
    expect(Object.keys(requestMaker(load)().headers)).toEqual(['content-type'])
    expect(requestMaker({ ...load, async: true })().headers.prefer).toBe('respond-async')
  })
})

describe('uniquePrefix', () => {
  it('never repeats', () => {
    const prefixes = Array.from({ length: 1_000 }, () => uniquePrefix())
    expect(new Set(prefixes).size).toBe(1_000)
  })
})
