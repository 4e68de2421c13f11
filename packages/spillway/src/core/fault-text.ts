/**
 * What was thrown, for operators: the stacks of an error and of its causes. Not the other members of an error: a driver's
 * error may hold its connection, with the password.
 */
import { inspect } from 'node:util'

const causesMax = 5

export function faultText(fault: unknown): string {
  try {
    return textOf(fault, 0)
  } catch {
    // A getter that throws.
    return `a ${typeof fault} that cannot be shown`
  }
}

function textOf(fault: unknown, depth: number): string {
  if (typeof fault === 'string') return fault
  const { stack, cause, errors } = Object(fault) as { stack?: unknown; cause?: unknown; errors?: unknown }
  if (typeof stack !== 'string' || stack === '') {
    return inspect(fault, { depth: 3, maxStringLength: 1_000, maxArrayLength: 20, breakLength: 120 })
  }
  const causes = [...(cause === undefined ? [] : [cause]), ...(Array.isArray(errors) ? errors : [])]
  if (causes.length === 0 || depth === causesMax) return stack
  return [stack, ...causes.slice(0, causesMax).map((each) => `caused by: ${textOf(each, depth + 1)}`)].join('\n')
}
