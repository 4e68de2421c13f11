import type {
  DecideAnswer,
  DryRunResult,
  OperationView,
  Policy,
  PolicyView,
  ProblemCode,
  QueuedAnswer,
  RouteRefusal,
  RouteTask,
} from '@spillway/protocol/wire'
import { segment } from '../checks.js'
import { SpillwayError } from '../error.js'
import { type Call, type CallOptions, limitsOf } from '../http/call.js'
import { type KeyOptions, keyHeader, newUuid } from '../idempotency.js'
import { finishedOf, restOf } from '../operations/ticket.js'
import type { QueuedOperationBehavior } from '../options.js'
import type { Page, PageOptions, Parts } from '../resources.js'

/** `version` and `request_id` are filled in where they are absent. */
export type Task = Omit<RouteTask, 'version' | 'request_id'> & Partial<Pick<RouteTask, 'version' | 'request_id'>>

export interface TaskOptions extends CallOptions, KeyOptions {
  /** Default: the client's. */
  queuedOperationBehavior?: QueuedOperationBehavior
}

type Provider = Policy['providers'][number]

/** Members that have a default may be absent. */
export type NewPolicy = Pick<Policy, 'policy_id'> &
  Partial<Omit<Policy, 'policy_id' | 'providers'>> & {
    providers: (Pick<Provider, 'provider_id' | 'expected_latency_ms' | 'expected_cost'> & Partial<Provider>)[]
  }

export interface Policies {
  put(policy: NewPolicy, options?: CallOptions): Promise<PolicyView>
  get(policyId: string, options?: CallOptions & { tenantId?: string }): Promise<PolicyView>
  list(filter?: { tenant_id?: string } & PageOptions, options?: CallOptions): Promise<Page<PolicyView>>
  remove(policyId: string, options?: CallOptions & { tenantId?: string }): Promise<void>
  /** The decision that would be made, and why. */
  dryRun(tasks: readonly Task[], options?: CallOptions & { policy?: NewPolicy }): Promise<DryRunResult[]>
}

export interface Routing {
  decide(task: Task, options?: TaskOptions): Promise<DecideAnswer | QueuedAnswer>
  /** The decision, by the request's id; or the operation, by its id. */
  decision(id: string, options?: CallOptions): Promise<DecideAnswer | OperationView>
  /** Sends the task to the router and returns a ticket, whose result is the decision. */
  message(task: Task, options?: TaskOptions): Promise<DecideAnswer | QueuedAnswer>
  readonly policies: Policies
}

const service = 'routing'
const decidePath = '/api/v1/routes/decide'

export function routing(parts: Parts): Routing {
  const ask = async <T>(call: Omit<Call, 'service'>, options: CallOptions = {}): Promise<T> =>
    (await parts.send({ ...call, ...limitsOf(options), service })).body as T

  const handOver = async (path: string, task: Task, options: TaskOptions): Promise<DecideAnswer | QueuedAnswer> => {
    const rest = restOf(parts, options)
    const body = { version: '1', request_id: newUuid(), ...task }
    const call = { method: 'POST', path, body, headers: keyHeader(options), isRepeatable: true } as const
    const expects = ['decision', 'operationId']
    const answer = await ask<DecideAnswer | QueuedAnswer>({ ...call, expects }, options)
    if (!('status' in answer)) return answer
    const isPolled = (options.queuedOperationBehavior ?? parts.settings.whenQueued) === 'poll'
    const view = await finishedOf(parts, answer, { isPolled, ...rest })
    return view === null ? answer : decided(view)
  }

  return {
    decide: (task, options = {}) => handOver(decidePath, task, options),
    message: (task, options = {}) => handOver('/api/v1/messages', task, options),
    decision: async (id, options) => {
      const expects = ['decision', 'processed_at']
      return ask({ method: 'GET', path: `${decidePath}/${segment(id)}`, expects, isRepeatable: true }, options)
    },
    policies: policies(ask),
  }
}

function decided({ status, result, error_message }: OperationView): DecideAnswer {
  const answer = result as DecideAnswer | RouteRefusal | null
  if (status === 'completed' && answer?.ok === true) return answer
  const refusal = answer?.ok === false ? `${answer.error.code}: ${answer.error.message}` : (error_message ?? status)
  // Problem codes are routing codes in lower case.
  const code = /^([A-Za-z_]+): /.exec(refusal)?.[1]?.toLowerCase() as ProblemCode | undefined
  throw new SpillwayError(code ?? 'unexpected', refusal, { status: 422 })
}

function policies(ask: <T>(call: Omit<Call, 'service'>, options?: CallOptions) => Promise<T>): Policies {
  const path = '/api/v1/policies'
  const expects = ['policy_id']
  const one = (id: string, { tenantId }: { tenantId?: string }) => ({
    path: `${path}/${segment(id)}`,
    query: { tenant_id: tenantId },
  })
  return {
    // A repeated `put` would create another version; a repeated removal finds nothing.
    put: (policy, options) => ask({ method: 'POST', path, body: policy, expects, isRepeatable: false }, options),
    get: async (id, options = {}) => ask({ method: 'GET', ...one(id, options), expects, isRepeatable: true }, options),
    list: (filter = {}, options) =>
      ask({ method: 'GET', path, query: { ...filter }, expects: ['items'], isRepeatable: true }, options),
    remove: async (id, options = {}) =>
      ask({ method: 'DELETE', ...one(id, options), expects: [''], isRepeatable: false }, options),
    async dryRun(tasks, { policy, ...options } = {}) {
      const body = { tasks, ...(policy && { policy }) }
      const call = { method: 'POST', path: `${path}/dry-run`, body, isRepeatable: true } as const
      return (await ask<{ results: DryRunResult[] }>({ ...call, expects: ['results'] }, options)).results
    },
  }
}
