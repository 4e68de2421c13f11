/**
 * What is submitted, and what is to become of it: a pure function of the seed, the lane and the number. Clients, the
 * app's handlers, the sink and the checker all ask here, so that none of them needs to ask another.
 */
import { chance, hash } from './random.js'

/** The operation types: `forward` is the server's http.request, `petition` and `push` its petitions and messages, the others are the app's own. */
export const routes = ['tx', 'outside', 'apply', 'gated', 'rated', 'forward', 'petition', 'push'] as const
export type Route = (typeof routes)[number]

/**
 * Where a route's effect is seen. A petition is a row, too: its place is that of its receipt in the ledger. So is a message:
 * its place is its number in the partition.
 */
export const mediumOf: Readonly<Record<Route, 'table' | 'sink'>> = {
  tx: 'table',
  apply: 'table',
  gated: 'table',
  rated: 'table',
  petition: 'table',
  push: 'table',
  outside: 'sink',
  forward: 'sink',
}

/**
 * Routes whose effect and completion are one commit when run at once: they may leave no ticket. For a push it is known which:
 * it names an operation only when there is a ticket.
 */
export const ticketless: ReadonlySet<Route> = new Set(['apply', 'rated', 'petition'])

export interface Lane {
  name: string
  routes: readonly Route[]
  /** One client gives a strict order from outside; of several the order is what their answers allow. */
  clients: number
  /** Numbers submitted at most; undefined: until the run ends. */
  numbersMax?: number
}

/** Accepted per lane and hour at most, exactly. */
export const ratedLimit = 25
export const capacityLimit = 12

const crowdClients = 4

/** Each lane of a run is one of these, in turn. */
const kinds: readonly (Omit<Lane, 'name'> & { kind: string })[] = [
  { kind: 'tx', routes: ['tx'], clients: 1 },
  { kind: 'forward', routes: ['forward'], clients: 1 },
  { kind: 'apply', routes: ['apply'], clients: 1 },
  { kind: 'mixed', routes: ['tx', 'outside', 'apply'], clients: 1 },
  { kind: 'crowd', routes: ['tx'], clients: crowdClients },
  { kind: 'outside', routes: ['outside'], clients: 1 },
  { kind: 'gated', routes: ['gated'], clients: 1 },
  { kind: 'crowd-forward', routes: ['forward'], clients: crowdClients },
  { kind: 'crowd-mixed', routes: ['tx', 'apply', 'outside'], clients: crowdClients },
  { kind: 'shared', routes: ['forward', 'tx'], clients: 1 },
  { kind: 'rated', routes: ['rated'], clients: 2, numbersMax: ratedLimit * 2 },
  { kind: 'petition', routes: ['petition'], clients: 2 },
  { kind: 'push', routes: ['push'], clients: 1 },
  { kind: 'crowd-push', routes: ['push'], clients: crowdClients },
  // A partition is a lane: its messages keep their place among operations of other types.
  { kind: 'shared-push', routes: ['push', 'forward'], clients: 1 },
]

export const laneKinds = kinds.length

export function lanesOf(count: number, only?: readonly Route[]): Lane[] {
  const usable = only === undefined ? kinds : kinds.filter((lane) => lane.routes.every((route) => only.includes(route)))
  return Array.from({ length: count }, (_, i) => {
    const spec = usable[i % usable.length]
    if (spec === undefined) throw new RangeError('no kind of lane has only these routes')
    const { kind, ...lane } = spec
    return { ...lane, name: `${kind}-${i}` }
  })
}

export interface Behaviour {
  route: Route
  /** How long the handler takes. */
  runMs: number
  /** So many attempts fail before one succeeds. */
  failures: number
  /** It never succeeds: to be dead-lettered at once. */
  poison: boolean
  prefer: 'respond-async' | 'wait=2' | null
  /** The client leaves after so many milliseconds, once, and comes again. */
  cutAfterMs: number | null
  /** The client asks for the ticket, too. */
  reads: boolean
  /** It has an Idempotency-Key. */
  keyed: boolean
  /** It is sent until its answer is certain: by its key, or its transaction id, it is known again. Else once, whatever comes of it. */
  repeated: boolean
  /** A petition that is moved on once it is received. */
  moves: boolean
  /** What the work answers. */
  token: string
}

/** Retries never run out: what a crash is charged with must not end what is expected to be done. */
export const retriesMax = 100

/** An attempt that lasts longer is aborted: only a silent connection takes that long. */
export const attemptMaxMs = 5_000

export interface Temper {
  /** How long the slow ones take; the rest is quick. */
  slowMs: readonly [number, number]
  slowShare: number
}

export const usualTemper: Temper = { slowMs: [60, 300], slowShare: 0.2 }

export function behaviourOf(seed: number, lane: Lane, n: number, temper: Temper = usualTemper): Behaviour {
  const c = chance(seed, `${lane.name}#${n}`)
  const route = c.pick(lane.routes)
  const isPetition = route === 'petition'
  const isPush = route === 'push'
  const retried = route !== 'apply' && route !== 'rated' && !isPetition && !isPush
  const [slowMin, slowMax] = temper.slowMs
  // All are drawn, needed or not, so that one choice does not shift the others.
  const slow = c.happens(temper.slowShare)
  const slowMs = c.between(slowMin, slowMax)
  const quickMs = c.happens(0.5) ? 0 : c.between(1, 20)
  const fails = c.happens(0.06)
  const failures = c.between(1, 2)
  const poison = c.happens(0.02)
  const cut = c.happens(0.03)
  const cutAfterMs = c.between(1, 60)
  const prefer = c.pick(['respond-async', 'respond-async', null, null, null, 'wait=2'] as const)
  const reads = c.happens(0.1)
  const keyless = c.happens(0.2)
  const moves = c.happens(0.3)
  return {
    route,
    runMs: retried ? (slow ? slowMs : quickMs) : 0,
    failures: retried && fails ? failures : 0,
    poison: retried && poison,
    prefer,
    cutAfterMs: cut ? cutAfterMs : null,
    reads: reads && (retried || isPush),
    keyed: !((isPetition || isPush) && keyless),
    repeated: !(isPetition && keyless),
    moves: isPetition && moves,
    token: tokenOf(seed, lane.name, n),
  }
}

export const tokenOf = (seed: number, lane: string, n: number): string => hash(`${seed} ${lane} ${n}`).toString(16)

/** From which the row of a petition is known again. */
export const petitionText = (lane: string, n: number): string => `${lane}#${n}`

export const idempotencyKey = (lane: string, n: number): string => `${lane}#${n}`

/** By which a message is known again, with or without a key. */
export const transactionIdOf = (lane: string, n: number): string => `${lane}#${n}`

/** All lanes of the run share one queue; a lane is its partition. */
export const queueName = 'chaos'
