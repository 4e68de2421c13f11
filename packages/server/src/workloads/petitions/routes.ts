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
  Problem,
  TransitionPetition,
  WithdrawPetition,
} from '@spillway/protocol/schema'
import type { LedgerEntry, PetitionState, PetitionView } from '@spillway/protocol/wire'
import type { FastifyLike as App, Intake, LedgerRow, Verification } from 'spillway/workload'
import { fitPage, goneSignal, isUuid, refuseUntilReady, sendProblem } from 'spillway/workload'
import Type, { type Static, type TSchema } from 'typebox'
import type { AppReply as Reply, AppRequest as Request } from '../../app.js'
import { viewsAll } from '../../auth/identity.js'
import { deadline } from '../../traffic/deadline.js'
import type { PetitionsWorkload } from './index.js'
import { type Moved, toStatus } from './petitions.js'
import { petitionPrefixes, submitterForm } from './submission.js'

const listLimitDefault = 50
const waitSecondsDefault = 30
const tags = ['petitions']
const answers = (schema: TSchema): Record<string, TSchema> => ({ 200: schema, '4xx': Problem, '5xx': Problem })
const Id = Type.Object({ id: Type.String() })
/** Petitions belong to no queue, so keys that are bound to queues may not administer them. */
const operate = { role: 'operate', wholeServer: true } as const
const view = { role: 'view', wholeServer: true } as const

export function petitionRoutes(
  intake: Intake,
  workload: PetitionsWorkload,
  pageBytesMax: number,
): (app: App) => Promise<void> {
  return async (app) => {
    app.setSerializerCompiler(() => JSON.stringify)
    refuseUntilReady(app, intake)
    for (const prefix of petitionPrefixes) {
      const place = { app, prefix, workload }
      addList(place, pageBytesMax)
      addOne(place)
      addStatus(place)
      addTransition(place)
      addWithdrawal(place)
    }
    addHalt(app, workload)
    addLedger(app, intake, pageBytesMax)
  }
}

/** One prefix of the routes. */
interface Place {
  app: App
  prefix: string
  workload: PetitionsWorkload
}

const notFound = (reply: Reply): Reply =>
  sendProblem(reply, { code: 'not_found', detail: 'There is no such petition.' })

/** Somebody else's petition looks like none. Without authentication everybody may read all. */
async function visible(workload: PetitionsWorkload, request: Request, id: string): Promise<PetitionView | null> {
  const petition = isUuid(id) ? await workload.petitions.get(id.toLowerCase()) : null
  if (petition === null || !workload.isAuthenticated || viewsAll(request.principal)) return petition
  return petition.submitter_id === submitterForm(request.principal.identity) ? petition : null
}

function addList({ app, prefix, workload }: Place, bytesMax: number): void {
  app.get<{ Querystring: Static<typeof ListPetitionsQuery> }>(
    prefix,
    {
      schema: {
        tags,
        summary: 'Petitions of a state, oldest first',
        querystring: ListPetitionsQuery,
        response: answers(PetitionPage),
      },
      ...(workload.isAuthenticated && { config: view }),
    },
    async (request, reply) => {
      const { state = 'RECEIVED', limit = listLimitDefault, cursor } = request.query
      const after = cursor === undefined ? null : afterOf(cursor, state)
      if (after === undefined) {
        return sendProblem(reply, {
          code: 'invalid_request',
          detail: 'The cursor is invalid, or belongs to another state.',
          errors: [{ path: '/cursor', message: 'take next_cursor of the previous page' }],
        })
      }
      const { rows, isCut, total } = await workload.petitions.list(state, limit + 1, after, bytesMax)
      const { items, end } = fitPage(rows, { limit, bytesMax }, (petition) => petition, isCut)
      return { items, next_cursor: end === null ? null : cursorOf(end.petition_id, state), total }
    },
  )
}

function addOne({ app, prefix, workload }: Place): void {
  app.get<{ Params: Static<typeof Id> }>(
    `${prefix}/:id`,
    { schema: { tags, summary: 'One petition', response: answers(Petition) } },
    async (request, reply) => (await visible(workload, request, request.params.id)) ?? notFound(reply),
  )
}

function addStatus({ app, prefix, workload }: Place): void {
  const { petitions, watch } = workload
  app.get<{ Params: Static<typeof Id>; Querystring: Static<typeof PetitionStatusQuery> }>(
    `${prefix}/:id/status`,
    {
      schema: {
        tags,
        summary: 'Its state; with version=N, once that has changed: 304 when it has not within wait seconds',
        querystring: PetitionStatusQuery,
        response: { ...answers(PetitionStatus), 304: Type.Null({ description: 'Not changed meanwhile' }) },
      },
    },
    async (request, reply) => {
      const { version, wait = waitSecondsDefault } = request.query
      const first = await visible(workload, request, request.params.id)
      if (first === null) return notFound(reply)
      if (version === undefined || first.version !== version) return toStatus(first)
      const { signal, clear } = deadline(Math.round(wait * 1_000), goneSignal(reply.raw, 'wait'))
      try {
        for (;;) {
          const sign = watch.wait(first.petition_id, version, signal)
          // Read after registering the wait: a change since the first read is seen here.
          const now = await petitions.get(first.petition_id)
          if (now !== null && now.version !== version) return toStatus(now)
          if (!(await sign)) return reply.code(304).send()
        }
      } finally {
        clear()
      }
    },
  )
}

function answerOf(reply: Reply, moved: Moved): PetitionView | Reply {
  switch (moved.kind) {
    case 'done':
      return moved.petition
    case 'unknown':
      return notFound(reply)
    case 'foreign':
      return sendProblem(reply, { code: 'forbidden', detail: 'Only its submitter may withdraw a petition.' })
    case 'illegal': {
      const { state, allowed } = moved
      const next = allowed.length === 0 ? 'which is final' : `from which it may go to ${allowed.join(', ')}`
      return sendProblem(reply, {
        code: 'conflict',
        detail: `The petition is ${state}, ${next}.`,
        extensions: { state },
      })
    }
  }
}

function addTransition({ app, prefix, workload: { petitions } }: Place): void {
  app.post<{ Params: Static<typeof Id>; Body: Static<typeof TransitionPetition> }>(
    `${prefix}/:id/transitions`,
    {
      schema: { tags, summary: 'Move a petition on', body: TransitionPetition, response: answers(Petition) },
      config: operate,
    },
    async (request, reply) => {
      const { to, reason = null } = request.body
      if (!isUuid(request.params.id)) return notFound(reply)
      const actor = `operator:${request.principal.identity}`
      return answerOf(
        reply,
        await petitions.transition({ id: request.params.id, actor, traceId: request.id, reason }, to),
      )
    },
  )
}

function addWithdrawal({ app, prefix, workload: { petitions, isAuthenticated } }: Place): void {
  app.post<{ Params: Static<typeof Id>; Body: Static<typeof WithdrawPetition> }>(
    `${prefix}/:id/withdraw`,
    {
      schema: {
        tags,
        summary: 'Take back one’s own petition while it is RECEIVED',
        body: WithdrawPetition,
        response: answers(Petition),
      },
      config: { role: 'submit' },
    },
    async (request, reply) => {
      const { reason = null } = request.body
      const requester = submitterForm(request.body.requester_id)
      const identity = submitterForm(request.principal.identity)
      if (isAuthenticated && requester !== identity) {
        return sendProblem(reply, { code: 'forbidden', detail: 'requester_id is not the authenticated subject.' })
      }
      if (!isUuid(requester) && requester !== identity) {
        return answerOf(reply, { kind: 'foreign' })
      }
      const { id } = request.params
      if (!isUuid(id)) return notFound(reply)
      const actor = `submitter:${requester}`
      const moved = await petitions.withdraw({ id, actor, traceId: request.id, reason }, requester)
      if (moved.kind !== 'illegal') return answerOf(reply, moved)
      const { state } = moved
      const detail = `The petition is ${state}. Only one that is RECEIVED can be withdrawn.`
      return sendProblem(reply, { code: 'conflict', detail, extensions: { state } })
    },
  )
}

function addHalt(app: App, { petitions }: PetitionsWorkload): void {
  const url = '/api/v1/admin/halt'
  const actorOf = (request: Request): string => `operator:${request.principal.identity}`
  app.get(url, { schema: { tags, summary: 'Is intake halted?', response: answers(HaltState) }, config: view }, () =>
    petitions.halted(),
  )
  app.post<{ Body: Static<typeof HaltBody> }>(
    url,
    {
      schema: {
        tags,
        summary: 'Halt the intake of petitions, durably and witnessed',
        body: HaltBody,
        response: answers(HaltState),
      },
      config: operate,
    },
    (request) => petitions.halt(request.body.reason, actorOf(request), request.id),
  )
  app.delete(
    url,
    { schema: { tags, summary: 'End the halt', response: answers(HaltState) }, config: operate },
    (request) => petitions.resume(actorOf(request), request.id),
  )
}

function addLedger(app: App, { ledger }: Intake, bytesMax: number): void {
  const config = view
  app.get<{ Querystring: Static<typeof ListLedgerQuery> }>(
    '/api/v1/ledger',
    {
      schema: {
        tags,
        summary: 'Witnessed events, in order',
        querystring: ListLedgerQuery,
        response: answers(LedgerPage),
      },
      config,
    },
    async (request) => {
      const { after = 0, limit = listLimitDefault } = request.query
      const { rows, isCut } = await ledger.page(after, limit + 1, bytesMax)
      const { items, end } = fitPage(rows, { limit, bytesMax }, toEntry, isCut)
      return { items, next_cursor: end === null ? null : String(end.seq) }
    },
  )
  let verifying: Promise<Verification> | null = null
  app.get(
    '/api/v1/ledger/verify',
    { schema: { tags, summary: 'Walk the chain and check every row', response: answers(LedgerVerification) }, config },
    () => {
      // A walk over a million rows keeps the database busy for seconds, so callers share it.
      verifying ??= ledger.verify().finally(() => {
        verifying = null
      })
      return verifying
    },
  )
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

const cursorOf = (id: string, state: PetitionState): string => Buffer.from(`${state} ${id}`).toString('base64url')

function afterOf(cursor: string, state: PetitionState): string | undefined {
  const [of, id = '', ...rest] = Buffer.from(cursor, 'base64url').toString().split(' ')
  return of === state && isUuid(id) && rest.length === 0 ? id : undefined
}
