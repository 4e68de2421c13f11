import { ForwardPayload } from '@spillway/protocol/schema'
import { limits } from '@spillway/protocol/wire'
import { compileValidator, pointerStep, presentablePointer, type RequestFault } from 'spillway/workload'
import type { Static } from 'typebox'

/** A call ready to be made: the result of `validateForwardPayload`. */
export interface ForwardRequest {
  url: string
  method: NonNullable<Static<typeof ForwardPayload>['method']>
  headers: Readonly<Record<string, string>>
  /** Undefined: no body. Otherwise any JSON value, including null; a CarriedJson is sent as it came. */
  body?: unknown
}

export type ForwardPayloadResult =
  | { ok: true; request: ForwardRequest; url: URL }
  | { ok: false; errors: RequestFault[] }

/**
 * Headers that a caller cannot set: those of the connection (RFC 9110 §7.6.1), those that frame the message, and those
 * that Spillway sets.
 */
const reservedHeaders = new Set([
  'connection',
  'keep-alive',
  'proxy-authenticate',
  'proxy-authorization',
  'proxy-connection',
  'te',
  'trailer',
  'transfer-encoding',
  'upgrade',
  'host',
  'content-length',
  'expect',
  'accept-encoding',
  'idempotency-key',
  'traceparent',
])

const headerName = /^[!#$%&'*+.^_`|~0-9A-Za-z-]+$/
/** Visible ASCII, spaces and tabs, and the upper half of Latin-1: Node writes these unchanged. */
const headerValue = /^[\t\x20-\x7e\x80-\xff]*$/

const validateShape = compileValidator(ForwardPayload)

const urlsMax = 1_000
const urlCharactersMax = 500
const urls = new Map<string, URL | null>()

/** Cached: callers repeat their targets, and parsing a URL costs as much as all other checks. */
function parseUrl(text: string): URL | null {
  const known = urls.get(text)
  if (known !== undefined) return known
  const url = URL.canParse(text) ? new URL(text) : null
  if (text.length > urlCharactersMax) return url
  if (urls.size >= urlsMax) urls.clear()
  urls.set(text, url)
  return url
}

function urlFault(url: URL | null): string | undefined {
  if (url === null) return 'must be an absolute URL'
  if (url.protocol !== 'http:' && url.protocol !== 'https:') return 'must be an http or https URL'
  if (url.username !== '' || url.password !== '') return 'must not contain credentials'
  return undefined
}

function headerFault(name: string, value: string): string | undefined {
  if (!headerName.test(name)) return 'is not a header name'
  if (reservedHeaders.has(name.toLowerCase())) return 'is set by Spillway'
  if (value.length > limits.forwardHeaderValueCharacters) return 'is too long'
  if (!headerValue.test(value)) return 'is not a header value'
  return undefined
}

/** Checks a payload of `http.request` at accept time, so that a call that can never be made gets a 400. */
export function validateForwardPayload(payload: unknown): ForwardPayloadResult {
  const shape = validateShape(payload)
  if (!shape.ok) return shape
  const { url, method = 'POST', headers = {}, body } = shape.value
  const errors: RequestFault[] = []
  const note = (path: string, message: string | undefined) => {
    if (message !== undefined) errors.push({ path: presentablePointer(path), message })
  }
  const parsed = parseUrl(url)
  note('/url', urlFault(parsed))
  const entries = Object.entries(headers)
  if (entries.length > limits.forwardHeaders) note('/headers', `has more than ${limits.forwardHeaders} headers`)
  else for (const [name, value] of entries) note(`/headers${pointerStep(name)}`, headerFault(name, value))
  if (entries.length > 1 && new Set(entries.map(([name]) => name.toLowerCase())).size < entries.length) {
    note('/headers', 'names a header twice')
  }
  if (body !== undefined && (method === 'GET' || method === 'HEAD')) note('/body', `is not sent with ${method}`)
  if (errors.length > 0 || parsed === null) return { ok: false, errors }
  const lowerCased = Object.fromEntries(entries.map(([name, value]) => [name.toLowerCase(), value]))
  return {
    ok: true,
    url: parsed,
    request: { url, method, headers: lowerCased, ...(body === undefined ? {} : { body }) },
  }
}
