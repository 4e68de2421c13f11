import { describe, expect, it } from 'vitest'
import { Watch } from './watch.js'

const never = new AbortController().signal

describe('watch', () => {
  it('wakes the waiters of the changed one, and no others', async () => {
    const watch = new Watch({ changed: async () => [] })
    const woken: string[] = []
    const both = [
      watch.wait('a', 1, never).then(() => woken.push('a')),
      watch.wait('b', 1, never).then(() => woken.push('b')),
    ]
    watch.notice('a')
    await both[0]
    expect(woken).toEqual(['a'])
    expect(watch.size).toBe(1)
    watch.close()
    await both[1]
    expect(watch.size).toBe(0)
  })

  it('finds what no hint reported, with one query for all', async () => {
    const asked: ReadonlyMap<string, number>[] = []
    const watch = new Watch({
      pollMs: 1,
      changed: async (waiting) => {
        asked.push(new Map(waiting))
        return asked.length < 2 ? [] : ['b']
      },
    })
    const gone = new AbortController()
    const first = watch.wait('a', 3, gone.signal)
    await watch.wait('b', 7, never)
    expect(asked.length).toBeGreaterThanOrEqual(2)
    expect(asked[0]).toEqual(
      new Map([
        ['a', 3],
        ['b', 7],
      ]),
    )
    gone.abort()
    await first
    expect(watch.size).toBe(0)
  })

  it('continues while the store is unreachable', async () => {
    let calls = 0
    const watch = new Watch({
      pollMs: 1,
      changed: async () => {
        if (++calls < 3) throw new Error('away')
        return ['a']
      },
    })
    await watch.wait('a', 1, never)
    expect(calls).toBe(3)
  })

  it('holds no client that left already', async () => {
    const watch = new Watch({ changed: async () => [] })
    expect(await watch.wait('a', 1, AbortSignal.abort())).toBe(false)
    expect(watch.size).toBe(0)
  })

  it('releases all when it is closed, and accepts none afterwards', async () => {
    const watch = new Watch({ changed: async () => [] })
    const waiting = watch.wait('a', 1, never)
    watch.close()
    expect(await waiting).toBe(false)
    expect(await watch.wait('a', 1, never)).toBe(false)
  })
})
