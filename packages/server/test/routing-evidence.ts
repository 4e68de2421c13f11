/** What is played on a routing fleet, and what was seen of it. Times are of one clock, in milliseconds. */
import type { Notice } from './routing-fleet.js'

export type Signal = 'backlog' | 'latency' | 'inflight'

export interface Bounds {
  backlog: readonly [warn: number, critical: number, overload: number]
  latency: readonly [warn: number, critical: number, overload: number]
  inflight: readonly [warn: number, critical: number, overload: number]
}

export interface Scenario {
  name: string
  /** Published straight to the subject; without NATS, handed to the gateway. */
  messages: number
  /** Default: as fast as it goes. */
  overMs?: number
  /** Handed to the gateway at the same time, half of them to decide. */
  viaGateway: number
  /** Of the messages of the subject: for nobody, with a policy that does not exist. They are to become dead letters. */
  hopeless: number
  delayMs: number
  /** `ROUTER_CONCURRENCY` of each router; without NATS, `SPILLWAY_CONCURRENCY` of each worker. */
  concurrency: readonly number[]
  bounds: Bounds
  /** Which signals must pass their bound of overload. */
  passes: readonly Signal[]
  /** From a signal's reaching its bound to router_intake_backpressure_active. */
  detectionMaxMs: number
  checkIntervalSeconds: number
  checkTimeoutMs: number
  /** Decisions per minute and tenant without overload. */
  decidePerMinute: number
}

/** How a message went in. `hopeless`: to the subject, with nobody to be answered. */
export type Way = 'subject' | 'hopeless' | 'decide' | 'message'

export interface Sent {
  id: string
  way: Way
  at: number
}

export interface End {
  id: string
  at: number
  kind: 'decided' | 'refused' | 'dead' | 'other'
  /** Of `other`. */
  said?: string
}

export interface Poll {
  process: string
  path: string
  at: number
  tookMs: number
  /** Less the time that the asker was held up, or that the one asked had no CPU. */
  ms: number
  status: number
}

export interface IntakeSample {
  at: number
  active: number
  level: number
  pending: number
  p95: number
  inFlight: number
  triggered: number
}

export interface GatewaySample {
  at: number
  status: string
}

/** One refusal, or what should have been one. */
export interface Shed {
  what: string
  status: number
  code: unknown
  detail: unknown
  ok: unknown
  retryAfter: number
  retryAfterInBody: unknown
}

export interface Read {
  what: string
  status: number
}

export interface Evidence {
  scenario: Scenario
  startedAt: number
  /** The last of the load had its end. */
  endedAt: number
  sent: Sent[]
  ends: End[]
  /** Of requests while the gateway knew of the overload. */
  shed: Shed[]
  reads: Read[]
  /** Every refusal for overload that anybody got. */
  refusals: Shed[]
  polls: Poll[]
  intakes: Record<string, IntakeSample[]>
  gateway: GatewaySample[]
  /** As the broker reports it; without NATS, what was accepted until then. */
  backlog: { at: number; count: number }[]
  notices: Notice[]
  /** As the gateway counts. */
  rejections: number
  /** Since the load began. */
  adjustments: number
  /** What is left in the stream. */
  stored: number
  /** A decision when all is over. */
  after: { status: number; policy: string | null }
  /** Processes that ended by themselves, and errors in logs. */
  mishaps: string[]
}
