/**
 * Names in the broker. The default subject has the plain names. Any other subject has separate names, so that routers
 * with different subjects can share one broker.
 */
import { digestUuid } from 'spillway/workload'

export const defaultSubject = 'beamline.router.v1.decide'

export type Names = ReturnType<typeof namesFor>

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

export function namesFor(subject: string) {
  if (!subject.split('.').every((part) => token.test(part))) {
    throw new TypeError(`${JSON.stringify(subject)} is no subject to publish to: words with dots between, no wildcards`)
  }
  const stream = `SPILLWAY_ROUTER${subject === defaultSubject ? '' : `_${digestUuid(subject)}`}`
  return {
    subject,
    deadSubject: `${subject}.dlq`,
    stream,
    deadStream: `${stream}_DLQ`,
    consumer: 'spillway-router',
  }
}
