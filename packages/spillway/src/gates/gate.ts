import type { Refusal } from '../intake/refusal.js'
import type { AcceptItem, Pulse, RateState } from '../store/port.js'

/** What a gate may look at. It runs before the body is parsed. */
export interface GateRequest {
  identity: string
  clientAddress: string
}

export type GateKind = 'pressure' | 'connections' | 'capacity' | 'halt' | 'rate'

/** The order of the pipeline: cheapest first, 503 before 429. */
export const gateOrder: readonly GateKind[] = ['pressure', 'connections', 'capacity', 'halt', 'rate']

/** Told by the exact check, in the accepting transaction. */
export type Exact = Partial<Pick<AcceptItem, 'gate' | 'halt'>> & { rates?: RateTier[] }

export interface RateTier {
  name: string
  /** What is counted; the same text is the same counter on every instance. */
  key: string
  limit: number
  windowMinutes: number
  /** How long its count is kept after it was last used. Default: the window and an hour. */
  keepMinutes?: number
}

/** A place that is held until it is released. Releasing twice is the same as once. */
export interface Permit {
  release(): void
}

/** What the intake gives to a gate of one operation. */
export interface GateBinding {
  type: string
  /** Monotonic milliseconds. */
  now(): number
  pressureLevel(): PressureLevel
  registerCapacity(name: string, limit: number, resumeBelow: number): void
  /** Throws when the store cannot say. */
  takeConnection(
    pool: string,
    identity: string,
    limits: { perIdentity: number; total: number },
  ): Promise<Permit | 'identity_full' | 'pool_full'>
}

export type PressureLevel = 'inactive' | 'warning' | 'active'

/** A gate as a value: one may stand in several definitions. */
export interface Gate<Body = never> {
  readonly kind: GateKind
  bind(binding: GateBinding): BoundGate<Body>
}

export interface BoundGate<Body = never> {
  readonly kind: GateKind
  /** From what this process knows; refuses early and cheaply. */
  early?(request: GateRequest): Refusal | null
  /** Takes a place that the request holds while it runs. */
  acquire?(request: GateRequest): Promise<Refusal | Permit>
  /** What the accepting transaction has to decide. */
  exact?(request: GateRequest, body: Body): Exact
  /** The accepting transaction refused by this gate. `rate` gates get the tier and the time. */
  refused?(
    request: GateRequest,
    rate: (Pick<RateState, 'resetMs' | 'resetAtMs'> & Omit<RateTier, 'keepMinutes'>) | null,
  ): Refusal
  /** What all instances share, once a second. */
  observe?(pulse: Pulse): void
}
