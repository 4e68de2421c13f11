import type { PetitionType } from '@spillway/protocol/wire'
import type { Say, Setting, ValuesIn } from '../../config/setting.js'

const perHour = (name: string, whose: string) =>
  ({
    name,
    type: 'integer',
    min: 1,
    max: 10_000_000,
    default: null,
    unit: 'petitions',
    meaning: `${whose} within the window; unset, no limit`,
  }) as const satisfies Setting

const perHourOf = (type: PetitionType) => perHour(`PETITION_RATE_LIMIT_${type}_PER_HOUR`, `of type ${type}`)

/** The petitions workload, with the variable names that its operators know. */
export const petitionSettings = {
  realms: {
    name: 'PETITION_REALMS',
    type: 'names',
    default: null,
    meaning: 'realms that a petition may name; unset, any',
  },
  queueThreshold: {
    name: 'PETITION_QUEUE_THRESHOLD',
    type: 'integer',
    min: 1,
    max: 100_000_000,
    default: 10_000,
    unit: 'petitions',
    meaning: 'the maximum of petitions in RECEIVED, over all instances',
  },
  queueHysteresis: {
    name: 'PETITION_QUEUE_HYSTERESIS',
    type: 'integer',
    min: 0,
    max: 100_000_000,
    default: null,
    unit: 'petitions',
    meaning:
      'once full, intake resumes below the threshold less this; unset, 500 or 5% of the threshold if that is less',
  },
  queueCacheTtl: {
    name: 'PETITION_QUEUE_CACHE_TTL',
    type: 'number',
    min: 0,
    max: 3_600,
    default: 5,
    unit: 's',
    meaning: 'how old the depth that an instance knows may be; the limit itself is always exact',
  },
  retryAfter: {
    name: 'PETITION_RETRY_AFTER',
    type: 'integer',
    min: 1,
    max: 86_400,
    default: 60,
    unit: 's',
    meaning: 'Retry-After while the queue is full, spread upward by up to a tenth',
  },
  ratePerHour: {
    name: 'PETITION_RATE_LIMIT_PER_HOUR',
    type: 'integer',
    min: 1,
    max: 10_000_000,
    default: 10,
    unit: 'petitions',
    meaning: 'of one submitter within the window, over all instances',
  },
  rateWindowMinutes: {
    name: 'PETITION_RATE_LIMIT_WINDOW_MINUTES',
    type: 'integer',
    min: 1,
    max: 10_080,
    default: 60,
    unit: 'min',
    meaning: 'the sliding window of all petition rates',
  },
  rateTtlHours: {
    name: 'PETITION_RATE_LIMIT_TTL_HOURS',
    type: 'number',
    min: 1,
    max: 8_760,
    default: null,
    unit: 'h',
    meaning: 'how long counts are kept after their last use; unset, 2 h or the window and an hour if that is more',
  },
  rateRealmPerHour: perHour('PETITION_RATE_LIMIT_REALM_PER_HOUR', 'of one realm'),
  rateGlobalPerHour: perHour('PETITION_RATE_LIMIT_GLOBAL_PER_HOUR', 'of all together'),
  rateGeneralPerHour: perHourOf('GENERAL'),
  rateCessationPerHour: perHourOf('CESSATION'),
  rateGrievancePerHour: perHourOf('GRIEVANCE'),
  rateCollaborationPerHour: perHourOf('COLLABORATION'),
  rateMetaPerHour: perHourOf('META'),
} as const satisfies Readonly<Record<string, Setting>>

type Given = ValuesIn<typeof petitionSettings>

/** Values that are not set are derived from those that are. */
export type PetitionsConfig = Omit<Given, 'queueHysteresis' | 'rateTtlHours'> & {
  readonly queueHysteresis: number
  readonly rateTtlHours: number
}

export function completePetitions(given: Given): PetitionsConfig {
  return {
    ...given,
    queueHysteresis: given.queueHysteresis ?? Math.min(500, Math.floor(given.queueThreshold * 0.05)),
    rateTtlHours: given.rateTtlHours ?? Math.max(2, given.rateWindowMinutes / 60 + 1),
  }
}

export function checkPetitions(petitions: PetitionsConfig, say: Say): void {
  const { queueHysteresis, queueThreshold, rateTtlHours, rateWindowMinutes } = petitions
  if (queueHysteresis >= queueThreshold) {
    say(
      ['PETITION_QUEUE_HYSTERESIS', 'PETITION_QUEUE_THRESHOLD'],
      `PETITION_QUEUE_HYSTERESIS (${queueHysteresis}) must be less than PETITION_QUEUE_THRESHOLD (${queueThreshold}), or a full queue would never resume`,
    )
  }
  if (rateTtlHours * 60 <= rateWindowMinutes) {
    say(
      ['PETITION_RATE_LIMIT_TTL_HOURS', 'PETITION_RATE_LIMIT_WINDOW_MINUTES'],
      `PETITION_RATE_LIMIT_TTL_HOURS (${rateTtlHours}) must be more than the window of ${rateWindowMinutes} minutes, or counts would be forgotten while they count`,
    )
  }
}
