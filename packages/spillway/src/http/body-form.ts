import type { Problem } from './problem.js'

/** Problems with a body's form, the same in every binding. */
export const bodyTooLarge: Problem = { code: 'body_too_large', detail: 'The body is larger than this route takes.' }
export const notJson: Problem = { code: 'unsupported_media_type', detail: 'Send application/json.' }

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
