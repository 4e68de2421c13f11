/** Sends one alert to the webhook. Failures of the receiver or the network are outcomes, never thrown. */
import { createHmac } from 'node:crypto'
import { Agent } from 'undici'
import { waitAskedFor } from '../../time.js'
import { deadline } from '../../traffic/deadline.js'

/** Where alerts are sent. */
export interface Webhook {
  url: string
  /** Null: not signed. */
  secret: string | null
}

export type Sent =
  | { kind: 'delivered' }
  /** A retry may succeed. */
  | { kind: 'retry'; why: string; afterMs?: number }
  /** A retry cannot succeed. */
  | { kind: 'refused'; why: string }

/** `idempotencyKey`: the same for all attempts at one alert. `signal` ends the attempt from outside. */
type Send = (
  text: string,
  options: { idempotencyKey: string; traceparent: string; signal: AbortSignal },
) => Promise<Sent>

const connectionsMax = 4
/** The answer's body is not used; more than this is not read, and the connection is closed. */
const answerBytesMax = 16_384
/** A longer Retry-After is treated as a mistake: an hour-old alert is useless. */
const retryAfterMsMax = 3_600_000

export function signatureOf(text: string, secret: string): string {
  return `sha256=${createHmac('sha256', secret).update(text).digest('hex')}`
}

/** Redirects are not a success: the signed body is for this receiver only. */
export function outcomeOf(status: number, retryAfter: unknown, nowMs: number): Sent {
  if (status >= 200 && status < 300) return { kind: 'delivered' }
  const why = `the receiver answered ${status}`
  if (status !== 408 && status !== 429 && status < 500) return { kind: 'refused', why }
  const afterMs = waitAskedFor(retryAfter, nowMs, retryAfterMsMax)
  return { kind: 'retry', why, ...(afterMs !== undefined && { afterMs }) }
}

export function createSender(webhook: Webhook, sendMs: number): Send {
  const url = new URL(webhook.url)
  const agent = new Agent({
    connections: connectionsMax,
    pipelining: 1,
    connect: { timeout: sendMs },
    headersTimeout: sendMs,
    bodyTimeout: sendMs,
  })
  const credentials =
    url.username === '' ? undefined : `${decodeURIComponent(url.username)}:${decodeURIComponent(url.password)}`
  return async (text, { idempotencyKey, traceparent, signal }) => {
    const until = deadline(sendMs, signal)
    try {
      const answer = await agent.request({
        origin: url.origin,
        path: `${url.pathname}${url.search}`,
        method: 'POST',
        headers: {
          'content-type': 'application/json',
          'user-agent': 'spillway',
          'idempotency-key': idempotencyKey,
          ...(traceparent !== '' && { traceparent }),
          ...(credentials !== undefined && {
            authorization: `Basic ${Buffer.from(credentials).toString('base64')}`,
          }),
          ...(webhook.secret !== null && { 'x-spillway-signature': signatureOf(text, webhook.secret) }),
        },
        body: text,
        // Alerts are rare: a kept connection would be broken by the next one, and would have to be closed at the end.
        reset: true,
        signal: until.signal,
      })
      const outcome = outcomeOf(answer.statusCode, answer.headers['retry-after'], Date.now())
      // The status says everything; a body that breaks off costs only the connection.
      await answer.body.dump({ limit: answerBytesMax }).catch(() => undefined)
      return outcome
    } catch (fault) {
      return { kind: 'retry', why: `the receiver could not be reached (${reasonOf(fault)})` }
    } finally {
      until.clear()
    }
  }
}

/** A code, not a message: driver messages name addresses. */
function reasonOf(fault: unknown): string {
  if (!(fault instanceof Error)) return 'unknown'
  if (fault.name === 'TimeoutError') return 'timeout'
  return 'code' in fault && typeof fault.code === 'string' ? fault.code : fault.name
}
