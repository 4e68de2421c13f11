import { CarriedJson } from '../../http/carried-json.js'
import { type Seal, SealError } from './seal.js'

/** A payload as it is told: one that cannot be read says why, and does not spoil the list that it stands in. */
export type ToldPayload = { data: unknown } | { data: null; error: string }

export interface StoredPayload {
  /** Null: left out, see `payloadsSql`. */
  payload: string | null
  sealed: boolean
  partition: string
  /** Of the message. */
  id: string
}

/** A list carries as much at most. */
const listBytesMax = 8 * 1_048_576

/** Of the rows of `alias`, in this order: the payloads of the first ones, up to the size that an answer may have. */
export function payloadsSql(alias: string, order: string): string {
  return `CASE WHEN sum(octet_length(${alias}.payload)) OVER (ORDER BY ${order}) <= ${listBytesMax}
    OR row_number() OVER (ORDER BY ${order}) = 1 THEN ${alias}.payload END AS payload`
}

export function toldPayload(seal: Seal | null, { payload, sealed, partition, id }: StoredPayload): ToldPayload {
  if (payload === null) return { data: null, error: 'The list would be too large with it; read it by itself.' }
  if (!sealed) return { data: new CarriedJson(payload) }
  if (seal === null) return { data: null, error: 'It is encrypted, and this server has no key.' }
  try {
    return { data: new CarriedJson(seal.open(payload, { partition, id })) }
  } catch (fault) {
    if (fault instanceof SealError) return { data: null, error: 'It could not be decrypted.' }
    throw fault
  }
}
