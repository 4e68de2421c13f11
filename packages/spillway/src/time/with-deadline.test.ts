import { afterEach, beforeEach, expect, test, vi } from 'vitest'
import { withDeadline } from './with-deadline.js'

beforeEach(() => void vi.useFakeTimers())
afterEach(() => void vi.useRealTimers())

const never = new Promise<string>(() => undefined)

test('gives the outcome of a promise that is in time, and leaves no timer', async () => {
  await expect(withDeadline(Promise.resolve('value'), 100, () => 'late')).resolves.toBe('value')
  await expect(withDeadline(Promise.reject(new Error('fault')), 100, () => 'late')).rejects.toThrow('fault')
  expect(vi.getTimerCount()).toBe(0)
})

test('gives what onTimeout returns when the time is over', async () => {
  const outcome = withDeadline(never, 100, () => 'late')
  await vi.advanceTimersByTimeAsync(100)
  await expect(outcome).resolves.toBe('late')
})

test('rejects with what onTimeout throws', async () => {
  const outcome = withDeadline(never, 100, () => {
    throw new Error('too late')
  })
  const rejected = expect(outcome).rejects.toThrow('too late')
  await vi.advanceTimersByTimeAsync(100)
  await rejected
})

test('a promise that fails after the deadline is not an unhandled rejection', async () => {
  let fail: (fault: Error) => void = () => undefined
  const promise = new Promise<string>((_, reject) => {
    fail = reject
  })
  const outcome = withDeadline(promise, 100, () => 'late')
  await vi.advanceTimersByTimeAsync(100)
  await expect(outcome).resolves.toBe('late')
  fail(new Error('later'))
  await vi.advanceTimersByTimeAsync(0)
})
