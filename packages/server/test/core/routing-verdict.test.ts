/** Every violation, made by hand in the evidence of a clean run: it is found, and nothing else is. */
import { describe, expect, it } from 'vitest'
import type { End, Evidence, GatewaySample, IntakeSample, Scenario, Sent, Shed } from '../routing-evidence.js'
import { figures, judge, type Rule } from '../routing-verdict.js'

const scenario: Scenario = {
  ...{ name: 'a', messages: 4, viaGateway: 2, hopeless: 1, delayMs: 100, concurrency: [1, 1], passes: ['backlog'] },
  bounds: { backlog: [1, 5, 10], latency: [100, 200, 300], inflight: [10, 20, 30] },
  ...{ detectionMaxMs: 1_500, checkIntervalSeconds: 0.2, checkTimeoutMs: 1_000, decidePerMinute: 50 },
}
const startedAt = 1_000
const endedAt = 5_000
const activeAt = 2_000
const calmAt = 9_000

const refusal: Shed = {
  ...{
    what: 'POST',
    status: 503,
    code: 'service_overloaded',
    detail: '',
    ok: false,
    retryAfter: 31,
    retryAfterInBody: 31,
  },
}
const isActive = (at: number): boolean => at >= activeAt && at < calmAt
const times = Array.from({ length: 120 }, (_, i) => i * 100)
const samples = (): IntakeSample[] =>
  times.map((at) => ({
    ...{ at, active: isActive(at) ? 1 : 0, level: isActive(at) ? 2 : 0, pending: isActive(at) ? 12 : 0, p95: 0 },
    ...{ inFlight: 1, triggered: at >= activeAt ? 1 : 0 },
  }))
const gateway = (): GatewaySample[] => times.map((at) => ({ at, status: isActive(at) ? 'active' : 'inactive' }))
const notice = (name: string, status: string, at: number) => ({
  ...{ name, status, at, severity: 'warning', labels: {}, annotations: {}, isSigned: true },
})

function clean(): Evidence {
  const sent: Sent[] = [
    { id: 'one', way: 'subject', at: startedAt },
    { id: 'two', way: 'subject', at: startedAt },
    { id: 'nobody’s', way: 'hopeless', at: startedAt },
    { id: 'asked', way: 'decide', at: startedAt },
    { id: 'handed', way: 'message', at: startedAt },
  ]
  const ends: End[] = [
    { id: 'one', at: 1_100, kind: 'decided' },
    { id: 'two', at: 1_200, kind: 'decided' },
    { id: 'nobody’s', at: 5_100, kind: 'dead' },
    { id: 'asked', at: 3_000, kind: 'refused' },
    { id: 'handed', at: endedAt, kind: 'decided' },
  ]
  return {
    ...{ scenario, startedAt, endedAt, sent, ends, shed: [refusal], refusals: [refusal, refusal], rejections: 2 },
    reads: [{ what: 'a list', status: 200 }],
    polls: [{ process: 'gateway', path: '/_health', at: 2_500, tookMs: 1_200, ms: 12, status: 200 }],
    intakes: { 'router-1': samples(), 'router-2': samples() },
    gateway: gateway(),
    backlog: [
      { at: 1_000, count: 0 },
      { at: 1_200, count: 11 },
    ],
    notices: ['router_intake_backpressure_active', 'router_intake_queue_depth_high'].flatMap((name) => [
      notice(name, 'firing', activeAt),
      notice(name, 'resolved', calmAt),
    ]),
    ...{ adjustments: 1, stored: 0, mishaps: [] },
    after: { status: 200, policy: '"routes_decide";q=50;w=60' },
  }
}

/** What is changed in the evidence. */
type Change = (evidence: Evidence) => void

const setSample =
  (at: number, change: Partial<IntakeSample>, router = 'router-1'): Change =>
  ({ intakes }) => {
    for (const sample of intakes[router] ?? []) if (sample.at === at) Object.assign(sample, change)
  }
const setAll =
  (change: Partial<IntakeSample>): Change =>
  ({ intakes }) => {
    for (const sample of Object.values(intakes).flat()) Object.assign(sample, change)
  }
const refuseWith =
  (change: Partial<Shed>): Change =>
  (evidence) => {
    evidence.shed = [{ ...refusal, ...change }]
  }

const violations: [Rule, string, Change][] = [
  ['lost', 'a message without an end', ({ ends }) => ends.splice(0, 1)],
  ['lost', 'one that is left in the stream', (e) => Object.assign(e, { stored: 1 })],
  ['doubled', 'one that is answered twice', ({ ends }) => ends.push({ id: 'one', at: 2_000, kind: 'decided' })],
  ['untrue', 'one that is refused by the router', ({ ends }) => Object.assign(ends[0] ?? {}, { kind: 'other' })],
  ['untrue', 'an answer that nobody asked for', ({ ends }) => ends.push({ id: 'x', at: 2_000, kind: 'decided' })],
  ['untrue', 'one to the subject that is refused', ({ ends }) => Object.assign(ends[0] ?? {}, { kind: 'refused' })],
  ['unseen', 'a backlog that is never above its bound', setAll({ pending: 10 })],
  ['unseen', 'no trigger', setAll({ triggered: 0 })],
  ['late', 'a second too much', ({ backlog }) => Object.assign(backlog[0] ?? {}, { at: 400, count: 10 })],
  [
    'late',
    'latency that the askers saw long before',
    (e) => {
      e.sent.push({ id: 'slow', way: 'subject', at: 0 })
      e.ends.push({ id: 'slow', at: 390, kind: 'decided' })
      Object.assign(e, { startedAt: 400 })
    },
  ],
  ['late', 'messages under way long before', setSample(400, { inFlight: 30 })],
  ['open', 'a request that passes', refuseWith({ status: 200, code: undefined, ok: true })],
  ['open', 'another code', refuseWith({ code: 'unavailable' })],
  ['open', 'a refusal that is ok', refuseWith({ ok: true })],
  ['open', 'a Retry-After below its base', refuseWith({ retryAfter: 29, retryAfterInBody: 29 })],
  ['open', 'a Retry-After above its spread', refuseWith({ retryAfter: 34, retryAfterInBody: 34 })],
  ['open', 'two that differ', refuseWith({ retryAfterInBody: 30 })],
  ['open', 'the gateway’s own refusal instead', refuseWith({ code: 'overloaded', retryAfter: 2, retryAfterInBody: 2 })],
  [
    'open',
    'a refusal of the load without a reason',
    ({ refusals }) => refusals.push({ ...refusal, code: 'not_ready' }),
  ],
  ['open', 'nobody who tried', (e) => Object.assign(e, { shed: [] })],
  ['uncounted', 'one counted less', (e) => Object.assign(e, { rejections: 1 })],
  ['uncounted', 'one counted more', (e) => Object.assign(e, { rejections: 3 })],
  ['blind', 'a read that is refused', ({ reads }) => Object.assign(reads[0] ?? {}, { status: 503 })],
  ['blind', 'slow health', ({ polls }) => Object.assign(polls[0] ?? {}, { ms: 1_000 })],
  ['blind', 'health that says no', ({ polls }) => Object.assign(polls[0] ?? {}, { status: 500 })],
  ['flapping', 'a router that is inactive in between', setSample(3_000, { active: 0 })],
  ['flapping', 'a gateway that is', ({ gateway: seen }) => Object.assign(seen[30] ?? {}, { status: 'warning' })],
  ['flapping', 'one that is active at the end', setSample(11_900, { active: 1 })],
  ['latched', 'a router at warning', (e) => e.intakes['router-2']?.push(sampleAt(15_001, 1))],
  ['latched', 'the gateway', ({ gateway: seen }) => seen.push({ at: 16_201, status: 'unknown' })],
  ['silent', 'an alert that is not signed', ({ notices }) => Object.assign(notices[0] ?? {}, { isSigned: false })],
  ['silent', 'one that is not resolved', ({ notices }) => notices.splice(1, 1)],
  ['silent', 'one that never fired', ({ notices }) => notices.splice(2, 2)],
  ['silent', 'one that fires twice', ({ notices }) => notices.push(...notices.slice(0, 2))],
  ['silent', 'another that stays', ({ notices }) => notices.push(notice('router_intake_latency_high', 'firing', 1))],
  ['silent', 'one that is resolved late', ({ notices }) => Object.assign(notices[1] ?? {}, { at: 18_001 })],
  ['tightened', 'limits that nobody touched', (e) => Object.assign(e, { adjustments: 0 })],
  ['tightened', 'limits that were touched twice', (e) => Object.assign(e, { adjustments: 2 })],
  ['tightened', 'limits that stay', (e) => Object.assign(e.after, { policy: '"routes_decide";q=25;w=60' })],
  ['tightened', 'no decision afterwards', (e) => Object.assign(e.after, { status: 503 })],
  ['mishap', 'an error in the log', ({ mishaps }) => mishaps.push('router-1 logged: …')],
]

function sampleAt(at: number, level: number): IntakeSample {
  return { at, level, active: 0, pending: 0, p95: 0, inFlight: 0, triggered: 1 }
}

describe('the judge of overloads', () => {
  it('finds nothing in a clean run', () => {
    expect(judge(clean())).toEqual([])
  })

  it.each(violations)('finds %s: %s', (rule, _, change) => {
    const evidence = clean()
    change(evidence)
    expect([...new Set(judge(evidence).map((finding) => finding.rule))]).toEqual([rule])
  })

  it('lets a router stay calm that is not overloaded itself', () => {
    const evidence = clean()
    for (const sample of evidence.intakes['router-2'] ?? []) Object.assign(sample, { active: 0, level: 0 })
    expect(judge(evidence)).toEqual([])
  })

  it('reports tolerated events: the gateway’s own refusals, and answers that were late for lack of CPU', () => {
    const evidence = clean()
    evidence.refusals.push({ ...refusal, code: 'overloaded', detail: 'busy', retryAfter: 2, retryAfterInBody: 2 })
    expect(judge(evidence)).toEqual([])
    expect(figures(evidence)).toMatchObject({ refusedAsBusy: ['busy'], slowestPollMs: 1_200, slowestPollOwnMs: 12 })
  })

  it('reports how long detection and recovery took', () => {
    expect(figures(clean())).toMatchObject({ detectionMs: 800, recoveryMs: 3_900, decided: 3, dead: 1, refused: 1 })
  })
})
