/**
 * Witnessed events: appended in the transaction of the change they record, numbered without gaps, each with the hash of the
 * one before it. The store keeps and checks the chain (sql/functions/ledger.sql); this file has the events' shape, and the
 * walk over a chain of any length.
 */
import type { CutRows } from '../store/page-sql.js'
import type { LedgerRow, Store, Tx } from '../store/port.js'
import { canonicalJson } from './canonical.js'

export interface WitnessedEvent {
  /** E.g. `petition.submission.received`. */
  type: string
  /** Who caused it. */
  actor: string
  traceId: string
  payload: Readonly<Record<string, unknown>>
}

export interface Verification {
  ok: boolean
  /** The first and the last number checked; 0 when the ledger is empty. */
  from: number
  to: number
  /** Null: the head row is missing. */
  head_hash: string | null
  /** The first row that is wrong or missing. */
  broken_at?: number
}

/** The hash before the first row. */
export const genesisHash = '0'.repeat(64)
/** A tenth of a second of database time, so that others get their turn in between. */
const rowsPerLook = 10_000

export class Ledger {
  readonly #store: Store

  constructor(store: Store) {
    this.#store = store
  }

  /** Call it after all other writes of the transaction: the ledger's lock comes last. Returns the last number. */
  append(tx: Tx, events: readonly WitnessedEvent[]): Promise<number> {
    return this.#store.ledgerAppend(
      tx,
      events.map(({ payload, ...event }) => ({ ...event, payload: canonicalJson(payload) })),
    )
  }

  async rows(after: number, limit: number): Promise<LedgerRow[]> {
    return (await this.page(after, limit, Number.MAX_SAFE_INTEGER)).rows
  }

  /** In order, at most `limit`, until they exceed `bytesMax` bytes of payload; at least one. */
  page(after: number, limit: number, bytesMax: number): Promise<CutRows<LedgerRow>> {
    return this.#store.ledgerRows(after, limit, bytesMax)
  }

  /** Walks the chain up to the current head, a bounded number of rows at a time. */
  async verify(): Promise<Verification> {
    const { head, lastRow } = await this.#store.ledgerHead()
    const to = head?.seq ?? lastRow
    const range = { from: Math.min(1, to), head_hash: head?.hash ?? null }
    let seq = 0
    let hash = genesisHash
    const broken = (at: number): Verification => ({ ok: false, ...range, to: seq, broken_at: at })
    while (seq < to) {
      const look = await this.#store.ledgerCheck(seq, hash, Math.min(rowsPerLook, to - seq))
      if (look.brokenAt !== null) return broken(look.brokenAt)
      if (look.lastSeq === null || look.lastHash === null) return broken(seq + 1)
      seq = look.lastSeq
      hash = look.lastHash
    }
    // A separate row stores the head: a chain that ends before it, or goes on after it, is broken.
    if (head === null) return broken(to + 1)
    if (hash !== head.hash) return broken(to)
    if (lastRow > to) return broken(to + 1)
    return { ok: true, ...range, to }
  }
}
