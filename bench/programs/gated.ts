/**
 * Spillway's library in a Fastify application of one's own, every gate on: pressure, capacity, rate per user, and an
 * Idempotency-Key that the load gives to each request. Also accepting in process, without HTTP and without gates.
 */
import { capacity, createIntake, postgres, pressure, rate } from 'spillway'
import { env } from './env.js'
import { bareApp, operationBody as body, listen, log } from './handler-app.js'
import { onMeasure, rowsIn } from './measured.js'

// Without workers what is accepted stays: accepting is measured, not draining.
const intake = await createIntake({
  store: postgres({ url: env('DATABASE_URL'), log }),
  log,
  role: process.env.WORK === 'true' ? 'both' : 'accept',
})

const gated = intake.define('bench.gated', {
  body,
  lane: ({ queue, partition }) => [queue, partition ?? 'Default'],
  identity: (request) => request.headers['x-user'] ?? request.clientAddress,
  // Never reached, and checked for each request all the same.
  gates: [pressure(), capacity({ limit: 100_000_000 }), rate({ limit: 100_000_000, per: '1h' })],
  run: async () => null,
})
const plain = intake.define('bench.plain', {
  body,
  lane: ({ queue, partition }) => [queue, partition ?? 'Default'],
  run: async () => null,
})

const app = bareApp()
app.route({ method: 'POST', url: '/api/v1/operations', ...intake.route(gated) })
app.route({ method: 'POST', url: '/plain', ...intake.route(plain) })

const lanes = 200
let submitted = 0

for (const waiters of [64, 256]) {
  onMeasure(app, `submit-${waiters}`, ({ seconds }) =>
    rowsIn(seconds, waiters, async () => {
      submitted += 1
      const answer = await intake.submit(
        plain,
        {
          type: 'http.request',
          queue: 'bench',
          partition: `lane-${submitted % lanes}`,
          payload: { url: 'http://127.0.0.1/demo/echo', body: { ref: `ref-${submitted}` } },
        },
        { respondAsync: true },
      )
      if (answer.kind !== 'queued') throw new Error(`an operation was ${answer.kind}, not queued`)
      return 1
    }),
  )
}

await listen(app, () => intake.close())
