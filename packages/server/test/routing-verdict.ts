/** Judges what was seen of an overload: pure, so that every violation can be made by hand (routing-verdict.test.ts). */
import type { End, Evidence, IntakeSample, Sent, Shed, Signal } from './routing-evidence.js'

export const rules = {
  lost: 'a message has no end',
  doubled: 'a message has two ends',
  untrue: 'a message has an end that is not its own',
  unseen: 'the overload is not to be seen in metrics',
  late: 'the overload was seen too late',
  open: 'the door was open during the overload',
  uncounted: 'refusals are counted otherwise than they were given',
  blind: 'reads, health or metrics did not answer, or took a second',
  flapping: 'the level changed more often than up and down',
  latched: 'it did not recover in time',
  silent: 'alerts did not fire and resolve once, signed',
  tightened: 'the limits were not tightened and restored',
  mishap: 'a process ended or logged an error',
} as const
export type Rule = keyof typeof rules

export interface Finding {
  rule: Rule
  detail: string
}

const recoveryMaxMs = 10_000
/** From the change to the receiver, through the queue. */
const deliveryMaxMs = 3_000
const answerMaxMs = 1_000
const retryAfterSeconds = [30, 33] as const
const latencyWindowMs = 5_000
const stepMs = 100
const shownMax = 5
const backpressureAlert = 'router_intake_backpressure_active'
const alertOf: Record<Signal, string> = {
  backlog: 'router_intake_queue_depth_high',
  latency: 'router_intake_latency_high',
  inflight: 'router_intake_inflight_high',
}

export function judge(evidence: Evidence): Finding[] {
  const all: Record<Rule, string[]> = {
    ...judgeEnds(evidence),
    unseen: unseen(evidence),
    late: late(evidence),
    open: open(evidence),
    uncounted: uncounted(evidence),
    blind: blind(evidence),
    flapping: flapping(evidence),
    latched: latched(evidence),
    silent: silent(evidence),
    tightened: tightened(evidence),
    mishap: evidence.mishaps,
  }
  return (Object.keys(rules) as Rule[]).flatMap((rule) => shown(all[rule]).map((detail) => ({ rule, detail })))
}

function shown(details: string[]): string[] {
  const left = details.length - shownMax
  return left > 0 ? [...details.slice(0, shownMax), `… and ${left} more`] : details
}

/** Figures for people: what the run has shown. */
export function figures(evidence: Evidence) {
  const { ends, startedAt, endedAt, intakes, gateway, notices } = evidence
  const samples = Object.values(intakes).flat()
  const most = (read: (sample: IntakeSample) => number): number => Math.round(Math.max(...samples.map(read)))
  const count = (kind: End['kind']): number => ends.filter((end) => end.kind === kind).length
  const crossed = crossedAt(evidence)
  const active = activeAt(evidence)
  const lastPressed = Math.max(startedAt, ...samples.filter(({ level }) => level > 0).map(({ at }) => at))
  const lastKnown = Math.max(startedAt, ...gateway.filter(({ status }) => status !== 'inactive').map(({ at }) => at))
  return {
    ...{ sent: evidence.sent.length, decided: count('decided'), dead: count('dead'), refused: count('refused') },
    ...{ pendingMax: most((s) => s.pending), p95Max: most((s) => s.p95), inFlightMax: most((s) => s.inFlight) },
    loadSeconds: Math.round((endedAt - startedAt) / 100) / 10,
    detectionMs: crossed === null || active === null ? null : Math.round(active - crossed),
    recoveryMs: Math.round(lastPressed - endedAt),
    gatewayRecoveryMs: Math.round(lastKnown - endedAt),
    slowestPollMs: Math.round(Math.max(...evidence.polls.map(({ tookMs }) => tookMs))),
    slowestPollOwnMs: Math.round(Math.max(...evidence.polls.map(({ ms }) => ms))),
    refusedAsBusy: evidence.refusals.filter(isBusy).map(({ detail }) => String(detail)),
    alerts: notices.map(({ name, status }) => `${name} ${status}`),
  }
}

const wanted: Record<Sent['way'], readonly End['kind'][]> = {
  subject: ['decided'],
  hopeless: ['dead'],
  decide: ['decided', 'refused'],
  message: ['decided', 'refused'],
}

function judgeEnds({ sent, ends, stored }: Evidence): Record<'lost' | 'doubled' | 'untrue', string[]> {
  const byId = new Map<string, End[]>()
  for (const end of ends) byId.set(end.id, [...(byId.get(end.id) ?? []), end])
  const lost = stored === 0 ? [] : [`${stored} messages are left in the stream`]
  const doubled: string[] = []
  const untrue: string[] = []
  for (const { id, way } of sent) {
    const own = byId.get(id) ?? []
    byId.delete(id)
    if (own.length === 0) lost.push(`${way} ${id}`)
    if (own.length > 1) doubled.push(`${way} ${id}: ${own.map(({ kind }) => kind).join(', ')}`)
    for (const { kind, said = '' } of own) if (!wanted[way].includes(kind)) untrue.push(`${way} ${id}: ${kind} ${said}`)
  }
  for (const [id, [end]] of byId) untrue.push(`nobody sent ${id}: ${end?.kind} ${end?.said ?? ''}`)
  return { lost, doubled, untrue }
}

function unseen({ scenario, intakes, gateway }: Evidence): string[] {
  const { bounds, passes } = scenario
  const samples = Object.values(intakes).flat()
  const read: Record<Signal, (sample: IntakeSample) => number> = {
    backlog: ({ pending }) => pending,
    latency: ({ p95 }) => p95,
    inflight: ({ inFlight }) => inFlight,
  }
  const missing = passes
    .filter((signal) => !samples.some((sample) => read[signal](sample) > bounds[signal][2]))
    .map((signal) => `${signal} was never above ${bounds[signal][2]}`)
  if (!samples.some(({ active }) => active === 1)) missing.push('router_intake_backpressure_active was never 1')
  if (!samples.some(({ triggered }) => triggered > 0)) missing.push('router_intake_backpressure_triggered_total is 0')
  if (!gateway.some(({ status }) => status === 'active')) missing.push('gateway_backpressure_status was never active')
  return missing
}

function activeAt({ intakes }: Evidence): number | null {
  return first(Object.values(intakes).flatMap((samples) => samples.find(({ active }) => active === 1)?.at ?? []))
}

/** When the first signal reached its bound, as seen from outside the routers. */
function crossedAt({ scenario, backlog, intakes, ends, sent, startedAt, endedAt }: Evidence): number | null {
  const { bounds } = scenario
  const [, , backlogBound] = bounds.backlog
  const [, , inFlightBound] = bounds.inflight
  const times = [
    backlog.find(({ count }) => count >= backlogBound)?.at ?? [],
    latencyCrossedAt({ sent, ends, bound: bounds.latency[2], from: startedAt, to: endedAt }) ?? [],
    ...Object.values(intakes).map((samples) => samples.find(({ inFlight }) => inFlight >= inFlightBound)?.at ?? []),
  ]
  return first(times.flat())
}

function first(times: number[]): number | null {
  return times.length === 0 ? null : Math.min(...times)
}

/** The 95th percentile of what was answered in the last seconds, as the askers saw it. */
function latencyCrossedAt(o: { sent: Sent[]; ends: End[]; bound: number; from: number; to: number }): number | null {
  const sentAt = new Map(o.sent.filter(({ way }) => way === 'subject').map(({ id, at }) => [id, at]))
  const took = o.ends.flatMap(({ id, at }) => {
    const since = sentAt.get(id)
    return since === undefined ? [] : [{ at, ms: at - since }]
  })
  for (let now = o.from; now <= o.to; now += stepMs) {
    const recent = took.filter(({ at }) => at <= now && at > now - latencyWindowMs).map(({ ms }) => ms)
    const sorted = recent.sort((a, b) => a - b)
    if ((sorted[Math.ceil(sorted.length * 0.95) - 1] ?? 0) >= o.bound) return now
  }
  return null
}

function late(evidence: Evidence): string[] {
  const crossed = crossedAt(evidence)
  const active = activeAt(evidence)
  if (crossed === null || active === null) return ['there was nothing to be seen']
  const ms = Math.round(active - crossed)
  const { detectionMaxMs } = evidence.scenario
  return ms <= detectionMaxMs ? [] : [`after ${ms} ms; ${detectionMaxMs} are allowed`]
}

function open({ shed, refusals }: Evidence): string[] {
  if (shed.length === 0) return ['nobody tried the door']
  const wrong = [
    ...shed.filter((one) => !isOverload(one)),
    ...refusals.filter((one) => !isOverload(one) && !isBusy(one)),
  ]
  return wrong.map((one) => JSON.stringify(one))
}

function isOverload(one: Shed): boolean {
  const [low, high] = retryAfterSeconds
  return isRefusal(one, 'service_overloaded') && one.retryAfter >= low && one.retryAfter <= high
}

/**
 * The gateway refuses for itself, too, while most of its connections to the store are in use. That is not what is tried
 * here; but it has to be honest, and the figures tell of it.
 */
function isBusy(one: Shed): boolean {
  return isRefusal(one, 'overloaded') && one.retryAfter >= 1
}

function isRefusal({ status, code, ok, retryAfter, retryAfterInBody }: Shed, wantedCode: string): boolean {
  return status === 503 && code === wantedCode && ok === false && retryAfterInBody === retryAfter
}

function uncounted({ refusals, rejections }: Evidence): string[] {
  const given = refusals.filter(({ code }) => code === 'service_overloaded').length
  return rejections === given && given > 0 ? [] : [`${given} were given, ${rejections} are counted`]
}

function blind({ reads, polls, startedAt }: Evidence): string[] {
  const closed = reads.filter(({ status }) => status !== 200).map(({ what, status }) => `${what} answered ${status}`)
  if (reads.length === 0) closed.push('nobody read')
  const slow = polls.filter(({ ms, status }) => status !== 200 || ms >= answerMaxMs)
  if (polls.length === 0) closed.push('nobody polled')
  return [
    ...closed,
    ...slow.map(({ process, path, at, ms, status }) => {
      const when = `${Math.round(at - startedAt)} ms after the load began`
      return `${process} ${path}: ${status} in ${Math.round(ms)} ms, asked ${when}`
    }),
  ]
}

function flapping({ intakes, gateway }: Evidence): string[] {
  const series: [string, number[]][] = Object.entries(intakes).map(([name, samples]) => [
    `${name} active`,
    samples.map(({ active }) => active),
  ])
  // The other status says why: `unknown` means that no router answered, any other that the level fell.
  const said = changesOf(gateway.map(({ status }) => status)).join(', ')
  series.push([`gateway (${said}) active`, gateway.map(({ status }) => (status === 'active' ? 1 : 0))])
  return series.flatMap(([name, values]) => {
    const changes = changesOf(values)
    // A router that was not overloaded itself stays where it is.
    const isCalm = ['0', '0,1,0'].includes(changes.join())
    return isCalm ? [] : [`${name}: ${changes.join(', ')}`]
  })
}

function changesOf<T>(values: readonly T[]): T[] {
  return values.filter((value, i) => i === 0 || value !== values[i - 1])
}

function latched({ scenario, intakes, gateway, endedAt }: Evidence): string[] {
  const found: string[] = []
  for (const [name, samples] of Object.entries(intakes)) {
    const last = samples.findLast(({ level }) => level > 0)
    const ms = Math.round((last?.at ?? endedAt) - endedAt)
    if (ms > recoveryMaxMs) found.push(`${name} was at level ${last?.level} ${ms} ms after the last answer`)
  }
  const { checkIntervalSeconds, checkTimeoutMs } = scenario
  const last = gateway.findLast(({ status }) => status !== 'inactive')
  const ms = Math.round((last?.at ?? endedAt) - endedAt)
  if (ms > recoveryMaxMs + checkIntervalSeconds * 1_000 + checkTimeoutMs) {
    found.push(`the gateway said ${last?.status} ${ms} ms after the last answer`)
  }
  return found
}

function silent({ scenario, notices, endedAt }: Evidence): string[] {
  const names = new Set([backpressureAlert, ...scenario.passes.map((signal) => alertOf[signal])])
  const found = notices.filter(({ isSigned }) => !isSigned).map(({ name }) => `${name} is not signed`)
  for (const name of new Set([...names, ...notices.map((notice) => notice.name)])) {
    const statuses = notices.filter((notice) => notice.name === name).map(({ status }) => status)
    if (statuses.join() !== 'firing,resolved') found.push(`${name}: ${statuses.join(', ') || 'nothing'}`)
  }
  for (const { name, status, at } of notices) {
    const ms = Math.round(at - endedAt)
    if (status === 'resolved' && ms > recoveryMaxMs + deliveryMaxMs) found.push(`${name} was resolved after ${ms} ms`)
  }
  return found
}

function tightened({ scenario, adjustments, after }: Evidence): string[] {
  const found = adjustments === 1 ? [] : [`${adjustments} adjustments of limits are counted`]
  const policy = `"routes_decide";q=${scenario.decidePerMinute};w=60`
  if (after.policy?.includes(policy) !== true) found.push(`afterwards the limit is ${after.policy}, not ${policy}`)
  if (after.status !== 200) found.push(`afterwards a decision is answered with ${after.status}`)
  return found
}
