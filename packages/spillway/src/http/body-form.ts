import type { Problem } from './problem.js'
import { parseStrictJson } from './strict-json.js'

/** Problems with a body's form, the same in every binding. */
export const bodyTooLarge: Problem = { code: 'body_too_large', detail: 'The body is larger than this route takes.' }
export const bodyCutOff: Problem = {
  code: 'invalid_request',
  detail: 'The body is not valid.',
  errors: [{ path: '', message: 'it was cut off' }],
}
export const notJson: Problem = { code: 'unsupported_media_type', detail: 'Send application/json.' }

export function isJson(contentType: string | null | undefined): boolean {
  return contentType?.split(';', 1)[0]?.trim().toLowerCase() === 'application/json'
}

/** Encoded, or in a charset other than UTF-8. */
export function bodyFormFault(
  contentType: string | null | undefined,
  contentEncoding: string | null | undefined,
): Problem | undefined {
  if (contentEncoding && contentEncoding.toLowerCase() !== 'identity') {
    return { code: 'unsupported_media_type', detail: 'Send the body without a content encoding.' }
  }
  if (!contentType?.includes(';')) return undefined
  const charset = /;\s*charset\s*=\s*"?([^\s;"]+)/i.exec(contentType)?.[1]?.toLowerCase()
  if (charset === undefined || charset === 'utf-8' || charset === 'utf8') return undefined
  return { code: 'unsupported_media_type', detail: 'Send JSON in UTF-8.' }
}

/** A body as the mount takes it. Without `text` it was parsed by somebody else. */
export type Body = { ok: true; value: unknown; text?: string } | { ok: false; problem: Problem }

/** No bytes are a request without a body, whatever its content type. */
export function parseBody(
  bytes: Uint8Array,
  contentType: string | null | undefined,
  contentEncoding: string | null | undefined,
): Body {
  if (bytes.byteLength === 0) return { ok: true, value: undefined }
  if (!isJson(contentType)) return { ok: false, problem: notJson }
  const formFault = bodyFormFault(contentType, contentEncoding)
  if (formFault !== undefined) return { ok: false, problem: formFault }
  const parsed = parseStrictJson(Buffer.from(bytes.buffer, bytes.byteOffset, bytes.byteLength))
  if (parsed.ok) return { ok: true, value: parsed.value, text: parsed.text }
  return { ok: false, problem: { code: 'invalid_request', detail: 'The body is not valid.', errors: [parsed.fault] } }
}
