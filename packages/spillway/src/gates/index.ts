export { type CapacityOptions, capacity } from './capacity.js'
export { type ConnectionsOptions, connections } from './connections.js'
export type {
  BoundGate,
  Exact,
  Gate,
  GateBinding,
  GateKind,
  GateRequest,
  Permit,
  PressureLevel,
  RateTier,
} from './gate.js'
export { type HaltOptions, halt } from './halt.js'
export { type PressureOptions, pressure } from './pressure.js'
export { type RateOptions, rate } from './rate.js'
