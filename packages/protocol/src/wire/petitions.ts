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

/** The allowed next states of each state; none: it is final. The database checks the same (constraint `petitions_moves`). */
export const petitionMoves: Readonly<Record<PetitionState, readonly PetitionState[]>> = {
  RECEIVED: ['DELIBERATING', 'ACKNOWLEDGED', 'ESCALATED'],
  DELIBERATING: ['ACKNOWLEDGED', 'REFERRED', 'ESCALATED', 'DEFERRED', 'NO_RESPONSE'],
  ACKNOWLEDGED: [],
  REFERRED: [],
  ESCALATED: [],
  DEFERRED: [],
  NO_RESPONSE: [],
}

/** The answer to a submission. */
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
  /** Grows by one with each change; a client waits for a newer one. */
  version: number
  updated_at: string
}

export interface PetitionView extends Omit<PetitionReceipt, 'state'>, PetitionStatus {
  text: string
  /** The authenticated subject, or the given id; for an anonymous submitter, the client's address. */
  submitter_id: string
}

/** One row of the ledger. `hash` is the SHA-256 (hex) of the other members in RFC 8785 form. */
export interface LedgerEntry {
  seq: number
  at: string
  type: string
  actor: string
  trace_id: string
  /** A text only if somebody changed the row and it is no longer JSON. */
  payload: Record<string, unknown> | string
  prev_hash: string
  hash: string
}
