/** Spillway's library in process, with and without the gates capacity and rate: what they cost, and whether they hold. */
import { capacity, type Definition, postgres, rate } from 'spillway'
import { openIntake } from 'spillway/workload'
import Type from 'typebox'
import { percentile } from '../statistics.js'
import { env } from './env.js'
import { bareApp, listen, log } from './handler-app.js'
import { onMeasure, rowsIn } from './measured.js'

const users = 200
const waiting = 64
/** Never reached, and checked for each all the same. */
const unreached = 100_000_000

// Without workers what is accepted stays.
const intake = await openIntake({ store: postgres({ url: env('DATABASE_URL'), log }), log, role: 'direct' })
const body = Type.Object({ user: Type.String(), text: Type.String() })
type Submitted = Type.Static<typeof body>
const define = (type: string, gates: Parameters<typeof intake.define>[1]['gates']): Definition<Submitted> =>
  intake.define(type, { body, lane: ({ user }) => ['bench', user], gates: gates ?? [], run: async () => null })

const plain = define('bench.plain', [])
const gated = define('bench.gated', [capacity({ limit: unreached }), rate({ limit: unreached, per: '1h' })])
const limit = Number(env('LIMIT'))
const limited = define('bench.limited', [rate({ limit, per: '1h' })])

let sent = 0

/** Hands one over; whether it was taken. */
async function submit(definition: Definition<Submitted>, user: string): Promise<boolean> {
  sent += 1
  const answer = await intake.submit(definition, { user, text: `text-${sent}` }, { identity: user, respondAsync: true })
  if (answer.kind === 'queued') return true
  if (answer.kind === 'refused' && answer.refusal.code === 'rate_limited') return false
  throw new Error(`an operation was ${answer.kind}`)
}

const nextUser = (): string => `user-${sent % users}`
const one = async (definition: Definition<Submitted>): Promise<number> => {
  if (!(await submit(definition, nextUser()))) throw new Error('refused, far below the limit')
  return 1
}

const app = bareApp()
for (const [name, definition] of [
  ['plain', plain],
  ['gated', gated],
] as const) {
  onMeasure(app, `together-${name}`, ({ seconds }) => rowsIn(seconds, waiting, () => one(definition)))
  onMeasure(app, `alone-${name}`, async ({ count }) => {
    const tookMs: number[] = []
    for (let n = 0; n < count; n++) {
      const began = performance.now()
      await one(definition)
      tookMs.push(performance.now() - began)
    }
    return { p50Ms: percentile(tookMs, 0.5), p99Ms: percentile(tookMs, 0.99) }
  })
}

/** The check before the body is read, timed for each request while 64 are waiting for their commit. */
onMeasure(app, 'admit', async ({ seconds }) => {
  const bound = intake.bound(gated)
  const tookMs: number[] = []
  await rowsIn(seconds, waiting, () => {
    const request = { identity: nextUser(), clientAddress: 'local' }
    const began = performance.now()
    const refusal = intake.pipeline.refuseEarly(bound, request)
    tookMs.push(performance.now() - began)
    if (refusal !== null) throw new Error('refused, far below the limit')
    return one(gated)
  })
  return { count: tookMs.length, p50Ms: percentile(tookMs, 0.5), p99Ms: percentile(tookMs, 0.99) }
})

/** Tries of one user, 64 at once; returns how many were taken. */
onMeasure(app, 'exact', async ({ count, key }) => {
  let tried = 0
  let taken = 0
  const loop = async (): Promise<void> => {
    while (tried < count) {
      tried += 1
      if (await submit(limited, key)) taken += 1
    }
  }
  await Promise.all(Array.from({ length: waiting }, loop))
  return { taken, tried }
})

await listen(app, () => intake.close())
