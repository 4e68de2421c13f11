/**
 * Bodies checked by any schema library that implements Standard Schema (standardschema.dev): zod, valibot, arktype and others.
 *
 * Such a schema may change the value: defaults, trimmed texts, dates. The queue stores the body as it came, and the schema
 * makes the handler's value from it each time, so that a direct and a queued run get the same.
 */
import { FailOperation } from '../core/outcome.js'
import { pointerStep, presentablePointer, type RequestFault } from './json-pointer.js'
import { faultsMax, type Validated } from './validation.js'

export interface StandardSchema<Input = unknown, Output = Input> {
  readonly '~standard': {
    readonly version: 1
    readonly vendor: string
    readonly validate: (value: unknown) => StandardResult<Output> | Promise<StandardResult<Output>>
    readonly types?: { readonly input: Input; readonly output: Output } | undefined
  }
}

type StandardResult<Output> =
  | { readonly value: Output; readonly issues?: undefined }
  | { readonly issues: readonly StandardIssue[] }

interface StandardIssue {
  readonly message: string
  readonly path?: readonly (PropertyKey | { readonly key: PropertyKey })[] | undefined
}

/** Schemas of some libraries are functions. */
export function isStandardSchema(schema: unknown): schema is StandardSchema {
  if ((typeof schema !== 'object' && typeof schema !== 'function') || schema === null) return false
  const standard: unknown = Reflect.get(schema, '~standard')
  return typeof standard === 'object' && standard !== null && typeof Reflect.get(standard, 'validate') === 'function'
}

export function standardValidator(
  schema: StandardSchema,
): (value: unknown) => Validated<unknown> | Promise<Validated<unknown>> {
  return (value) => {
    const result = schema['~standard'].validate(value)
    return result instanceof Promise ? result.then(toValidated) : toValidated(result)
  }
}

/** What the handler gets for a stored body. */
export async function restoreBody(schema: StandardSchema, stored: unknown): Promise<unknown> {
  const validated = await standardValidator(schema)(stored)
  if (validated.ok) return validated.value
  const faults = validated.errors.map(({ path, message }) => `${path} ${message}`.trim()).join('; ')
  throw new FailOperation(`the stored body does not fit the schema of this release: ${faults}`)
}

function toValidated(result: StandardResult<unknown>): Validated<unknown> {
  if (result.issues === undefined) return { ok: true, value: result.value }
  return { ok: false, errors: result.issues.slice(0, faultsMax).map(toFault) }
}

function toFault({ message, path = [] }: StandardIssue): RequestFault {
  const steps = path.map((step) => pointerStep(String(typeof step === 'object' ? step.key : step)))
  return { path: presentablePointer(steps.join('')), message }
}
