/**
 * Dead letters: complete messages with the reason, in a separate stream until they are redriven or purged.
 *
 * Headers that begin with `Nats-` are instructions to the server (stream, sequence, message id). They are stored under
 * another name, because the server could refuse the dead letter because of them on every attempt.
 */
import type { StoredMsg } from '@nats-io/jetstream'
import { headers as newHeaders } from '@nats-io/transport-node'
import { type Delivery, headerOf, readableHeaders } from './delivery.js'
import { apiCodes, asBrokerFault, BrokerFault, isApiFault } from './faults.js'
import type { Link } from './link.js'
import { deadPrefix, headerNames } from './names.js'
import { type Outbox, sizeOf } from './outbox.js'

export interface BrokerDeadLetter {
  /** Its sequence among the dead letters. */
  readonly id: string
  /** In lists: empty if longer than requested. */
  readonly data: Uint8Array
  readonly dataBytes: number
  /** A repeated header has all its values, separated by commas. In lists: empty if longer than requested. */
  readonly headers: Readonly<Record<string, string>>
  readonly headersBytes: number
  readonly reason: string
  readonly detail: string
  readonly deliveries: number
  readonly diedAt: Date
}

/** A message that is to become a dead letter. */
export type Corpse = Pick<Delivery, 'data' | 'headers' | 'sequence' | 'storedAtMs' | 'deliveries'>

export interface Death {
  readonly reason: string
  readonly detail: string
}

export interface Redriven {
  readonly moved: number
  readonly skipped: number
  /** The skipped ones that the broker refused; absent: none. */
  readonly refused?: readonly { id: string; reason: string }[]
}

const serversPrefix = 'nats-'
const keptPrefix = 'Spillway-Original-'
const reasonLengthMax = 100
/** In characters. Even at four bytes each they fit into the room reserved for dead letters. */
const detailLengthMax = 700

/** These belong to the original caller, who no longer waits: a redriven message gets no reply and has no deadline. */
const staleNames = [headerNames.replyTo, headerNames.deadline].map((name) => name.toLowerCase())

export class DeadLetters {
  readonly #link: Link
  readonly #outbox: Outbox

  constructor(link: Link, outbox: Outbox) {
    this.#link = link
    this.#outbox = outbox
  }

  /** Resolves with the sequence when the broker has stored it. The same message is stored once, however often it is buried. */
  async store(corpse: Corpse, death: Death): Promise<string> {
    const headers = newHeaders()
    for (const [name, values] of corpse.headers ?? []) {
      const lower = name.toLowerCase()
      if (lower.startsWith(deadPrefix)) continue
      const kept = lower.startsWith(serversPrefix) ? `${keptPrefix}${name}` : name
      for (const value of values) headers.append(kept, value)
    }
    headers.set(headerNames.messageId, `dead-${corpse.sequence}-${corpse.storedAtMs}`)
    headers.set(headerNames.deadReason, oneLine(death.reason, reasonLengthMax))
    headers.set(headerNames.deadDeliveries, `${corpse.deliveries}`)
    headers.set(headerNames.diedAt, new Date().toISOString())
    headers.set(headerNames.deadDetail, oneLine(death.detail, detailLengthMax))
    const max = this.#link.serverPayloadMax
    if (max !== null && corpse.data.length + sizeOf(headers) > max) headers.set(headerNames.deadDetail, '')
    const subject = this.#link.names.deadSubject
    const { sequence } = await this.#outbox.send({ subject, data: corpse.data, headers })
    return `${sequence}`
  }

  /**
   * Oldest first. Reads one at a time, so that at most one long message is in memory. Data and headers longer than
   * `partBytesMax` bytes are left out.
   */
  async list(
    limit: number,
    after: string | null,
    partBytesMax = Number.POSITIVE_INFINITY,
  ): Promise<BrokerDeadLetter[]> {
    const found: BrokerDeadLetter[] = []
    const { deadStream, deadSubject } = this.#link.names
    let next = after === null ? 1 : (sequenceOf(after) ?? 0) + 1
    while (found.length < limit) {
      const stored = await nextFrom(this.#link, deadStream, deadSubject, next)
      if (stored === null) break
      found.push(asDeadLetter(stored, partBytesMax))
      next = stored.seq + 1
    }
    return found
  }

  /** One dead letter, complete. */
  async get(id: string): Promise<BrokerDeadLetter | null> {
    const sequence = sequenceOf(id)
    const stored = sequence === null ? null : await this.#get(sequence)
    return stored === null ? null : asDeadLetter(stored)
  }

  /** Publishes them again, complete, as new messages, oldest first, and deletes the dead letters. */
  async redrive(ids: readonly string[]): Promise<Redriven> {
    let moved = 0
    const refused: { id: string; reason: string }[] = []
    for (const sequence of sequencesOf(ids)) {
      const stored = await this.#get(sequence)
      if (stored === null) continue
      const headers = newHeaders()
      for (const [name, values] of readableHeaders(() => stored.header) ?? []) {
        if (belongsToTheDead(name)) continue
        for (const value of values) headers.append(name, value)
      }
      headers.set(headerNames.messageId, `redrive-${sequence}-${stored.time.getTime()}`)
      try {
        await this.#outbox.send({ subject: this.#link.names.subject, data: stored.data, headers })
      } catch (fault) {
        // With the message id it needs, it no longer fits. The others must not wait for it.
        if (!(fault instanceof BrokerFault) || fault.code !== 'too_large') throw fault
        refused.push({ id: `${sequence}`, reason: 'too_large' })
        continue
      }
      if (await this.#delete(sequence)) moved += 1
    }
    return { moved, skipped: ids.length - moved, ...(refused.length > 0 && { refused }) }
  }

  async purge(ids: readonly string[]): Promise<number> {
    let purged = 0
    for (const sequence of sequencesOf(ids)) if (await this.#delete(sequence)) purged += 1
    return purged
  }

  async #get(seq: number): Promise<StoredMsg | null> {
    try {
      return await this.#link.api().streams.getMessage(this.#link.names.deadStream, { seq })
    } catch (error) {
      throw asBrokerFault(error, 'show a dead letter')
    }
  }

  /** False if it was already deleted. */
  #delete(sequence: number): Promise<boolean> {
    return deleteMessage(this.#link, this.#link.names.deadStream, sequence)
  }
}

export async function deleteMessage(link: Link, stream: string, sequence: number): Promise<boolean> {
  try {
    return await link.api().streams.deleteMessage(stream, sequence, false)
  } catch (error) {
    const { sequenceNotFound, messageNotFound, messageDeleteFailed } = apiCodes
    if (isApiFault(error, sequenceNotFound, messageNotFound, messageDeleteFailed)) return false
    throw asBrokerFault(error, 'delete a message')
  }
}

/** The first message at or after this sequence. */
export async function nextFrom(
  link: Link,
  stream: string,
  subject: string,
  sequence: number,
): Promise<StoredMsg | null> {
  try {
    // The broker supports this form since 2.9; the library's type for this call lacks it.
    const query = { seq: sequence, next_by_subj: subject }
    return await link.api().streams.getMessage(stream, query)
  } catch (error) {
    throw asBrokerFault(error, 'show a message')
  }
}

function asDeadLetter(stored: StoredMsg, partBytesMax = Number.POSITIVE_INFINITY): BrokerDeadLetter {
  const all = readableHeaders(() => stored.header)
  const said = (name: string): string => headerOf(all, name) ?? ''
  const headers: Record<string, string> = {}
  for (const [name, values] of all ?? []) {
    const lower = name.toLowerCase()
    if (lower.startsWith(deadPrefix) || lower.startsWith(serversPrefix)) continue
    const own = lower.startsWith(keptPrefix.toLowerCase()) ? name.slice(keptPrefix.length) : name
    headers[own] = values.join(', ')
  }
  const diedAt = new Date(said(headerNames.diedAt))
  const dataBytes = stored.data.length
  const headersBytes = Buffer.byteLength(JSON.stringify(headers))
  return {
    id: `${stored.seq}`,
    data: dataBytes > partBytesMax ? new Uint8Array() : stored.data,
    dataBytes,
    headers: headersBytes > partBytesMax ? {} : headers,
    headersBytes,
    reason: said(headerNames.deadReason),
    detail: said(headerNames.deadDetail),
    deliveries: Number(said(headerNames.deadDeliveries)) || 0,
    diedAt: Number.isNaN(diedAt.getTime()) ? stored.time : diedAt,
  }
}

function belongsToTheDead(name: string): boolean {
  const lower = name.toLowerCase()
  const prefixes = [deadPrefix, serversPrefix, keptPrefix.toLowerCase()]
  return staleNames.includes(lower) || prefixes.some((prefix) => lower.startsWith(prefix))
}

function sequenceOf(id: string): number | null {
  return /^[1-9]\d{0,14}$/.test(id) ? Number(id) : null
}

/** Oldest first, each once. */
function sequencesOf(ids: readonly string[]): number[] {
  const known = ids.map(sequenceOf).filter((sequence) => sequence !== null)
  return [...new Set(known)].sort((a, b) => a - b)
}

/** A header is one line. */
function oneLine(text: string, lengthMax: number): string {
  return text.replace(/\s+/g, ' ').trim().slice(0, lengthMax)
}
