import { Gauge, type Registry } from '@prometheus-io/client'
import { petitionStates, petitionTypes } from '@spillway/protocol/wire'
import { CounterFamily } from 'spillway/workload'
import { RecentValues } from './recent-values.js'

const submittersMax = 1_000

export function createPetitionMetrics(registry: Registry) {
  const labelled = { registry, labelName: 'submitter_id', recentMax: submittersMax }
  const submitted = new CounterFamily({
    registry,
    name: 'petition_submitted_total',
    help: 'Petitions received, by type',
    labelNames: ['type'],
  })
  const fates = new CounterFamily({
    registry,
    name: 'petition_fate_assigned_total',
    help: 'Petitions that came to a final state, by that state',
    labelNames: ['fate'],
  })
  const checks = new CounterFamily({
    registry,
    name: 'petition_rate_limit_checks_total',
    help: 'Submissions that were held against the rate limits, by result',
    labelNames: ['result'],
  })
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
    queueRejections: new CounterFamily({
      registry,
      name: 'petition_queue_rejections_total',
      help: 'Submissions refused because the queue is full',
      labelNames: [],
    }).labels(),
    rateHits: new RecentValues({
      ...labelled,
      name: 'petition_rate_limit_hits_total',
      help: 'Submissions refused by a rate limit, by submitter: the most recent 1,000, the rest as other',
      type: 'counter',
    }),
    rateRemaining: new RecentValues({
      ...labelled,
      name: 'petition_rate_limit_remaining',
      help: 'Submissions that a submitter has left, as last reported: the most recent 1,000, the rest as other',
      type: 'gauge',
    }),
    rateAllowed: checks.labels('allowed'),
    rateBlocked: checks.labels('blocked'),
    submitted,
    fates,
  }
}
