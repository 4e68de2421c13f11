import type { Refusal } from '../intake/refusal.js'
import type { AcceptItem, Pulse, RateCheck, RateState } from '../store/port.js'

/** The part of a request that a gate may use. It runs before the body is parsed. */
export interface GateRequest {
  identity: string
  clientAddress: string
}

export type GateKind = 'pressure' | 'connections' | 'capacity' | 'halt' | 'rate'

/** The order of the pipeline: cheapest first, 503 before 429. */
export const gateOrder: readonly GateKind[] = ['pressure', 'connections', 'capacity', 'halt', 'rate']

/** Decided by the exact check, in the accepting transaction. */
export type Exact = Partial<Pick<AcceptItem, 'gate' | 'halt'>> & { rates?: RateTier[] }

/** `key` is the counter's name; the same text is the same counter on every instance. */
export interface RateTier extends RateCheck {
  name: string
}

/** Held until it is released. Releasing twice is the same as once. */
export interface Permit {
  release(): void
}

/** What the intake provides to a gate of one operation. */
export interface GateBinding {
  type: string
  /** Monotonic milliseconds. */
  now(): number
  pressureLevel(): PressureLevel
  registerCapacity(name: string, limit: number, resumeBelow: number): void
  /** Throws when the store does not answer. */
  takeConnection(
    pool: string,
    identity: string,
    limits: { perIdentity: number; total: number },
  ): Promise<Permit | 'identity_full' | 'pool_full'>
}

export type PressureLevel = 'inactive' | 'warning' | 'active'

/** A gate as a value: several definitions may use it. */
export interface Gate<Body = never> {
  readonly kind: GateKind
  bind(binding: GateBinding): BoundGate<Body>
}

export interface BoundGate<Body = never> {
  readonly kind: GateKind
  /** Uses only what this process knows; refuses early and cheaply. */
  early?(request: GateRequest): Refusal | null
  /** Takes a permit that the request holds while it runs. */
  acquire?(request: GateRequest): Promise<Refusal | Permit>
  /** What the accepting transaction decides. */
  exact?(request: GateRequest, body: Body): Exact
  /** The accepting transaction refused because of this gate. `rate` gates get the tier and the time. */
  refused?(
    request: GateRequest,
    rate:
      | (Pick<RateState, 'resetMs' | 'resetAtMs'> & Pick<RateTier, 'name' | 'key' | 'limit' | 'windowSeconds'>)
      | null,
  ): Refusal
  /** An operation that was settled here held capacity of this name. */
  freed?(name: string): void
  /** The state that all instances share, once a second. */
  observe?(pulse: Pulse): void
  /** The store was emptied. */
  forget?(): void
}
