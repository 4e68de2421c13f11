/**
 * Reads a request's body into one buffer, within its limit and the budget (buffer-budget.ts). A body of known length takes its
 * space before a byte of it is read; a chunked one takes more as it grows.
 *
 * Pieces are copied as they come, never kept as a list: a body in pieces of one byte would otherwise take 200 times its size. A
 * chunked body grows by parts, not by larger copies of itself, which would wait for the garbage collector. The usual body comes in one
 * piece, which is used as it is.
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
/** A chunked body doubles up to here, then grows by as much. */
const partBytes = 1_048_576
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
  /** Filled one after the other, but for the last. */
  const parts: Buffer[] = []
  let room = 0
  let capacity = 0
  let size = 0
  const end = (problem: Problem | null): void => {
    request.off('data', take)
    request.off('end', finish)
    if (onCutOff !== undefined) request.off('error', onCutOff)
    done(problem, problem === null ? wholeOf(parts, size) : nothing)
  }
  const finish = (): void => end(length !== null && size !== length ? wrongLength : null)
  const take = (chunk: Buffer): void => {
    if (size + chunk.length > limit) return void end(bodyTooLarge)
    if (length !== null && size + chunk.length > length) return void end(wrongLength)
    if (size === 0 && chunk.length === length) {
      parts.push(chunk)
      size = length
      return
    }
    for (let at = 0; at < chunk.length; ) {
      if (room === 0) {
        room = length ?? Math.min(limit - capacity, Math.max(firstBytes, Math.min(partBytes, capacity)))
        capacity += room
        if (length === null && !hold.growTo(capacity)) return void end(buffers.noRoom)
        parts.push(Buffer.allocUnsafeSlow(room))
      }
      const part = parts[parts.length - 1] as Buffer
      const copied = chunk.copy(part, part.length - room, at)
      at += copied
      room -= copied
      size += copied
    }
  }
  request.on('data', take)
  request.on('end', finish)
  if (onCutOff !== undefined) request.on('error', onCutOff)
}

function wholeOf(parts: readonly Buffer[], size: number): Buffer {
  const [only] = parts
  if (only === undefined) return nothing
  if (parts.length > 1) return Buffer.concat(parts, size)
  return only.length === size ? only : only.subarray(0, size)
}
