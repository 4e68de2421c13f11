export const petitionTypes = ['GENERAL', 'CESSATION', 'GRIEVANCE', 'COLLABORATION', 'META'] as const
export type PetitionType = (typeof petitionTypes)[number]

export const petitionStates = [
  'RECEIVED',
  'DELIBERATING',
  'ACKNOWLEDGED',
  'REFERRED',
  'ESCALATED',
  'DEFERRED',
  'NO_RESPONSE',
] as const
export type PetitionState = (typeof petitionStates)[number]

/** The states that each state may be left for; none: it is final. The database checks the same (constraint `petitions_moves`). */
export const petitionMoves: Readonly<Record<PetitionState, readonly PetitionState[]>> = {
  RECEIVED: ['DELIBERATING', 'ACKNOWLEDGED', 'ESCALATED'],
  DELIBERATING: ['ACKNOWLEDGED', 'REFERRED', 'ESCALATED', 'DEFERRED', 'NO_RESPONSE'],
  ACKNOWLEDGED: [],
  REFERRED: [],
  ESCALATED: [],
  DEFERRED: [],
  NO_RESPONSE: [],
}

/** What a submission is answered with. */
export interface PetitionReceipt {
  petition_id: string
  state: 'RECEIVED'
  type: PetitionType
  /** SHA-256 of the UTF-8 text, hex. */
  content_hash: string
  realm: string | null
  created_at: string
}

export interface PetitionStatus {
  petition_id: string
  state: PetitionState
  fate_reason: string | null
  /** Grows by one with each change: what to wait behind. */
  version: number
  updated_at: string
}

export interface PetitionView extends Omit<PetitionReceipt, 'state'>, PetitionStatus {
  text: string
  /** The authenticated subject or what was named; of an anonymous one the client's address. */
  submitter_id: string
}

/** One row of the ledger. `hash` is the SHA-256 (hex) of the other members in RFC 8785 form. */
export interface LedgerEntry {
  seq: number
  at: string
  type: string
  actor: string
  trace_id: string
  /** A text only where a row that somebody changed has no JSON. */
  payload: Record<string, unknown> | string
  prev_hash: string
  hash: string
}
