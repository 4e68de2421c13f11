import Type from 'typebox'
import { limits } from '../wire/limits.js'
import { petitionStates, petitionTypes } from '../wire/petitions.js'
import { Timestamp } from './names.js'

const Uuid = Type.String({ format: 'uuid' })
const Hash = Type.String({ pattern: '^[0-9a-f]{64}$' })
const Realm = Type.String({ minLength: 1, maxLength: limits.realmCodePoints })
const Reason = Type.String({ minLength: 1, maxLength: limits.reasonCodePoints })
const State = Type.Enum([...petitionStates])

export const SubmitPetition = Type.Object(
  {
    type: Type.Enum([...petitionTypes]),
    text: Type.String({ minLength: 1, maxLength: limits.petitionTextCodePoints, description: 'Not blank' }),
    realm: Type.Optional(Realm),
    submitter_id: Type.Optional(Uuid),
  },
  { additionalProperties: false },
)

export const PetitionReceipt = Type.Object({
  petition_id: Uuid,
  state: Type.Literal('RECEIVED'),
  type: Type.Enum([...petitionTypes]),
  content_hash: Hash,
  realm: Type.Union([Realm, Type.Null()]),
  created_at: Timestamp,
})

export const PetitionStatus = Type.Object({
  petition_id: Uuid,
  state: State,
  fate_reason: Type.Union([Type.String(), Type.Null()]),
  version: Type.Integer({ minimum: 1 }),
  updated_at: Timestamp,
})

export const Petition = Type.Object({
  ...PetitionReceipt.properties,
  ...PetitionStatus.properties,
  text: Type.String(),
  submitter_id: Type.String(),
})

export const PetitionPage = Type.Object({
  items: Type.Array(Petition),
  next_cursor: Type.Union([Type.String(), Type.Null()]),
  total: Type.Integer({ minimum: 0 }),
})

export const ListPetitionsQuery = Type.Object(
  {
    state: Type.Optional(State),
    limit: Type.Optional(Type.Integer({ minimum: 1, maximum: limits.listItemsMax })),
    cursor: Type.Optional(Type.String({ minLength: 1, maxLength: 1_024 })),
  },
  { additionalProperties: false },
)

export const PetitionStatusQuery = Type.Object(
  {
    version: Type.Optional(Type.Integer({ minimum: 0, maximum: 2_147_483_647 })),
    wait: Type.Optional(Type.Number({ minimum: 0, maximum: limits.preferWaitSecondsMax })),
  },
  { additionalProperties: false },
)

export const TransitionPetition = Type.Object(
  { to: State, reason: Type.Optional(Reason) },
  { additionalProperties: false },
)

export const WithdrawPetition = Type.Object(
  {
    requester_id: Type.String({ minLength: 1, maxLength: limits.identityCharacters }),
    reason: Type.Optional(Reason),
  },
  { additionalProperties: false },
)

export const HaltBody = Type.Object({ reason: Reason }, { additionalProperties: false })

export const HaltState = Type.Object({
  halted: Type.Boolean(),
  reason: Type.Union([Type.String(), Type.Null()]),
  since: Type.Union([Timestamp, Type.Null()]),
})

export const LedgerEntry = Type.Object({
  seq: Type.Integer({ minimum: 1 }),
  at: Timestamp,
  type: Type.String(),
  actor: Type.String(),
  trace_id: Type.String(),
  payload: Type.Union([
    Type.Record(Type.String(), Type.Unknown()),
    Type.String({ description: 'Its text, where a row that somebody changed has no JSON' }),
  ]),
  prev_hash: Hash,
  hash: Hash,
})

export const LedgerPage = Type.Object({
  items: Type.Array(LedgerEntry),
  next_cursor: Type.Union([Type.String({ description: 'The next page’s `after`' }), Type.Null()]),
})

export const ListLedgerQuery = Type.Object(
  {
    after: Type.Optional(Type.Integer({ minimum: 0, maximum: Number.MAX_SAFE_INTEGER })),
    limit: Type.Optional(Type.Integer({ minimum: 1, maximum: limits.listItemsMax })),
  },
  { additionalProperties: false },
)

export const LedgerVerification = Type.Object({
  ok: Type.Boolean(),
  from: Type.Integer({ minimum: 0 }),
  to: Type.Integer({ minimum: 0 }),
  head_hash: Type.Union([Hash, Type.Null({ description: 'The row that has it is gone' })]),
  broken_at: Type.Optional(
    Type.Integer({ minimum: 1, description: 'The first row that is not what it has to be, or is missing' }),
  ),
})
