import { type OpenAiError, type ProblemCode, problems } from '@spillway/protocol/wire'
import type { RequestFault } from './json-pointer.js'

/** A problem in OpenAI's form. */
interface ProblemParts {
  code: ProblemCode
  /** Default: the status of the code. */
  status?: number
  detail: string
  errors?: readonly RequestFault[]
}

/** OpenAI's own names for codes that its clients know; every other code stays as it is. */
const knownCodes: Partial<Record<ProblemCode, string>> = {
  unauthenticated: 'invalid_api_key',
  rate_limited: 'rate_limit_exceeded',
}

/** The error classes of OpenAI's SDKs depend on the status alone; `type` is for people and for clients that switch on it. */
function errorType(status: number): string {
  switch (status) {
    case 401:
      return 'authentication_error'
    case 403:
      return 'permission_error'
    case 429:
      return 'rate_limit_error'
    default:
      return status >= 500 ? 'server_error' : 'invalid_request_error'
  }
}

/** A JSON pointer in OpenAI's notation: `messages[0].role`. Null for the whole body. */
export function memberOf(pointer: string): string | null {
  let member = ''
  for (const step of pointer.split('/').slice(1)) {
    const name = step.replaceAll('~1', '/').replaceAll('~0', '~')
    if (/^\d+$/.test(name)) member += `[${name}]`
    else member += member === '' ? name : `.${name}`
  }
  return member === '' ? null : member
}

/** A problem in OpenAI's form, as an answer and within a stream. It has room for one fault, so the first is used. */
export function openAiErrorOf({ status, code, detail, errors }: ProblemParts): OpenAiError {
  const [fault] = errors ?? []
  const param = fault === undefined ? null : memberOf(fault.path)
  const message =
    fault === undefined ? detail : `${detail.replace(/\.$/, '')}: ${param === null ? '' : `${param} `}${fault.message}.`
  return { message, type: errorType(status ?? problems[code].status), param, code: knownCodes[code] ?? code }
}
