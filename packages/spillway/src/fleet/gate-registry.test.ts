import { describe, expect, it, vi } from 'vitest'
import { GateRegistry } from './gate-registry.js'

const log = { warn: vi.fn() }

describe('gates that the store has to know', () => {
  it('are registered once, and then no more', async () => {
    const registry = new GateRegistry(log)
    const register = vi.fn(async () => undefined)
    registry.add('a', register)
    expect(registry.isComplete).toBe(false)
    await Promise.all([registry.register(), registry.register()])
    expect(registry.isComplete).toBe(true)
    await registry.register()
    expect(register).toHaveBeenCalledTimes(1)
  })

  it('are tried again after an error, which is logged', async () => {
    const registry = new GateRegistry(log)
    const register = vi.fn(async () => undefined).mockRejectedValueOnce(new Error('away'))
    registry.add('a', register)
    await expect(registry.register()).rejects.toThrow('away')
    expect(registry.isComplete).toBe(false)
    expect(log.warn).toHaveBeenCalledOnce()
    await registry.register()
    expect(registry.isComplete).toBe(true)
  })
})
