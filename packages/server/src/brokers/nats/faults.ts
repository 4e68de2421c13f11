import { JetStreamApiError } from '@nats-io/jetstream'
import { errors } from '@nats-io/transport-node'

export type BrokerFaultCode = 'unavailable' | 'timeout' | 'too_large' | 'aborted'

/** The outcome of the publish is unknown, except `too_large` and `unavailable` before sending: nothing was published. */
export class BrokerFault extends Error {
  override readonly name = 'BrokerFault'
  readonly code: BrokerFaultCode

  constructor(code: BrokerFaultCode, message: string, options?: ErrorOptions) {
    super(message, options)
    this.code = code
  }
}

/** The server's error codes. */
export const apiCodes = {
  consumerNotFound: 10014,
  messageNotFound: 10037,
  sequenceNotFound: 10043,
  messageTooLarge: 10054,
  messageDeleteFailed: 10057,
  streamNameInUse: 10058,
  streamNotFound: 10059,
  streamSubjectsOverlap: 10065,
  consumerNameInUse: 10013,
  consumerExists: 10148,
  consumerReplacedMeanwhile: 10149,
} as const

export function isApiFault(error: unknown, ...codes: number[]): boolean {
  return error instanceof JetStreamApiError && codes.includes(error.code)
}

/** Converts the driver's error. */
export function asBrokerFault(error: unknown, doing: string): BrokerFault {
  if (error instanceof BrokerFault) return error
  const timedOut = error instanceof errors.TimeoutError
  return new BrokerFault(timedOut ? 'timeout' : 'unavailable', `the broker did not ${doing}`, { cause: error })
}
