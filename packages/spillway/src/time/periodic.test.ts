import { afterEach, beforeEach, describe, expect, test, vi } from 'vitest'
import { periodic } from './periodic.js'

describe('periodic', () => {
  beforeEach(() => void vi.useFakeTimers())
  afterEach(() => void vi.useRealTimers())

  test('runs after each pause until it is stopped', async () => {
    const task = vi.fn()
    const runs = periodic(100, task)
    vi.advanceTimersByTime(99)
    expect(task).toHaveBeenCalledTimes(0)
    vi.advanceTimersByTime(201)
    expect(task).toHaveBeenCalledTimes(3)
    await runs.stop()
    vi.advanceTimersByTime(1_000)
    expect(task).toHaveBeenCalledTimes(3)
  })

  test('starts no run while one is under way, and stop waits for it', async () => {
    let end: () => void = () => undefined
    const task = vi.fn(
      () =>
        new Promise<void>((resolve) => {
          end = resolve
        }),
    )
    const runs = periodic(100, task)
    await vi.advanceTimersByTimeAsync(1_000)
    expect(task).toHaveBeenCalledTimes(1)
    const stopped = vi.fn()
    const stopping = runs.stop().then(stopped)
    await vi.advanceTimersByTimeAsync(0)
    expect(stopped).not.toHaveBeenCalled()
    end()
    await stopping
    await vi.advanceTimersByTimeAsync(1_000)
    expect(task).toHaveBeenCalledTimes(1)
  })

  test('continues after a fault, thrown or rejected', async () => {
    const faults: unknown[] = []
    const task = vi
      .fn<() => void | Promise<void>>()
      .mockImplementationOnce(() => {
        throw new Error('thrown')
      })
      .mockRejectedValueOnce(new Error('rejected'))
    const runs = periodic(100, task, { onFault: (fault) => faults.push(fault) })
    await vi.advanceTimersByTimeAsync(300)
    expect(task).toHaveBeenCalledTimes(3)
    expect(faults).toEqual([new Error('thrown'), new Error('rejected')])
    await runs.stop()
  })

  test('jitter makes each pause longer or shorter by its share at most', async () => {
    const random = vi.spyOn(Math, 'random')
    const task = vi.fn()
    random.mockReturnValueOnce(0).mockReturnValueOnce(0.999)
    const runs = periodic(100, task, { jitter: 0.1 })
    vi.advanceTimersByTime(90)
    expect(task).toHaveBeenCalledTimes(1)
    vi.advanceTimersByTime(108)
    expect(task).toHaveBeenCalledTimes(1)
    vi.advanceTimersByTime(2)
    expect(task).toHaveBeenCalledTimes(2)
    await runs.stop()
    random.mockRestore()
  })
})
