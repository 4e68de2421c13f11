import { describe, expect, it, vi } from 'vitest'
import { claimed, storeDouble } from '../../test/pipeline-store-double.js'
import { FailOperation, OperationAborted, RetryOperation } from '../core/outcome.js'
import { Attempt, outcomeOf } from './attempt.js'

const backoff = { baseMs: 1_000, maxMs: 60_000 }
const half = () => 0.5

describe('outcomeOf', () => {
  it('retries after an error, with a growing back-off', () => {
    expect(outcomeOf(new Error('no'), claimed(), backoff, half)).toEqual({ kind: 'retry', error: 'no', delayMs: 500 })
    expect(outcomeOf(new Error('no'), claimed({ attempts: 2 }), backoff, half)).toMatchObject({ delayMs: 2_000 })
  })

  it('fails with the last attempt', () => {
    expect(outcomeOf(new Error('no'), claimed({ attempts: 3, maxAttempts: 4 }), backoff)).toEqual({
      kind: 'failed',
      error: 'no',
    })
  })

  it('fails at once on FailOperation, with its result', () => {
    expect(outcomeOf(new FailOperation('never', { result: { status: 404 } }), claimed(), backoff)).toEqual({
      kind: 'failed',
      error: 'never',
      result: { status: 404 },
      said: { code: 'operation_failed', status: 500 },
    })
  })

  it('keeps the result of the last RetryOperation', () => {
    const fault = new RetryOperation('later', { result: 503 })
    expect(outcomeOf(fault, claimed({ attempts: 3 }), backoff)).toEqual({ kind: 'failed', error: 'later', result: 503 })
  })

  it.each([
    [0, 0],
    [1_500.4, 1_500],
    [-5, 0],
    [1e12, 86_400_000],
  ])('RetryOperation after %s ms is retried after %s', (afterMs, delayMs) => {
    expect(outcomeOf(new RetryOperation('later', { afterMs }), claimed(), backoff)).toMatchObject({
      kind: 'retry',
      delayMs,
    })
  })

  it.each([Number.NaN, Number.POSITIVE_INFINITY])('a delay of %s does not reach the store', (afterMs) => {
    const outcome = outcomeOf(new RetryOperation('later', { afterMs }), claimed(), backoff, half)
    if (outcome.kind !== 'retry') throw new Error('expected a retry')
    expect(Number.isSafeInteger(outcome.delayMs)).toBe(true)
  })

  it('counts a timeout as an attempt', () => {
    const timeout = new OperationAborted('timeout')
    expect(outcomeOf(timeout, claimed(), backoff).kind).toBe('retry')
    expect(outcomeOf(timeout, claimed({ maxAttempts: 1 }), backoff).kind).toBe('failed')
  })

  it.each([
    ['cancelled', 'cancelled'],
    ['lease_lost', 'released'],
    ['stopping', 'released'],
  ] as const)('%s is %s', (code, kind) =>
    expect(outcomeOf(new OperationAborted(code), claimed(), backoff)).toEqual({ kind }),
  )

  it.each([
    ['just a text', 'just a text'],
    [undefined, 'undefined'],
    [new TypeError(''), 'TypeError'],
    [new Error('a\0b'), 'a\uFFFDb'],
    [new Error('lone \ud800'), 'lone \uFFFD'],
    [new Error('x'.repeat(5_000)), 'x'.repeat(2_000)],
  ])('%s becomes a text that can be stored', (thrown, error) => {
    expect(outcomeOf(thrown, claimed(), backoff)).toMatchObject({ error })
  })
})

describe('Attempt', () => {
  it('gives the handler its operation', () => {
    const op = claimed({ attempts: 1, identity: 'ann', partition: 'p', traceparent: '00-a-b-01' })
    const attempt = new Attempt(storeDouble(), op, 100)
    expect(attempt).toMatchObject({
      id: op.id,
      type: op.type,
      identity: 'ann',
      queue: op.queue,
      partition: 'p',
      attempt: 2,
      maxAttempts: 4,
      traceparent: '00-a-b-01',
      deadline: 100 + op.timeoutMs,
    })
  })

  it('aborts its signal once, with the first reason, whether it was looked at before or after', () => {
    const early = new Attempt(storeDouble(), claimed(), 0)
    const { signal } = early
    expect(signal.aborted).toBe(false)
    early.abort('timeout')
    early.abort('stopping')
    expect(signal.reason).toMatchObject({ code: 'timeout' })
    expect(early.abortedBy?.code).toBe('timeout')

    const late = new Attempt(storeDouble(), claimed(), 0)
    late.abort('cancelled')
    expect(late.signal.reason).toMatchObject({ code: 'cancelled' })
    const listener = vi.fn()
    late.whenAborted(listener)
    expect(listener).toHaveBeenCalledTimes(1)
  })

  it('opens one transaction, at the first query', async () => {
    const begin = vi.fn(async () => tx)
    const tx = {
      query: vi.fn(async () => ({ rows: [], rowCount: 0 })),
      commit: async () => undefined,
      rollback: vi.fn(async () => undefined),
    }
    const attempt = new Attempt(storeDouble({ begin }), claimed(), 0)
    await attempt.rollback()
    expect(attempt.openTx).toBeUndefined()
    await Promise.all([attempt.tx.query('SELECT 1'), attempt.tx.query('SELECT 2', [1])])
    expect(begin).toHaveBeenCalledTimes(1)
    await attempt.rollback()
    expect(tx.rollback).toHaveBeenCalledTimes(1)
  })

  it('opens none for a handler that timed out', async () => {
    const begin = vi.fn()
    const attempt = new Attempt(storeDouble({ begin }), claimed(), 0)
    attempt.abort('timeout')
    await expect(attempt.tx.query('SELECT 1')).rejects.toMatchObject({ code: 'timeout' })
    expect(begin).not.toHaveBeenCalled()
  })

  it('has nothing to roll back when the transaction never opened', async () => {
    const attempt = new Attempt(storeDouble({ begin: () => Promise.reject(new Error('away')) }), claimed(), 0)
    await expect(attempt.tx.query('SELECT 1')).rejects.toThrow('away')
    await attempt.rollback()
  })
})
