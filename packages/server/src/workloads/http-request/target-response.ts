import type { ForwardResult } from '@spillway/protocol/wire'
import { isUnstorable, parseStrictJson } from 'spillway/workload'

/** Limits for the stored headers of an answer. */
const headersMax = 32
const headerCharactersMax = 1_024
const headersCharactersMax = 8_192

/** Headers of the connection, and secrets of a session that the caller must not keep. */
const droppedHeaders = new Set([
  'connection',
  'keep-alive',
  'proxy-authenticate',
  'proxy-connection',
  'set-cookie',
  'trailer',
  'transfer-encoding',
  'upgrade',
])

export type ResponseHeaders = Record<string, string | string[] | undefined>

/** PostgreSQL's jsonb takes neither NUL nor lone surrogates; both become U+FFFD. */
function storableText(text: string): string {
  if (!isUnstorable(text)) return text
  return text.replaceAll('\0', '\ufffd').replaceAll(/\p{Surrogate}/gu, '\ufffd')
}

/** The parser has limited the nesting before this is called. */
function storableValue(value: unknown): unknown {
  if (typeof value === 'string') return storableText(value)
  if (Array.isArray(value)) return value.map(storableValue)
  if (typeof value === 'number' && !Number.isFinite(value)) return String(value)
  if (typeof value !== 'object' || value === null) return value
  // fromEntries defines members, so that one named __proto__ stays a member.
  return Object.fromEntries(Object.entries(value).map(([name, member]) => [storableText(name), storableValue(member)]))
}

export function keptHeaders(headers: ResponseHeaders): Record<string, string> {
  const kept: [string, string][] = []
  let characters = 0
  for (const [name, value] of Object.entries(headers)) {
    if (value === undefined || droppedHeaders.has(name)) continue
    const text = storableText(Array.isArray(value) ? value.join(', ') : value)
    if (text.length > headerCharactersMax) continue
    characters += name.length + text.length
    if (kept.length === headersMax || characters > headersCharactersMax) break
    kept.push([storableText(name), text])
  }
  return Object.fromEntries(kept)
}

function isJson(contentType: string | undefined): boolean {
  return contentType !== undefined && /^application\/(?:[\w.+-]+\+)?json\s*(?:;|$)/i.test(contentType)
}

/** JSON as a value if it is complete and can be stored; otherwise text, with invalid UTF-8 replaced. */
function keptBody(bytes: Buffer, contentType: string | undefined, truncated: boolean): unknown {
  if (bytes.length === 0) return null
  if (isJson(contentType) && !truncated) {
    const parsed = parseStrictJson(bytes)
    if (parsed.ok) return parsed.value
    // Well-formed and shallow, but with NUL, surrogates or __proto__ in it: stored after a repair.
    if (parsed.reason === 'character' || parsed.reason === 'member') return storableValue(JSON.parse(bytes.toString()))
  }
  // With `stream` a character that the limit cuts in two is dropped instead of replaced.
  return storableText(new TextDecoder().decode(bytes, { stream: truncated }))
}

export interface ReadBody {
  bytes: Buffer
  truncated: boolean
}

/** Reads at most `bytesMax` bytes. If there are more, leaving the loop destroys the stream and its connection. */
export async function readBounded(body: AsyncIterable<Uint8Array>, bytesMax: number): Promise<ReadBody> {
  const chunks: Uint8Array[] = []
  let length = 0
  for await (const chunk of body) {
    chunks.push(chunk)
    length += chunk.length
    if (length > bytesMax) break
  }
  return { bytes: Buffer.concat(chunks).subarray(0, bytesMax), truncated: length > bytesMax }
}

export function forwardResult(status: number, headers: ResponseHeaders, { bytes, truncated }: ReadBody): ForwardResult {
  const contentType = headers['content-type']
  const body = keptBody(bytes, Array.isArray(contentType) ? contentType[0] : contentType, truncated)
  const result: ForwardResult = { status, headers: keptHeaders(headers), body }
  if (truncated) result.truncated = true
  return result
}
