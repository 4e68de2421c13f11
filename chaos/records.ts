/** What a run writes down, and the checker reads. Times are milliseconds since the epoch, of one machine's clock. */
import type { Route } from './workload.js'

/** One numbered operation, as its client knows it. */
export interface Submitted {
  lane: string
  n: number
  route: Route
  /** Dead-lettered at once is what is expected of it. */
  poison: boolean
  token: string
  firstSentAt: number
  /** When its acceptance was certain: the first 2xx. */
  certainAt: number | null
  /** Of a push: only when it was queued. */
  operationId: string | null
  /** Of a push, once it is certain: without a key, a message that is still queued may turn out to be another's repetition. */
  messageId: string | null
  /** It had an Idempotency-Key. */
  keyed: boolean
  /** A quota said no, which is final. */
  refused: boolean
  /** Sent once, without a key, and not answered as accepted: it may be there or not, but once at most. */
  abandoned: boolean
  /** It was answered that the petition was moved on. */
  moved: boolean
}

/** One request, logged when it ended. */
export interface Call {
  /** The slot it was sent to, and the process that was there then. */
  slot: string
  pid: number
  sentAt: number
  endedAt: number
  /** `cut`: the client left by itself. `deadline`: it was not answered in time. */
  end: 'answered' | 'network' | 'cut' | 'deadline'
  status?: number
  code?: string
  retryAfter?: string | undefined
  replayed?: boolean
  body?: unknown
  location?: string | undefined
  error?: string
}

/** A request that submits an operation. */
export interface Try extends Call {
  lane: string
  n: number
}

/** A consumer asked for messages. Those of a run stand in the order in which they ended. */
export interface Pop extends Call {
  group: string
  consumer: string
}

/** A consumer answered for messages. */
export interface Ack extends Call {
  group: string
  consumer: string
  asked: readonly {
    transactionId: string
    partitionId: string
    leaseId: string
    status: 'completed' | 'failed' | 'retry'
  }[]
}

/** A ticket that was read while the run went on. */
export interface Read {
  lane: string
  n: number
  operationId: string
  slot: string
  at: number
  status: number
  state: string | null
}

/** A row that a handler wrote through `ctx.tx`, or `apply`; or a petition, or a message. */
export interface Effect {
  /**
   * From a sequence, drawn by the handler: in a lane one operation begins after the other has committed. Of a petition,
   * the number of its receipt in the ledger; of a message, its number in the partition.
   */
  ord: number
  at: number
  lane: string
  n: number
  /** Of a message: its own id. */
  operation: string
  route: string
}

/** A call that reached the sink. */
export interface Delivery {
  at: number
  lane: string
  n: number
  key: string | null
  /** What the sink answered: 200, 503 for a flaky one, 400 for a poisoned one. */
  status: number
}

/** What the store says of an operation at the end. */
export interface Ticket {
  id: string
  lane: string
  type: string
  status: 'pending' | 'completed' | 'failed' | 'cancelled'
  finishedAt: number | null
  error: string | null
  /** Of a push: the message that it brought. */
  message: string | null
}

/**
 * `vanish` is the loss of a whole machine: the process is killed, and PostgreSQL does not hear that it is gone. `postgres`
 * and `backend` end the postmaster or one of its children, which ends all sessions.
 */
export type FaultKind =
  | 'kill'
  | 'vanish'
  | 'pause'
  | 'term'
  | 'cut'
  | 'delay'
  | 'half-open'
  | 'black-hole'
  | 'postgres'
  | 'backend'

/** A fault that was played. */
export interface Fault {
  kind: FaultKind
  slot: string
  pid: number
  from: number
  /** When its cause was over: running again, connections pass again, PostgreSQL answers again. */
  to: number
  /** Operations that the process held by lease at that moment; null: nobody could be asked. */
  held: string[] | null
  /** For a SIGTERM: how it ended. */
  exit?: { code: number | null; afterMs: number }
}

/** From its start to its end, one process of a slot. */
export interface Life {
  slot: string
  pid: number
  /** It takes requests. */
  gateway: boolean
  upAt: number
  endedAt: number | null
  /** It ended though nobody ended it. */
  unasked: string | null
}

export interface Evidence {
  seed: number
  deadlineMs: number
  submitted: readonly Submitted[]
  tries: readonly Try[]
  reads: readonly Read[]
  effects: readonly Effect[]
  deliveries: readonly Delivery[]
  pops: readonly Pop[]
  acks: readonly Ack[]
  /** The consumer groups of the run, and how long each delivery is theirs. */
  consumers: { groups: readonly string[]; leaseMs: number }
  tickets: readonly Ticket[]
  faults: readonly Fault[]
  lives: readonly Life[]
  /** What the audits of the schema say, the ledger's chain, and those of the messages, which were asked all the time. */
  audit: readonly string[]
  /** Ids of petitions that are no longer RECEIVED. */
  petitionsMoved: readonly string[]
  /** Places in capacity gates and connection pools that are still taken, at rest. Not those of petitions, which the audit counts. */
  placesHeld: readonly { gate: string; held: number }[]
  /** Per lane with a rate limit: accepted at most. */
  rated: readonly { lane: string; limit: number }[]
  /** False: it was not drained within its time. */
  drained: boolean
  /** False: consumers had something to read, or a lease, when their time was over. */
  consumed: boolean
}
