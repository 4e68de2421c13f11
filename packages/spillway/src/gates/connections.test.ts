import { describe, expect, it, vi } from 'vitest'
import { bindingFor, who } from '../../test/pipeline-gate-binding.js'
import { connections } from './connections.js'

describe('connections', () => {
  it('takes a place in the pool of its type, for the identity that asks', async () => {
    const takeConnection = vi.fn(async () => ({ release: () => undefined }))
    const options = { perIdentity: 3, total: 10 }
    await connections(options).bind(bindingFor({ takeConnection })).acquire?.(who)
    expect(takeConnection).toHaveBeenCalledWith('orders.place', 'ann', options)
  })

  it('takes it in a pool that several share', async () => {
    const takeConnection = vi.fn(async () => ({ release: () => undefined }))
    await connections({ perIdentity: 3, total: 10, pool: 'streams' })
      .bind(bindingFor({ takeConnection }))
      .acquire?.(who)
    expect(takeConnection).toHaveBeenCalledWith('streams', 'ann', expect.anything())
  })

  it('holds the place that it was given until that is released', async () => {
    const permit = { release: vi.fn() }
    const outcome = await connections({ perIdentity: 1, total: 1 })
      .bind(bindingFor({ takeConnection: async () => permit }))
      .acquire?.(who)
    expect(outcome).toBe(permit)
    expect(permit.release).not.toHaveBeenCalled()
  })

  it('refuses the identity that has all it may: its own quota', async () => {
    const bound = connections({ perIdentity: 2, total: 10 }).bind(
      bindingFor({ takeConnection: async () => 'identity_full' }),
    )
    expect(await bound.acquire?.(who)).toMatchObject({ code: 'connection_limit', retryAfterMs: 5_000 })
  })

  it('refuses everybody when the pool is full: our capacity', async () => {
    const bound = connections({ perIdentity: 2, total: 10, retryAfterSeconds: 7 }).bind(
      bindingFor({ takeConnection: async () => 'pool_full' }),
    )
    expect(await bound.acquire?.(who)).toMatchObject({ code: 'overloaded', retryAfterMs: 7_000 })
  })
})
