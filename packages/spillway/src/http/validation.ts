import type { FastifySchemaCompiler } from 'fastify'
import type { TSchema } from 'typebox'
import type { Validator } from 'typebox/compile'
import type { TLocalizedValidationError } from 'typebox/error'
import { OptionError, shown } from '../core/options.js'
import type { BodySchema, DefineOptions, IntakeRequest } from '../intake/define.js'
import type { Bound, ParsedBody } from '../intake/submission.js'
import { pointerStep, presentablePointer, type RequestFault } from './json-pointer.js'
import { isStandardSchema, standardValidator } from './standard-schema.js'
import { convertTexts } from './text-values.js'

type Typebox = typeof import('typebox/compile')

/** Null until typebox.ts is imported, and if the package is not installed. */
let typebox: Typebox | null = null

export function useTypebox(found: Typebox): void {
  typebox = found
}

export function requireTypebox(what = 'a body schema'): Typebox {
  if (typebox === null) throw new Error(`${what} needs the package typebox: npm i typebox`)
  return typebox
}

/**
 * Validation with compiled TypeBox schemas. An object schema without `additionalProperties` is closed here (an unknown
 * member is a 400); one with `additionalProperties: true` is open. Parts of an intersection stay unchanged: closing each of
 * them would refuse the members of the others.
 */
export function closeSchema<Schema extends TSchema>(schema: Schema): Schema {
  return closed(schema) as Schema
}

function isRecord(value: unknown): value is Record<string, unknown> {
  return typeof value === 'object' && value !== null && !Array.isArray(value)
}

function closed(schema: unknown): unknown {
  if (!isRecord(schema)) return schema
  const changes: Record<string, unknown> = {}
  if (isRecord(schema.properties)) {
    changes.properties = Object.fromEntries(
      Object.entries(schema.properties).map(([name, member]) => [name, closed(member)]),
    )
    if (schema.additionalProperties === undefined) changes.additionalProperties = false
  }
  if (Array.isArray(schema.items)) changes.items = schema.items.map(closed)
  else if (isRecord(schema.items)) changes.items = closed(schema.items)
  for (const alternatives of ['anyOf', 'oneOf'] as const) {
    const members = schema[alternatives]
    if (Array.isArray(members)) changes[alternatives] = members.map(closed)
  }
  // A copy with its hidden members (~kind, ~optional), which the compiler and Convert read.
  const copy: object = Object.create(Object.getPrototypeOf(schema), Object.getOwnPropertyDescriptors(schema))
  for (const [name, value] of Object.entries(changes)) {
    Object.defineProperty(copy, name, { value, enumerable: true, configurable: true, writable: true })
  }
  return copy
}

/** Maximum number of faults in an answer. */
export const faultsMax = 20

function faultsOf(error: TLocalizedValidationError): RequestFault[] {
  const at = (names: readonly string[], message: string) =>
    names.map((name) => ({ path: `${error.instancePath}${pointerStep(name)}`, message }))
  switch (error.keyword) {
    case 'required':
      return at(error.params.requiredProperties, 'is required')
    case 'additionalProperties':
      return at(error.params.additionalProperties, 'is not a known member')
    case 'boolean':
      return [{ path: error.instancePath, message: 'is not a known member' }]
    case 'enum':
      return [{ path: error.instancePath, message: `must be one of ${list(error.params.allowedValues)}` }]
    case 'const':
      return [{ path: error.instancePath, message: `must be ${JSON.stringify(error.params.allowedValue)}` }]
    case 'anyOf':
      return [{ path: error.instancePath, message: 'must match one of the allowed forms' }]
    default:
      return [{ path: error.instancePath, message: error.message }]
  }
}

function list(values: readonly unknown[]): string {
  return values.map((value) => JSON.stringify(value)).join(', ')
}

export function requestFaults(errors: readonly TLocalizedValidationError[]): RequestFault[] {
  const faults = new Map<string, RequestFault>()
  for (const fault of errors.flatMap(faultsOf)) {
    const path = presentablePointer(fault.path)
    faults.set(`${path} ${fault.message}`, { path, message: fault.message })
    if (faults.size === faultsMax) break
  }
  return [...faults.values()]
}

export type Validated<Value> = { ok: true; value: Value } | { ok: false; errors: RequestFault[] }

/** A validator for use outside routes: a workload's payload, the body of a user's own definition. Compiled at first use. */
export function compileValidator<Schema extends TSchema>(
  schema: Schema,
): (value: unknown) => Validated<ReturnType<Validator<Record<never, never>, Schema>['Parse']>> {
  let compiled: Validator<Record<never, never>, Schema> | undefined
  return (value) => {
    compiled ??= requireTypebox().Compile(closeSchema(schema))
    return compiled.Check(value) ? { ok: true, value } : { ok: false, errors: requestFaults(compiled.Errors(value)) }
  }
}

const takeAny = (value: unknown): Validated<unknown> => ({ ok: true, value })

/** TypeBox marks its schemas with these members. */
const isTypeboxSchema = (schema: unknown): schema is TSchema =>
  typeof schema === 'object' && schema !== null && ('~kind' in schema || '~unsafe' in schema)

function validatorOf(call: string, schema: BodySchema | undefined): (value: unknown) => Awaitable<Validated<unknown>> {
  if (schema === undefined) return takeAny
  if (isStandardSchema(schema)) return standardValidator(schema)
  if (isTypeboxSchema(schema)) {
    requireTypebox()
    return compileValidator(schema)
  }
  throw new OptionError(
    `${call}: body must be a schema of TypeBox or of a library with Standard Schema (zod, valibot, arktype); given: ${shown(schema)}`,
  )
}

type Awaitable<T> = T | Promise<T>

/** The schema and the `check` of a definition. */
export function bodyParser(call: string, options: DefineOptions<BodySchema, unknown>): Bound['parse'] {
  const validate = validatorOf(call, options.body)
  const judged = (valid: Validated<unknown>, request: IntakeRequest): Awaitable<ParsedBody> => {
    if (!valid.ok) {
      return { ok: false, problem: { code: 'invalid_request', detail: 'The body is not valid.', errors: valid.errors } }
    }
    const checked = options.check?.(valid.value, request) ?? null
    if (checked === null) return valid
    if (!(checked instanceof Promise)) return { ok: false, problem: checked }
    return checked.then((problem) => (problem === null ? valid : { ok: false, problem }))
  }
  return (body, request) => {
    const valid = validate(body)
    return valid instanceof Promise ? valid.then((value) => judged(value, request)) : judged(valid, request)
  }
}

/** Thrown through Fastify's validation into the error handler, which answers 400. */
export class InvalidRequest extends Error {
  readonly code = 'invalid_request'
  readonly errors: readonly RequestFault[]

  constructor(errors: readonly RequestFault[]) {
    super('The request is not valid.')
    this.errors = errors
  }
}

/**
 * Bodies are checked unchanged. Text values (query, path, headers) are converted first, and stay open: an unknown query
 * parameter or header is no error.
 */
export const validatorCompiler: FastifySchemaCompiler<TSchema> = ({ schema, httpPart }) => {
  const isBody = httpPart === 'body'
  const validator = requireTypebox().Compile(isBody ? closeSchema(schema) : schema)
  return (value: unknown) => {
    if (isBody) {
      if (validator.Check(value)) return { value }
      if (value === undefined || value === null) {
        return { error: new InvalidRequest([{ path: '', message: 'a JSON body is required' }]) }
      }
      return { error: new InvalidRequest(requestFaults(validator.Errors(value))) }
    }
    const converted = convertTexts(schema, value)
    if (validator.Check(converted)) return { value: converted }
    return { error: new InvalidRequest(requestFaults(validator.Errors(converted))) }
  }
}
