/**
 * Tickets whose messages became dead letters of the broker: such a ticket must fail.
 *
 *   buried ──stored──► unread ──its next attempt reads it──► read: the ticket fails ──redriven, first attempt reads──► removed
 *
 * The process that published the message may be gone when the message dies, or be another one. Without this record it
 * would publish again once the broker forgets the id. A read entry stays, because that attempt may be lost before it is
 * settled.
 */
import type { RoutingContext } from './context.js'
import { isUuid } from './envelope.js'

/** Longer than a ticket is retried. */
const keptMs = 86_400_000

interface Message {
  header(name: string): string | undefined
}

/** From the header `Spillway-Ticket`; anybody may write anything there. */
export function ticketOf(message: Message): string | null {
  const ticket = message.header('Spillway-Ticket')
  return isUuid(ticket) ? ticket : null
}

/** `error`: what its ticket, if it has one, fails with. Stores each dead letter once, however often it is called. */
export async function keepBurial(
  { intake, schema }: RoutingContext,
  message: Message,
  letter: string,
  error: string,
): Promise<void> {
  const ticket = ticketOf(message)
  if (ticket === null) return
  await intake.statements.release(
    `INSERT INTO ${schema}.rt_burials AS b (ticket, letter, error, expires_at)
     VALUES ($1, $2, $3, ${schema}.clock() + $4 * interval '1 ms')
     ON CONFLICT (ticket) DO UPDATE SET letter = excluded.letter, error = excluded.error, is_read = false, expires_at = excluded.expires_at
     WHERE b.letter <> excluded.letter`,
    [ticket, letter, `${error} It is dead letter ${letter} of the broker.`, keptMs],
  )
}

/**
 * The error that the ticket fails with; null: its message was not buried. A first attempt that finds a read entry was
 * redriven.
 */
export async function readBurial(
  { intake, schema }: RoutingContext,
  ticket: string,
  isFirstAttempt: boolean,
): Promise<string | null> {
  const { rows } = await intake.statements.release<{ error: string }>(
    `WITH redriven AS (DELETE FROM ${schema}.rt_burials WHERE ticket = $1 AND is_read AND $2)
     UPDATE ${schema}.rt_burials SET is_read = true WHERE ticket = $1 AND NOT (is_read AND $2) RETURNING error`,
    [ticket, isFirstAttempt],
  )
  return rows[0]?.error ?? null
}
