import { petitionStates, petitionTypes } from '@spillway/protocol/wire'
import { Gauge, type Registry } from 'prom-client'
import { CounterFamily } from 'spillway/workload'
import { RecentValues } from './recent-values.js'

const submittersMax = 1_000

export function createPetitionMetrics(registry: Registry) {
  const counter = <const Labels extends readonly string[]>(name: string, help: string, labelNames: Labels) =>
    new CounterFamily({ registry, name, help, labelNames })
  const ofSubmitters = (name: string, type: 'counter' | 'gauge', help: string) =>
    new RecentValues({
      ...{ registry, name, type, help: `${help}: the most recent 1,000, the rest as other` },
      ...{ labelName: 'submitter_id', recentMax: submittersMax },
    })
  const submitted = counter('petition_submitted_total', 'Petitions received, by type', ['type'])
  const fates = counter('petition_fate_assigned_total', 'Petitions that came to a final state, by that state', ['fate'])
  const checksHelp = 'Submissions that were held against the rate limits, by result'
  const checks = counter('petition_rate_limit_checks_total', checksHelp, ['result'])
  for (const type of petitionTypes) submitted.labels(type)
  for (const state of petitionStates.slice(2)) fates.labels(state)
  return {
    queueDepth: new Gauge({
      registers: [registry],
      name: 'petition_queue_depth',
      help: 'Petitions, by state',
      labelNames: ['state'],
    }),
    queueThreshold: new Gauge({
      registers: [registry],
      name: 'petition_queue_threshold',
      help: 'The maximum of petitions held in RECEIVED',
    }),
    queueRejections: counter(
      'petition_queue_rejections_total',
      'Submissions refused because the queue is full',
      [],
    ).labels(),
    rateHits: ofSubmitters(
      'petition_rate_limit_hits_total',
      'counter',
      'Submissions refused by a rate limit, by submitter',
    ),
    rateRemaining: ofSubmitters(
      'petition_rate_limit_remaining',
      'gauge',
      'Submissions that a submitter has left, as last reported',
    ),
    rateAllowed: checks.labels('allowed'),
    rateBlocked: checks.labels('blocked'),
    submitted,
    fates,
  }
}
