import { CarriedJson, leftOutSql, listedSql } from 'spillway/workload'
import { type Seal, SealError } from '../seal.js'

/** A payload in an answer. One that cannot be read says why, and does not fail the list that contains it. */
export type PayloadView =
  | { data: unknown }
  | { data: null; error: string }
  | { data: null; error: string; data_bytes: number; truncated: true }

export interface StoredPayload {
  /** Null: left out, see `listedPayloadSql`. */
  payload: string | null
  /** Size of the plain text of a payload that is left out; for a sealed one up to 2 more. */
  payload_bytes?: number | null | undefined
  sealed: boolean
  partition: string
  /** Of the message. */
  id: string
}

/** Nonce and tag: the extra bytes of a sealed text, before base64. */
const sealBytes = 28
/** A longer sealed text exceeds what a list carries, whatever its padding. */
const sealedLookedAt = 8_192

/** Bytes of the plain text. A sealed one is base64. Its padding is read only if it may decide. */
function plainBytesSql(row: string): string {
  const stored = `octet_length(${row}.payload)`
  const padding = `(2 - length(rtrim(right(${row}.payload, 2), '=')))`
  return `CASE WHEN NOT ${row}.sealed THEN ${stored}
    ELSE ${stored} / 4 * 3 - ${sealBytes} - CASE WHEN ${stored} <= ${sealedLookedAt} THEN ${padding} ELSE 0 END END`
}

/** Columns of a list and the join that they need, for rows `row` with `payload` and `sealed`. */
export function listedPayloadSql(row: string): { columns: string; join: string } {
  return {
    columns: `${listedSql(`${row}.payload`, 'b.plain')} AS payload, ${leftOutSql('b.plain')} AS payload_bytes`,
    join: `CROSS JOIN LATERAL (SELECT ${plainBytesSql(row)} AS plain OFFSET 0) b`,
  }
}

export function payloadView(seal: Seal | null, stored: StoredPayload): PayloadView {
  const { payload, sealed, partition, id } = stored
  if (payload === null) {
    const error = 'Too long for a list. GET /api/v1/messages/:partitionId/:transactionId returns it in full.'
    return { data: null, error, data_bytes: stored.payload_bytes ?? 0, truncated: true }
  }
  if (!sealed) return { data: new CarriedJson(payload) }
  if (seal === null) return { data: null, error: 'The payload is encrypted, and this server has no key.' }
  try {
    return { data: new CarriedJson(seal.open(payload, { partition, id })) }
  } catch (fault) {
    if (fault instanceof SealError) return { data: null, error: 'The payload could not be decrypted.' }
    throw fault
  }
}
