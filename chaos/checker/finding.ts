/** The rules that a run is held to. Each is a promise that was broken, but for the last two: the run itself went wrong. */
export const rules = {
  lost: 'accepted and lost',
  reordered: 'reordered within a lane',
  doubled: 'doubled effects',
  unasked: 'effects or operations nobody asked for',
  key: 'deliveries without the operation id as their key',
  ended_otherwise: 'ended otherwise than the work says',
  answer: 'answers that are not true or not allowed',
  idempotency: 'one key, several operations',
  retry_after: 'refusals without Retry-After',
  two_hands: 'partitions in the hands of two consumers of a group',
  hung: 'requests that hung past their deadline',
  limit: 'limits that were not exact',
  recovery: 'recoveries that took too long',
  audit: 'invariants of the tables that do not hold',
  process: 'processes that ended by themselves, or did not end when asked',
  undrained: 'not drained within its time',
} as const

export type Rule = keyof typeof rules

export interface Finding {
  rule: Rule
  detail: string
}

/** Rules about time, which a machine that is busy with something else may break by itself. */
export const timing: ReadonlySet<Rule> = new Set(['hung', 'recovery', 'undrained'])
