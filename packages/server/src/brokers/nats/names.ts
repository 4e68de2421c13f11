/**
 * Names in the broker. The default subject has the plain names. Any other subject has separate names, so that routers
 * with different subjects can share one broker.
 */
import { createHash } from 'node:crypto'

export const defaultSubject = 'beamline.router.v1.decide'

export interface Names {
  readonly subject: string
  readonly deadSubject: string
  readonly stream: string
  readonly deadStream: string
  readonly consumer: string
}

export const headerNames = {
  messageId: 'Nats-Msg-Id',
  replyTo: 'Spillway-Reply-To',
  deadline: 'Spillway-Deadline',
  deadReason: 'Spillway-Dead-Reason',
  deadDetail: 'Spillway-Dead-Detail',
  deadDeliveries: 'Spillway-Dead-Deliveries',
  diedAt: 'Spillway-Dead-Died-At',
} as const

/** Headers with this prefix say how the message died and are not part of the original. */
export const deadPrefix = 'spillway-dead-'

const token = /^[^\s.*>$][^\s.*>]*$/
const readableLength = 40

export function namesFor(subject: string): Names {
  if (!subject.split('.').every((part) => token.test(part))) {
    throw new TypeError(`${JSON.stringify(subject)} is no subject to publish to: words with dots between, no wildcards`)
  }
  const stream = `SPILLWAY_ROUTER${subject === defaultSubject ? '' : `_${streamSuffix(subject)}`}`
  return {
    subject,
    deadSubject: `${subject}.dlq`,
    stream,
    deadStream: `${stream}_DLQ`,
    consumer: 'spillway-router',
  }
}

/** Readable, plus a digest: a stream name may be shorter than a subject. */
function streamSuffix(subject: string): string {
  const readable = subject.replace(/[^A-Za-z0-9]/g, '_').slice(0, readableLength)
  return `${readable}_${createHash('sha256').update(subject).digest('hex').slice(0, 8)}`
}
