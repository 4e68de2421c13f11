/**
 * Submitting a petition: gates, then one transaction that counts, inserts and witnesses (sql/functions/submit.sql).
 *
 *   pressure ─► capacity (503, before the body is read) ─► halt (503) ─► rate (429) ─► RECEIVED (201)
 *
 * The lane is the submitter's. A caller that asks for a ticket is queued in it, and later submissions of the same submitter
 * wait their turn. Otherwise nothing is queued, and submissions that cannot be accepted now are refused.
 */
import { hash } from 'node:crypto'
import { SubmitPetition } from '@spillway/protocol/schema'
import type { PetitionReceipt, PetitionType } from '@spillway/protocol/wire'
import {
  type Answer,
  canonicalJson,
  capacity,
  clockMinuteRate,
  type Definition,
  type Gate,
  halt,
  isUuid,
  pressure,
  type Rejection,
  reservedQueuePrefix,
  type SqlEffect,
  traceIdOf,
} from 'spillway/workload'
import type { Static } from 'typebox'
import type { PetitionsContext } from './context.js'

export type SubmitBody = Static<typeof SubmitPetition>

const petitionType = 'petitions.submit'
/** The capacity gate's name in SQL. */
const gateName = 'petitions'
const petitionsQueue = `${reservedQueuePrefix}petitions`
/** Where the routes are mounted: the second is the only alias without /api. */
export const petitionPrefixes = ['/api/v1/petition-submissions', '/v1/petition-submissions'] as const

export function definePetition(context: PetitionsContext): Definition<SubmitBody, PetitionReceipt> {
  return context.intake.define(petitionType, {
    body: SubmitPetition,
    lane: (body, request) => [petitionsQueue, submitterOf(body, request.user?.id ?? request.clientAddress)],
    gates: [pressure(), overflowGate(context), haltGate, ...rateGates(context)],
    check: (body, request) => checkSubmission(body, request.user?.id ?? null, context),
    whenBusy: 'refuse',
    apply: submission(context.schema),
    onAnswer: (answer, { body, identity }) => count(context, answer, body, submitterOf(body, identity)),
    respond: ({ result }) => ({
      status: 201,
      headers: { location: `${petitionPrefixes[0]}/${result.petition_id}` },
      body: result,
    }),
  })
}

/** Without authentication the body may name the submitter; otherwise the two are equal, or the request was refused. */
function submitterOf(body: SubmitBody, identity: string): string {
  return submitterForm(body.submitter_id ?? identity)
}

/** A UUID is the same submitter however it is written. */
export function submitterForm(id: string): string {
  return isUuid(id) ? id.toLowerCase() : id
}

/** Whitespace of any kind, and zero-width characters. */
const blank = /^[\s\u0085\u180e\u200b-\u200d\u2060]*$/u

function checkSubmission(
  body: SubmitBody,
  subject: string | null,
  { settings, isAuthenticated }: PetitionsContext,
): Rejection | null {
  const { realms } = settings
  const errors: { path: string; message: string }[] = []
  if (blank.test(body.text)) errors.push({ path: '/text', message: 'must not be blank' })
  if (body.realm !== undefined && realms !== null && !realms.includes(body.realm)) {
    errors.push({ path: '/realm', message: `must be one of ${realms.join(', ')}` })
  }
  if (errors.length > 0) return { code: 'invalid_request', detail: 'The body is not valid.', errors }
  const isOther = body.submitter_id !== undefined && submitterForm(body.submitter_id) !== submitterForm(subject ?? '')
  if (isAuthenticated && isOther) {
    return { code: 'forbidden', detail: 'submitter_id is not the authenticated subject. Leave it out.' }
  }
  return null
}

/** The transaction enforces the exact limit; this adds the metrics for operators. */
function overflowGate({ settings, metrics }: PetitionsContext): Gate<SubmitBody> {
  const gate = capacity({
    name: gateName,
    limit: settings.queueThreshold,
    resumeBelow: settings.queueThreshold - settings.queueHysteresis,
    retryAfterSeconds: settings.retryAfter,
    problem: {
      type: 'https://archon72.io/errors/queue-overflow',
      title: 'Queue Overflow',
      detail: 'Petition queue capacity exceeded. Please retry later.',
    },
  })
  return {
    kind: 'capacity',
    bind(binding) {
      const bound = gate.bind(binding)
      return {
        ...bound,
        early(request) {
          const refusal = bound.early?.(request) ?? null
          if (refusal !== null) metrics.queueRejections.inc()
          return refusal
        },
        refused(request, facts) {
          metrics.queueRejections.inc()
          if (bound.refused === undefined) throw new Error('the capacity gate does not refuse')
          return bound.refused(request, facts)
        },
        observe(pulse) {
          bound.observe?.(pulse)
          const state = pulse.gates.find(({ name }) => name === gateName)
          // The threshold in force: the instance that started last sets it.
          if (state !== undefined) metrics.queueThreshold.set(state.full_at)
        },
      }
    },
  }
}

const haltGate = halt({
  problem: {
    type: 'https://archon72.io/errors/system-halted',
    title: 'System Halted',
    detail: 'Petition intake is halted by an operator. Reads go on.',
  },
})

interface Tier {
  name: string
  limit: number | null
  by(body: SubmitBody, identity: string): string | null
  /** Of which petitions, for the answer. */
  whose(by: string): string
}

/** The submitter's limit and the other configured limits: tiers of one query. */
function rateGates({ settings }: PetitionsContext): Gate<SubmitBody>[] {
  const { rateWindowMinutes: minutes } = settings
  const span = minutes === 60 ? 'hour' : minutes === 1 ? 'minute' : `${minutes} minutes`
  const ofType = (type: PetitionType, limit: number | null): Tier => ({
    name: `petitions-${type.toLowerCase()}`,
    limit,
    by: (body) => (body.type === type ? type : null),
    whose: () => ` of type ${type}`,
  })
  const tiers: Tier[] = [
    { name: submitterTier, limit: settings.ratePerHour, by: submitterOf, whose: () => '' },
    {
      name: 'petitions-realm',
      limit: settings.rateRealmPerHour,
      by: (body) => body.realm ?? null,
      whose: (realm) => ` for realm ${realm}`,
    },
    {
      name: 'petitions-global',
      limit: settings.rateGlobalPerHour,
      by: () => 'all',
      whose: () => ' from all submitters',
    },
    ofType('GENERAL', settings.rateGeneralPerHour),
    ofType('CESSATION', settings.rateCessationPerHour),
    ofType('GRIEVANCE', settings.rateGrievancePerHour),
    ofType('COLLABORATION', settings.rateCollaborationPerHour),
    ofType('META', settings.rateMetaPerHour),
  ]
  return tiers.flatMap(({ name, limit, by, whose }) => {
    if (limit === null) return []
    return clockMinuteRate<SubmitBody>({
      ...{ name, limit, per: `${minutes}m`, keepMinutes: settings.rateTtlHours * 60 },
      by: ({ identity }, body) => by(body, identity),
      problem: ({ by: key }) => ({
        type: 'urn:archon72:petition:rate-limit-exceeded',
        title: 'Rate Limit Exceeded',
        detail: `Maximum ${limit} petitions per ${span}${whose(key)} exceeded`,
      }),
    })
  })
}

const submitterTier = 'petitions'

function submission(schema: string): SqlEffect<SubmitBody, PetitionReceipt> {
  return {
    function: `${schema}.petitions_submitted`,
    values: (items) => {
      const hashes = items.map(({ body }) => hash('sha256', body.text, 'hex'))
      const submitters = items.map(({ body, identity }) => submitterOf(body, identity))
      return [
        items.map(({ id }) => id),
        items.map(({ body }) => body.type),
        items.map(({ body }) => body.text),
        hashes,
        items.map(({ body }) => body.realm ?? null),
        submitters,
        items.map(({ traceparent }) => traceIdOf(traceparent)),
        items.map(({ id, body }, i) =>
          canonicalJson({
            petition_id: id,
            type: body.type,
            content_hash: hashes[i],
            realm: body.realm ?? null,
            submitter_id: submitters[i],
          }),
        ),
      ]
    },
    limited: (facts, { body, identity, limit, resetAtMs }) => {
      const { as_of_seq, cycle_id } = facts as { as_of_seq: number; cycle_id: string }
      return {
        ...{ actor: `submitter:${submitterOf(body, identity)}`, cycle_id, as_of_seq, rate_limit_remaining: 0 },
        // In whole seconds, like X-RateLimit-Reset.
        rate_limit_reset: new Date(Math.ceil(resetAtMs / 1_000) * 1_000).toISOString(),
        rate_limit_limit: limit,
      }
    },
  }
}

function count({ metrics }: PetitionsContext, answer: Answer, body: SubmitBody, submitter: string): void {
  if (answer.kind === 'refused') {
    if (answer.refusal.gate !== 'rate') return
    metrics.rateBlocked.inc()
    metrics.rateHits.inc(submitter)
    if (answer.refusal.rate?.name === submitterTier) metrics.rateRemaining.set(submitter, 0)
    return
  }
  if (answer.replayed) return
  metrics.rateAllowed.inc()
  if (answer.rate?.name === submitterTier) metrics.rateRemaining.set(submitter, answer.rate.left)
  metrics.submitted.labels(body.type).inc()
}
