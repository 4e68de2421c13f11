import type { GateBinding, GateRequest } from '../src/gates/gate.js'
import type { Pulse } from '../src/store/port.js'

export const who: GateRequest = { identity: 'ann', clientAddress: '127.0.0.1' }

/** What a gate gets from the intake, with everything quiet unless set otherwise. */
export function bindingFor(overrides: Partial<GateBinding> = {}): GateBinding {
  return {
    type: 'orders.place',
    now: () => 0,
    pressureLevel: () => 'inactive',
    registerCapacity: () => undefined,
    takeConnection: async () => ({ release: () => undefined }),
    ...overrides,
  }
}

export const emptyPulse: Pulse = {
  alive: true,
  waiting: false,
  nextDueMs: null,
  oldestMs: 0,
  held: {},
  running: {},
  deadLetters: 0,
  gates: [],
  halts: [],
  cancels: [],
  lostWorkers: 0,
}
