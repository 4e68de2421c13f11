import type {
  PetitionReceipt,
  PetitionState,
  PetitionStatus,
  PetitionType,
  PetitionView,
} from '@spillway/protocol/wire'
import { segment } from '../checks.js'
import { type Call, type CallOptions, limitsOf } from '../http/call.js'
import { type KeyOptions, keyHeader } from '../idempotency.js'
import type { Page, PageOptions, Parts } from '../resources.js'

export interface NewPetition {
  type: PetitionType
  text: string
  realm?: string
  /** A UUID. */
  submitter_id?: string
}

export interface Petitions {
  submit(petition: NewPetition, options?: CallOptions & KeyOptions): Promise<PetitionReceipt>
  get(id: string, options?: CallOptions): Promise<PetitionView>
  list(
    filter?: { state?: PetitionState } & PageOptions,
    options?: CallOptions,
  ): Promise<Page<PetitionView> & { total: number }>
  /**
   * Its state. With `version`: once there is a newer one; null when nothing changed within `waitSeconds` (60 at most,
   * default 30).
   */
  status(id: string, options?: CallOptions & { version?: number; waitSeconds?: number }): Promise<PetitionStatus | null>
  /** Only the submitter may, while it is RECEIVED. */
  withdraw(id: string, by: { requester_id: string; reason?: string }, options?: CallOptions): Promise<PetitionView>
  transition(id: string, move: { to: PetitionState; reason?: string }, options?: CallOptions): Promise<PetitionView>
}

const path = '/api/v1/petition-submissions'
const service = 'petitions'
const expects = ['petition_id']
const waitSecondsDefault = 30
const pathOf = (id: string): string => `${path}/${segment(id)}`

export function petitions({ send, settings }: Parts): Petitions {
  const ask = async <T>(call: Omit<Call, 'service'>, options: CallOptions = {}): Promise<T> =>
    (await send({ ...call, ...limitsOf(options), service })).body as T
  return {
    submit: (petition, options = {}) =>
      ask({ method: 'POST', path, body: petition, headers: keyHeader(options), expects, isRepeatable: true }, options),
    get: async (id, options) => ask({ method: 'GET', path: pathOf(id), expects, isRepeatable: true }, options),
    list: (filter = {}, options) =>
      ask({ method: 'GET', path, query: { ...filter }, expects: ['items'], isRepeatable: true }, options),
    async status(id, { version, waitSeconds = waitSecondsDefault, ...options } = {}) {
      const waitMs = version === undefined ? 0 : waitSeconds * 1_000
      const query = version === undefined ? {} : { version, wait: waitSeconds }
      const deadlineMs = options.deadlineMs ?? settings.deadlineMs + waitMs
      const call = { method: 'GET', path: `${pathOf(id)}/status`, query, waitMs, isRepeatable: true } as const
      return (
        (await ask<PetitionStatus | undefined>({ ...call, expects: ['version', ''] }, { ...options, deadlineMs })) ??
        null
      )
    },
    // Not repeated: a second attempt would find the first one's change and fail as too late.
    withdraw: async (id, by, options) =>
      ask({ method: 'POST', path: `${pathOf(id)}/withdraw`, body: by, expects, isRepeatable: false }, options),
    transition: async (id, move, options) =>
      ask({ method: 'POST', path: `${pathOf(id)}/transitions`, body: move, expects, isRepeatable: false }, options),
  }
}
