/** The submissions of a load: each by a submitter of its own, so that nobody's limit is reached. petitions.lua makes the same. */
import { randomUUID } from 'node:crypto'

export const petitionsPath = '/api/v1/petition-submissions'

/** All but the last part of a UUID: another for every load, also on the same database. */
export const submitterPrefix = (): string => randomUUID().slice(0, 24)

export interface PetitionBody {
  readonly type: 'GENERAL'
  readonly text: string
  readonly realm: string
  readonly submitter_id: string
}

export function petitionBody(prefix: string, n: number): PetitionBody {
  const hex = n.toString(16).padStart(12, '0')
  return {
    type: 'GENERAL',
    text: `The lamps of the harbour have been dark for a week; may they be lit again before winter. ${hex}`,
    realm: 'harbour',
    submitter_id: prefix + hex,
  }
}
