/** Gates without an operation: an exact rate for work that the intake does not run, for example a call that is passed on. */
import type { AdmitFlush } from '../accept/accepting.js'
import type { Gate, GateRequest } from '../gates/gate.js'
import type { Pipeline } from './pipeline.js'
import type { RateStatus, Refusal } from './refusal.js'
import type { BoundGates } from './submission.js'

export interface AdmissionOptions<Body> {
  /** `pressure`, `halt` and `rate`. The others hold something for an operation, and an admission has none. */
  gates: readonly Gate<Body>[]
}

/** From `intake.admission`. */
export interface Admission<Body = unknown> {
  readonly name: string
  /**
   * Passes all gates, or says why not. Rates are counted in the database, exactly, over all instances; requests that arrive
   * together share a transaction. Nothing else is written.
   */
  admit(request: GateRequest, body: Body): Promise<AdmissionAnswer>
}

export type AdmissionAnswer = { kind: 'admitted'; rate?: RateStatus } | { kind: 'refused'; refusal: Refusal }

export interface BoundAdmission extends BoundGates {
  readonly flush: AdmitFlush
}

const kinds: ReadonlySet<string> = new Set(['pressure', 'halt', 'rate'])

/** Throws if one of the gates would hold something. */
export function requireNothingHeld(name: string, gates: readonly { kind: string }[]): void {
  const wrong = gates.find(({ kind }) => !kinds.has(kind))
  if (wrong !== undefined) throw new Error(`The admission ${name} has a ${wrong.kind} gate, which needs an operation.`)
}

export class GateAdmission implements Admission {
  readonly bound: BoundAdmission
  readonly #pipeline: Pipeline

  constructor(bound: BoundAdmission, pipeline: Pipeline) {
    this.bound = bound
    this.#pipeline = pipeline
  }

  get name(): string {
    return this.bound.type
  }

  admit(request: GateRequest, body: unknown): Promise<AdmissionAnswer> {
    return this.#pipeline.admit(this.bound, request, body)
  }
}
