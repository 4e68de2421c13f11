import type { Claimed, Pulse, Store } from '../src/store/port.js'
import { emptyPulse } from './pipeline-gate-binding.js'

/** A store that has only what a test names; anything else that is called fails the test, saying what. */
export function storeDouble(methods: Partial<Store> = {}): Store {
  return new Proxy(methods as Store, {
    get: (target, name) => {
      const method = Reflect.get(target, name)
      if (method !== undefined) return method
      return () => {
        throw new Error(`the test's store has no ${String(name)}`)
      }
    },
  })
}

export function claimed(overrides: Partial<Claimed> = {}): Claimed {
  return {
    fence: 1,
    lane: '00000000-0000-0000-0000-000000000001',
    seq: 1,
    id: '00000000-0000-7000-8000-000000000001',
    type: 'test',
    queue: 'test',
    partition: 'Default',
    priority: 5,
    identity: 'ann',
    payload: '{}',
    waitedMs: 0,
    due: true,
    careful: false,
    attempts: 0,
    maxAttempts: 4,
    timeoutMs: 30_000,
    traceparent: '',
    idempotencyKey: null,
    gate: null,
    ...overrides,
  }
}

export const pulse = (overrides: Partial<Pulse> = {}): Pulse => ({ ...emptyPulse, ...overrides })
