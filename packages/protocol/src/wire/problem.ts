import type { ProblemCode } from './codes.js'

/** RFC 9457 problem document: the body of every error. */
export interface ProblemDocument {
  type: string
  title: string
  status: number
  detail: string
  /** The request's path, without host or query. */
  instance: string
  code: ProblemCode
  trace_id: string
  /** On every 429 and 503; equal to the Retry-After header. */
  retry_after_seconds?: number
  /** On 400: what is wrong and where. */
  errors?: { path: string; message: string }[]
  [extension: string]: unknown
}
