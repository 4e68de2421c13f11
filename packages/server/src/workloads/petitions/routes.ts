/** The routes of petitions (docs/reference/http.md), except the submission itself, which the intake mounts. */
import {
  HaltBody,
  HaltState,
  LedgerPage,
  LedgerVerification,
  ListLedgerQuery,
  ListPetitionsQuery,
  Petition,
  PetitionPage,
  PetitionStatus,
  PetitionStatusQuery,
  TransitionPetition,
  WithdrawPetition,
} from '@spillway/protocol/schema'
import type { LedgerEntry, PetitionState, PetitionView } from '@spillway/protocol/wire'
import type { FastifyLike as App, LedgerRow, Verification } from 'spillway/workload'
import { cursorOf, fitPage, goneSignal, invalidCursor, isUuid, ProblemError, placeOf } from 'spillway/workload'
import Type from 'typebox'
import { viewsAll } from '../../auth/identity.js'
import { type MakeRoute, type Route, type RouteRequest, routeFor, tableRoutes } from '../../route-table.js'
import { deadline } from '../../traffic/deadline.js'
import type { PetitionsContext } from './context.js'
import {
  findPetition,
  haltIntake,
  haltState,
  listPetitions,
  type Move,
  movePetition,
  resumeIntake,
  toStatus,
} from './petitions.js'
import { petitionPrefixes, submitterForm } from './submission.js'
import type { Watch } from './watch.js'

interface RoutesContext extends PetitionsContext {
  watch: Watch
  pageBytesMax: number
}

const listLimitDefault = 50
const waitSecondsDefault = 30
const missing = 'petition'
const haltUrl = '/api/v1/admin/halt'
/** Petitions belong to no queue, so keys that are bound to queues may not administer them. */
const operators = { role: 'operate', wholeServer: true } as const
const viewers = { role: 'view', wholeServer: true } as const
const submitters = { role: 'submit' } as const
const anybody = {} as const
const route: MakeRoute<RoutesContext> = routeFor()

export function petitionRoutes(context: RoutesContext): (app: App) => Promise<void> {
  const listers = context.isAuthenticated ? viewers : anybody
  return tableRoutes({ intake: context.intake, tag: 'petitions' }, context, [
    ...petitionPrefixes.flatMap((prefix) => [listRoute(prefix, listers), ...readRoutes(prefix), ...moveRoutes(prefix)]),
    ...haltRoutes,
    ...ledgerRoutes(),
  ])
}

const operatorOf = ({ principal }: Pick<RouteRequest, 'principal'>): string => `operator:${principal.identity}`

const forbidden = (detail: string): ProblemError => new ProblemError({ code: 'forbidden', detail })

/** Somebody else's petition looks like none. Without authentication everybody may read all. */
async function visible(
  context: RoutesContext,
  { principal }: Pick<RouteRequest, 'principal'>,
  id: string,
): Promise<PetitionView | null> {
  const petition = isUuid(id) ? await findPetition(context, id.toLowerCase()) : null
  if (petition === null || !context.isAuthenticated || viewsAll(principal)) return petition
  return petition.submitter_id === submitterForm(principal.identity) ? petition : null
}

const listRoute = (prefix: string, listers: typeof viewers | typeof anybody): Route<RoutesContext> =>
  route('GET', prefix, listers, {
    summary: 'Petitions of a state, oldest first',
    query: ListPetitionsQuery,
    answer: PetitionPage,
    async handle(context, { query: { state = 'RECEIVED', limit = listLimitDefault, cursor } }) {
      const bytesMax = context.pageBytesMax
      const after = cursor === undefined ? null : afterOf(cursor, state)
      const { rows, isCut, total } = await listPetitions(context, state, limit + 1, after, bytesMax)
      const { items, end } = fitPage(rows, { limit, bytesMax }, (petition) => petition, isCut)
      return { items, next_cursor: end === null ? null : cursorOf(`${state} ${end.petition_id}`), total }
    },
  })

const readRoutes = (prefix: string): Route<RoutesContext>[] => [
  route('GET', `${prefix}/:id`, anybody, {
    summary: 'One petition',
    answer: Petition,
    missing,
    handle: (context, request) => visible(context, request, request.params.id),
  }),
  route('GET', `${prefix}/:id/status`, anybody, {
    summary: 'Its state; with version=N, once that has changed: 304 when it has not within wait seconds',
    query: PetitionStatusQuery,
    answer: PetitionStatus,
    otherAnswers: { 304: Type.Null({ description: 'Not changed meanwhile' }) },
    missing,
    async handle(context, request, reply) {
      const { version, wait = waitSecondsDefault } = request.query
      const first = await visible(context, request, request.params.id)
      if (first === null) return null
      if (version === undefined || first.version !== version) return toStatus(first)
      const { signal, clear } = deadline(Math.round(wait * 1_000), goneSignal(reply.raw, 'wait'))
      try {
        for (;;) {
          const sign = context.watch.wait(first.petition_id, version, signal)
          // Read after registering the wait: a change since the first read is seen here.
          const now = await findPetition(context, first.petition_id)
          if (now !== null && now.version !== version) return toStatus(now)
          if (!(await sign)) return reply.code(304).send()
        }
      } finally {
        clear()
      }
    },
  }),
]

const moveRoutes = (prefix: string): Route<RoutesContext>[] => [
  route('POST', `${prefix}/:id/transitions`, operators, {
    summary: 'Move a petition on',
    body: TransitionPetition,
    answer: Petition,
    missing,
    handle(context, request) {
      const { to, reason = null } = request.body
      const event = to.toLowerCase()
      return moved(context, request, { to, fate: reason, reason, event, actor: operatorOf(request), submitter: null })
    },
  }),
  route('POST', `${prefix}/:id/withdraw`, submitters, {
    summary: 'Take back one’s own petition while it is RECEIVED',
    body: WithdrawPetition,
    answer: Petition,
    missing,
    handle(context, request) {
      const { reason = null } = request.body
      const submitter = submitterForm(request.body.requester_id)
      const identity = submitterForm(request.principal.identity)
      if (context.isAuthenticated && submitter !== identity) {
        throw forbidden('requester_id is not the authenticated subject.')
      }
      if (!isUuid(submitter) && submitter !== identity) throw foreign()
      return moved(context, request, {
        to: 'ACKNOWLEDGED',
        fate: 'WITHDRAWN',
        reason,
        event: 'withdrawn',
        actor: `submitter:${submitter}`,
        submitter,
      })
    },
  }),
]

const foreign = (): ProblemError => forbidden('Only its submitter may withdraw a petition.')

/** The petition after the move; null: there is none. */
async function moved(
  context: RoutesContext,
  { params, id: traceId }: RouteRequest<unknown, unknown, 'id'>,
  move: Omit<Move, 'id' | 'traceId'>,
): Promise<PetitionView | null> {
  const result = isUuid(params.id) ? await movePetition(context, { ...move, id: params.id, traceId }) : null
  switch (result?.kind) {
    case 'done':
      return result.petition
    case 'foreign':
      throw foreign()
    case 'illegal': {
      const { state, allowed } = result
      const next = allowed.length === 0 ? 'which is final' : `from which it may go to ${allowed.join(', ')}`
      const detail =
        move.submitter === null
          ? `The petition is ${state}, ${next}.`
          : `The petition is ${state}. Only one that is RECEIVED can be withdrawn.`
      throw new ProblemError({ code: 'conflict', detail, extensions: { state } })
    }
    default:
      return null
  }
}

const haltRoutes = [
  route('GET', haltUrl, viewers, { summary: 'Is intake halted?', answer: HaltState, handle: haltState }),
  route('POST', haltUrl, operators, {
    summary: 'Halt the intake of petitions, durably and witnessed',
    body: HaltBody,
    answer: HaltState,
    handle: (context, request) => haltIntake(context, request.body.reason, operatorOf(request), request.id),
  }),
  route('DELETE', haltUrl, operators, {
    summary: 'End the halt',
    answer: HaltState,
    handle: (context, request) => resumeIntake(context, operatorOf(request), request.id),
  }),
]

function ledgerRoutes(): Route<RoutesContext>[] {
  let verifying: Promise<Verification> | null = null
  return [
    route('GET', '/api/v1/ledger', viewers, {
      summary: 'Witnessed events, in order',
      query: ListLedgerQuery,
      answer: LedgerPage,
      async handle({ intake, pageBytesMax: bytesMax }, { query: { after = 0, limit = listLimitDefault } }) {
        const { rows, isCut } = await intake.ledger.page(after, limit + 1, bytesMax)
        const { items, end } = fitPage(rows, { limit, bytesMax }, toEntry, isCut)
        return { items, next_cursor: end === null ? null : String(end.seq) }
      },
    }),
    route('GET', '/api/v1/ledger/verify', viewers, {
      summary: 'Walk the chain and check every row',
      answer: LedgerVerification,
      handle({ intake }) {
        // A walk over a million rows keeps the database busy for seconds, so callers share it.
        verifying ??= intake.ledger.verify().finally(() => {
          verifying = null
        })
        return verifying
      },
    }),
  ]
}

const toEntry = (row: LedgerRow): LedgerEntry => ({
  seq: row.seq,
  at: row.at,
  type: row.type,
  actor: row.actor,
  trace_id: row.traceId,
  payload: payloadOf(row),
  prev_hash: row.prevHash,
  hash: row.hash,
})

/** An operator must also see a row that was tampered with. */
function payloadOf({ payload }: LedgerRow): LedgerEntry['payload'] {
  try {
    return JSON.parse(payload) as Record<string, unknown>
  } catch {
    return payload
  }
}

function afterOf(cursor: string, state: PetitionState): string {
  const [of, id = '', ...rest] = placeOf(cursor).split(' ')
  if (of === state && isUuid(id) && rest.length === 0) return id
  throw new ProblemError(invalidCursor)
}
