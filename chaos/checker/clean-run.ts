/** The evidence of a run in which nothing was broken, for tests to break. */
import { createHash } from 'node:crypto'
import type { Delivery, Effect, Evidence, Fault, Submitted, Ticket, Try } from '../records.js'
import { mediumOf, petitionText, queueName, type Route, tokenOf, transactionIdOf } from '../workload.js'

type Mutable<T> = { -readonly [K in keyof T]: T[K] extends readonly (infer E)[] ? E[] : T[K] }
export type Run = Mutable<Evidence>

const seed = 7
export const start = 1_000_000
export const idOf = (lane: string, n: number): string => {
  const digits = [...`${lane}#${n}`].map((c) => c.charCodeAt(0).toString(16)).join('')
  const hex = digits.padStart(32, '0').slice(-32)
  return `${hex.slice(0, 8)}-${hex.slice(8, 12)}-${hex.slice(12, 16)}-${hex.slice(16, 20)}-${hex.slice(20)}`
}

const lanes: readonly (readonly [string, readonly Route[]])[] = [
  ['tx-0', ['tx']],
  ['forward-1', ['forward']],
  ['mixed-2', ['tx', 'outside', 'apply']],
]
export const perLane = 6
/** In each lane this one is to fail. */
export const poisoned = 4

/** Three lanes, one client each, every operation sent 10 ms after the one before was answered. */
export function cleanRun(): Run {
  const run: Run = {
    seed,
    deadlineMs: 1_000,
    submitted: [],
    tries: [],
    reads: [],
    effects: [],
    deliveries: [],
    pops: [],
    acks: [],
    consumers: { groups: [], leaseMs: 1_000 },
    tickets: [],
    faults: [],
    lives: [{ slot: 'app-1', pid: 1, gateway: true, upAt: start, endedAt: null, unasked: null }],
    audit: [],
    petitionsMoved: [],
    placesHeld: [],
    rated: [],
    drained: true,
    consumed: true,
  }
  for (let n = 1; n <= perLane; n++) {
    for (const [lane, routes] of lanes) {
      const route = routes[n % routes.length] ?? 'tx'
      add(run, { lane, n, route, poison: n === poisoned && route !== 'apply' })
    }
  }
  return run
}

export function add(run: Run, o: { lane: string; n: number; route: Route; poison: boolean; at?: number }): void {
  const { lane, n, route, poison } = o
  const at = o.at ?? start + n * 20
  const operationId = idOf(lane, n)
  const token = tokenOf(seed, lane, n)
  const work = { lane, n, token }
  run.submitted.push({
    ...o,
    token,
    firstSentAt: at,
    certainAt: at + 10,
    operationId: route === 'push' ? null : operationId,
    messageId: route === 'push' ? operationId : null,
    keyed: true,
    refused: false,
    abandoned: false,
    moved: false,
  })
  const result = route === 'forward' ? { status: 200, body: work } : work
  const body = poison
    ? { status: 'failed', operationId, error_message: 'poisoned' }
    : { status: 'executed', operationId, result }
  const made = { lane, n, slot: 'app-1', pid: 1, sentAt: at, endedAt: at + 10, end: 'answered', status: 201 } as const
  if (route === 'petition') run.tries.push({ ...made, ...receiptOf(operationId, lane, n) })
  else run.tries.push({ ...made, body: route === 'push' ? [pushResult(lane, n)] : body })
  if (mediumOf[route] === 'sink') {
    run.deliveries.push({ at: at + 5, lane, n, key: operationId, status: poison ? 400 : 200 })
  } else if (!poison) {
    // A message's number is its place in the partition.
    const ord = route === 'push' ? n : run.effects.length + 1
    run.effects.push({ ord, at: at + 5, lane, n, operation: operationId, route })
  }
  // What is stored at once leaves no ticket.
  if (route === 'push') return
  const status = poison ? 'failed' : 'completed'
  run.tickets.push({ id: operationId, lane, type: route, status, finishedAt: at + 8, error: null, message: null })
}

export const pushResult = (lane: string, n: number, status = 'queued') => ({
  ...{ index: 0, message_id: idOf(lane, n), transaction_id: transactionIdOf(lane, n) },
  ...{ partition_id: idOf(lane, 0), trace_id: null, queueName, status },
})

function receiptOf(id: string, lane: string, n: number): Pick<Try, 'body' | 'location'> {
  const content_hash = createHash('sha256').update(petitionText(lane, n)).digest('hex')
  return {
    body: { petition_id: id, state: 'RECEIVED', content_hash },
    location: `/api/v1/petition-submissions/${id}`,
  }
}

function one<T extends { lane: string; n: number }>(list: readonly T[], lane: string, n: number): T {
  const found = list.find((item) => item.lane === lane && item.n === n)
  if (found === undefined) throw new Error(`no ${lane}#${n}`)
  return found
}
export const without = <T>(list: readonly T[], item: T): T[] => list.filter((other) => other !== item)
export const submitted = (run: Run, lane: string, n: number): Submitted => one(run.submitted, lane, n)
export const effect = (run: Run, lane: string, n: number): Effect => one(run.effects, lane, n)
export const delivery = (run: Run, lane: string, n: number): Delivery => one(run.deliveries, lane, n)
export const made = (run: Run, lane: string, n: number): Try => one(run.tries, lane, n)
export const ticket = (run: Run, lane: string, n: number): Ticket => {
  const found = run.tickets.find((t) => t.id === idOf(lane, n))
  if (found === undefined) throw new Error(`no ticket of ${lane}#${n}`)
  return found
}
export const fault = (fields: Partial<Fault>): Fault => ({
  ...{ kind: 'kill', slot: 'app-1', pid: 1, from: start, to: start, held: [] },
  ...fields,
})
