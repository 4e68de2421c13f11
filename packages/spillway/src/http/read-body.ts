/**
 * Reads a request's body into one buffer, within its limit and the budget (buffer-budget.ts). A body of known length takes its
 * space before a byte of it is read; a chunked one takes more as it grows.
 *
 * Pieces are copied into the buffer as they come, never kept as a list: a body in pieces of one byte would otherwise take 200 times
 * its size. The usual body comes in one piece, which is used as it is.
 */
import type { IncomingMessage, ServerResponse } from 'node:http'
import { bodyTooLarge } from './body-form.js'
import type { Buffers } from './buffers.js'
import type { Problem } from './problem.js'

export interface BodyToRead {
  request: IncomingMessage
  response: ServerResponse
  limitBytes: number
  identity: string
  /** May use the reserve whatever its size. */
  isAck: boolean
}

export type BodyRead = (problem: Problem | null, body: Buffer) => void

const firstBytes = 4_096
const nothing = Buffer.alloc(0)

const wrongLength: Problem = {
  code: 'invalid_request',
  detail: 'The body is not valid.',
  errors: [{ path: '', message: 'its length is not what Content-Length says' }],
}

/** `done` is not called for a body that is cut off: there is nobody to answer. `onCutOff` is, if given. */
export function readBody(
  buffers: Buffers,
  { request, response, limitBytes, identity, isAck }: BodyToRead,
  done: BodyRead,
  onCutOff?: (fault: Error) => void,
): void {
  const header = request.headers['content-length']
  const length = header === undefined ? null : Number(header)
  const limit = Math.min(limitBytes, buffers.budget.share)
  if (length !== null && length > limit) return void done(bodyTooLarge, nothing)
  const hold = buffers.holdBody(request, response, identity, length ?? 0, isAck)
  if (hold === null) return void done(buffers.noRoom, nothing)
  let body: Buffer = nothing
  let size = 0
  const end = (problem: Problem | null): void => {
    request.off('data', take)
    request.off('end', finish)
    if (onCutOff !== undefined) request.off('error', onCutOff)
    done(problem, problem === null && size < body.length ? body.subarray(0, size) : body)
  }
  const finish = (): void => end(length !== null && size !== length ? wrongLength : null)
  const take = (chunk: Buffer): void => {
    const needed = size + chunk.length
    if (needed > limit) return void end(bodyTooLarge)
    if (size === 0 && needed === length) {
      body = chunk
      size = needed
      return
    }
    if (needed > body.length) {
      if (length !== null && needed > length) return void end(wrongLength)
      const capacity = length ?? Math.min(limit, Math.max(firstBytes, needed, 2 * body.length))
      if (length === null && !hold.growTo(capacity)) return void end(buffers.noRoom)
      const larger = Buffer.allocUnsafeSlow(capacity)
      body.copy(larger, 0, 0, size)
      body = larger
    }
    chunk.copy(body, size)
    size = needed
  }
  request.on('data', take)
  request.on('end', finish)
  if (onCutOff !== undefined) request.on('error', onCutOff)
}
