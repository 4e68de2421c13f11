/**
 * Reads a request's body into one buffer, within its limit and the budget (buffer-budget.ts). A body of known length takes its
 * space before a byte is read; a chunked one takes more as it grows.
 *
 * A body of known length is copied into its place. Of a chunked body, large pieces are kept as they are and small ones are
 * copied into blocks: a list of one-byte pieces would take 200 times their size, and copies of large ones would leave as
 * much garbage as there is body. The usual body comes in one piece, which is used as it is.
 */
import type { IncomingMessage, ServerResponse } from 'node:http'
import type { Problem } from 'spillway/workload'
import { bodyTooLarge } from 'spillway/workload'
import type { Buffers } from './buffers.js'

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
/** The blocks of a chunked body double up to here. */
const blockBytesMax = 1_048_576
/** Each piece has an overhead of some 200 bytes. */
const keptBytesMin = 8_192
const nothing = Buffer.alloc(0)

const wrongLength: Problem = {
  code: 'invalid_request',
  detail: 'The body is not valid.',
  errors: [{ path: '', message: 'its length is not what Content-Length says' }],
}

/** For a body that is cut off, `onCutOff` is called instead of `done`: there is nobody to answer. */
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
  const parts: Buffer[] = []
  let block = nothing
  /** Bytes of the block that are filled, and the part of them already among the parts. */
  let filled = 0
  let listed = 0
  let capacity = 0
  let size = 0
  const list = (): void => {
    if (filled > listed) parts.push(block.subarray(listed, filled))
    listed = filled
  }
  const end = (problem: Problem | null): void => {
    request.off('data', take)
    request.off('end', finish)
    if (onCutOff !== undefined) request.off('error', onCutOff)
    list()
    done(problem, problem === null ? wholeOf(parts, size) : nothing)
  }
  const finish = (): void => end(length !== null && size !== length ? wrongLength : null)
  const mayGrow = (bytes: number): boolean => {
    capacity += bytes
    return length !== null || hold.growTo(capacity)
  }
  const take = (chunk: Buffer): void => {
    if (size + chunk.length > limit) return void end(bodyTooLarge)
    if (length !== null && size + chunk.length > length) return void end(wrongLength)
    const isKept = chunk.length === length || (length === null && chunk.length >= keptBytesMin)
    if (isKept) {
      list()
      if (!mayGrow(chunk.length)) return void end(buffers.noRoom)
      parts.push(chunk)
      size += chunk.length
      return
    }
    for (let at = 0; at < chunk.length; ) {
      if (filled === block.length) {
        list()
        const bytes = length ?? Math.min(limit - size, Math.max(firstBytes, Math.min(blockBytesMax, block.length * 2)))
        if (!mayGrow(bytes)) return void end(buffers.noRoom)
        block = Buffer.allocUnsafeSlow(bytes)
        filled = 0
        listed = 0
      }
      const copied = chunk.copy(block, filled, at)
      at += copied
      filled += copied
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
