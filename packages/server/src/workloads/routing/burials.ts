/**
 * Messages of tickets that went to the broker's dead letters: the ticket is to end with them.
 *
 *   buried ──kept──► untold ──its next attempt asks──► told: the ticket fails ──redriven, it asks for the first time──► forgotten
 *
 * Whoever carries a ticket to the broker may have gone, or be another process, when its message dies; it would publish the
 * message again as soon as the broker has forgotten its id. What is told stays: that attempt may be lost before it is settled.
 */
import type { IntakeApi } from 'spillway/workload'
import { isUuid } from './envelope.js'

export interface BurialsOptions {
  intake: IntakeApi
  /** Of the store's tables, quoted for SQL. */
  schema: string
}

export interface Burial {
  /** The operation's id. */
  ticket: string
  /** The dead letter's id. */
  letter: string
  /** What the ticket fails of. */
  error: string
}

/** Longer than a ticket is tried. */
const keptMs = 86_400_000

/** Of the header `Spillway-Ticket`; a stranger may write anything there. */
export function ticketOf(message: { header(name: string): string | undefined }): string | null {
  const ticket = message.header('Spillway-Ticket')
  return isUuid(ticket) ? ticket : null
}

export class Burials {
  readonly #o: BurialsOptions

  constructor(options: BurialsOptions) {
    this.#o = options
  }

  /** Once for each dead letter, however often it is said. */
  async keep({ ticket, letter, error }: Burial): Promise<void> {
    const { intake, schema } = this.#o
    await intake.statements.release(
      `INSERT INTO ${schema}.rt_burials AS b (ticket, letter, error, expires_at)
       VALUES ($1, $2, $3, ${schema}.clock() + $4 * interval '1 ms')
       ON CONFLICT (ticket) DO UPDATE SET letter = excluded.letter, error = excluded.error, told = false, expires_at = excluded.expires_at
       WHERE b.letter <> excluded.letter`,
      [ticket, letter, `${error} It is dead letter ${letter} of the broker.`, keptMs],
    )
  }

  /** What the ticket fails of; null: its message was not buried. A first attempt that was told before has been redriven. */
  async tell(ticket: string, isFirstAttempt: boolean): Promise<string | null> {
    const { intake, schema } = this.#o
    const { rows } = await intake.statements.release<{ error: string }>(
      `WITH redriven AS (DELETE FROM ${schema}.rt_burials WHERE ticket = $1 AND told AND $2)
       UPDATE ${schema}.rt_burials SET told = true WHERE ticket = $1 AND NOT (told AND $2) RETURNING error`,
      [ticket, isFirstAttempt],
    )
    return rows[0]?.error ?? null
  }
}
