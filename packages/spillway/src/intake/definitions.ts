/** The operations and admissions of an intake, with their gates bound to it. */
import { type Accepting, type AdmitFlush, type Apply, type Effect, queuedApply } from '../accept/accepting.js'
import { check, checkOptions, OptionError, type Rule } from '../core/options.js'
import type { IntakeSettings } from '../core/settings.js'
import { type BoundGate, type Gate, type GateBinding, gateOrder } from '../gates/gate.js'
import { isStandardSchema, restoreBody } from '../http/standard-schema.js'
import { bodyParser } from '../http/validation.js'
import type { Pulse, Store } from '../store/port.js'
import { type Attempt, traced } from '../work/attempt.js'
import type { SlotGroups } from '../work/slot-groups.js'
import { type Admission, type AdmissionOptions, GateAdmission, requireNothingHeld } from './admission.js'
import type { BodySchema, DefineOptions, Definition, Identify, InputOf } from './define.js'
import { checkDefinition, isGateList } from './define-rules.js'
import type { Pipeline } from './pipeline.js'
import type { Bound } from './submission.js'

/** Queued operations whose effect is a function in the store are applied in batches of at most this many. */
const togetherMax = 500

export interface DefinitionsOptions {
  store: Store
  settings: IntakeSettings
  slotGroups: SlotGroups
  accepting: Accepting
  pipeline: Pipeline
  /** For definitions without one of their own. */
  identity: Identify | undefined
  binding: Omit<GateBinding, 'type'>
}

export class Definitions {
  readonly #o: DefinitionsOptions
  readonly #bound = new Map<string, Bound>()
  readonly #admissions = new Map<string, GateAdmission>()
  #admitFlush: AdmitFlush | undefined

  constructor(options: DefinitionsOptions) {
    this.#o = options
  }

  define<S extends BodySchema, Result>(
    type: string,
    options: DefineOptions<S, Result>,
  ): Definition<InputOf<S>, Result> {
    const call = `define(${JSON.stringify(type)})`
    this.#requireNew(call, type)
    const given = options as unknown as DefineOptions<BodySchema, unknown>
    checkDefinition(call, given)
    const open = this.#identified(given)
    const parse = bodyParser(call, open)
    const { store, settings, slotGroups, accepting } = this.#o
    const gates = this.#bindGates(type, open.gates ?? [])
    const apply = open.apply as Apply | Effect | undefined
    const slots = slotGroups.slots(open.slots)
    const flush = apply === undefined ? slots.flush : accepting.applying(apply, open.pendingMax)
    this.#bound.set(type, { type, options: open, gates, flush, slots, parse })
    slotGroups.handle(type, slots, {
      backoff: open.retry ?? { baseMs: settings.retryBaseMs, maxMs: settings.retryMaxMs },
      ...(open.run && { run: traced(type, restoring(restorer(open.body), open.run as never)) }),
      ...(open.ready && { ready: open.ready }),
      ...(typeof open.lane === 'object' && { takesTurns: true }),
      ...(open.announces && { announces: open.announces }),
      ...(apply && {
        apply: queuedApply(store, apply, restorer(open.body)),
        ...(typeof apply !== 'function' && { together: togetherMax }),
      }),
    })
    return { type }
  }

  admission<Body>(name: string, options: AdmissionOptions<Body>): Admission<Body> {
    const call = `admission(${JSON.stringify(name)})`
    this.#requireNew(call, name)
    checkOptions(call, options, { gates: isGateList })
    requireNothingHeld(name, options.gates)
    this.#admitFlush ??= this.#o.accepting.admissions()
    const flush = this.#admitFlush
    const gates = this.#bindGates(name, options.gates as readonly Gate<unknown>[])
    const slots = this.#o.slotGroups.general
    const bound = { type: name, gates, flush, slots, options: this.#identified({ whenBusy: 'refuse' as const }) }
    const admission = new GateAdmission(bound, this.#o.pipeline)
    this.#admissions.set(name, admission)
    return admission
  }

  find(type: string): Bound | undefined {
    return this.#bound.get(type)
  }

  get(definition: Definition): Bound {
    const bound = this.#bound.get(definition.type)
    if (bound === undefined) throw new Error(`The operation type ${definition.type} is not defined on this intake.`)
    return bound
  }

  get typesWithIdentity(): string[] {
    const own = [...this.#bound.values()].filter(({ options: { identity } }) => identity !== this.#o.identity)
    return own.map(({ type }) => type)
  }

  #identified<Options extends object>(options: Options & { identity?: Identify }): Options & { identity?: Identify } {
    const { identity } = this.#o
    return options.identity === undefined && identity !== undefined ? { ...options, identity } : options
  }

  get abortableTypes(): string[] {
    return [...this.#bound.values()].filter((d) => d.options.abortable === true).map((d) => d.type)
  }

  freed(capacity: string): void {
    for (const { gates } of this.#bound.values()) for (const gate of gates) gate.freed?.(capacity)
  }

  /** What the gates remember. */
  forget(): void {
    const all = [...this.#bound.values(), ...[...this.#admissions.values()].map(({ bound }) => bound)]
    for (const { gates } of all) for (const gate of gates) gate.forget?.()
  }

  observe(pulse: Pulse): void {
    for (const { gates } of this.#bound.values()) for (const gate of gates) gate.observe?.(pulse)
    for (const { bound } of this.#admissions.values()) for (const gate of bound.gates) gate.observe?.(pulse)
  }

  #requireNew(call: string, name: string): void {
    check(call, 'the name', name, isDefinitionName)
    if (this.#bound.has(name) || this.#admissions.has(name)) {
      throw new OptionError(`${call}: ${name} is defined already on this intake`)
    }
  }

  #bindGates(type: string, gates: readonly Gate<unknown>[]): BoundGate<unknown>[] {
    const binding: GateBinding = { ...this.#o.binding, type }
    return gates.map((gate) => gate.bind(binding)).sort((a, b) => gateOrder.indexOf(a.kind) - gateOrder.indexOf(b.kind))
  }
}

const isDefinitionName: Rule = (name) =>
  typeof name === 'string' && /^[A-Za-z0-9][A-Za-z0-9._-]{0,99}$/.test(name)
    ? null
    : '1 to 100 letters, digits, dots, dashes or underscores, a letter or digit first'

type Run = (body: unknown, attempt: Attempt, text: string) => unknown

type Restore = (stored: unknown) => Promise<unknown>

/** What the schema makes of a stored body. Undefined: the body as it is. */
const restorer = (schema: BodySchema | undefined): Restore | undefined =>
  isStandardSchema(schema) ? (stored) => restoreBody(schema, stored) : undefined

const restoring = (restore: Restore | undefined, run: Run): Run =>
  restore === undefined ? run : async (stored, attempt, text) => run(await restore(stored), attempt, text)
