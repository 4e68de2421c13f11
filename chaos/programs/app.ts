/**
 * An application on the public library: Fastify in front of an intake, with handlers that write to the same database,
 * call the sink, are slow or fail as the workload says. As a worker it runs what is queued and listens nowhere.
 *
 * Says `ready <port>` (0 for a worker) on standard output once it works.
 */
import { setTimeout as delay } from 'node:timers/promises'
import Fastify from 'fastify'
import { capacity, connections, createIntake, FailOperation, postgres, type RunContext, rate, type Tx } from 'spillway'
import Type from 'typebox'
import { Agent, request as httpRequest } from 'undici'
import { breakStore } from '../breakage.js'
import {
  attemptMaxMs,
  behaviourOf,
  capacityLimit,
  type Lane,
  queueName,
  ratedLimit,
  retriesMax,
  tokenOf,
} from '../workload.js'
import { type AppSettings, appSettingsName } from './app-settings.js'

const text = process.env[appSettingsName]
if (text === undefined) throw new Error(`${appSettingsName} is not set: this program is started by the chaos harness.`)
const settings = JSON.parse(text) as AppSettings
const { seed } = settings
const lanes = new Map(settings.lanes.map((lane) => [lane.name, lane]))
const sinkAgent = new Agent({ connections: 64, pipelining: 1 })

const Numbered = Type.Object({ lane: Type.String(), n: Type.Integer() })
type Numbered = Type.Static<typeof Numbered>

const log = {
  debug: () => undefined,
  info: say('info'),
  warn: say('warn'),
  error: say('error'),
}

function say(level: string) {
  return (fields: object, message: string): void => {
    const shown = Object.fromEntries(
      Object.entries(fields).map(([name, value]) => [name, value instanceof Error ? String(value) : value]),
    )
    console.error(JSON.stringify({ at: Date.now(), level, message, ...shown }))
  }
}

function behaviour(body: Numbered) {
  const lane: Lane | undefined = lanes.get(body.lane)
  if (lane === undefined) throw new FailOperation(`no lane ${body.lane}`)
  return behaviourOf(seed, lane, body.n, settings.temper)
}

const answer = (body: Numbered) => ({ lane: body.lane, n: body.n, token: tokenOf(seed, body.lane, body.n) })

const insert = `INSERT INTO chaos.effects (lane, n, operation, route) SELECT * FROM unnest($1::text[], $2::int[], $3::uuid[], $4::text[])`

async function writeEffects(tx: Tx, route: string, items: readonly (Numbered & { id: string })[]): Promise<void> {
  await tx.query(insert, [
    items.map((item) => item.lane),
    items.map((item) => item.n),
    items.map((item) => item.id),
    items.map(() => route),
  ])
}

/** The effect is written first and the time passes after it: a process that dies or loses its lease meanwhile has done half of it. */
async function runInTransaction(route: string, body: Numbered, ctx: RunContext) {
  const { poison, failures, runMs } = behaviour(body)
  await writeEffects(ctx.tx, route, [{ ...body, id: ctx.id }])
  if (runMs > 0) await delay(runMs)
  if (poison) throw new FailOperation('poisoned')
  if (ctx.attempt <= failures) throw new Error('fails at first')
  return answer(body)
}

/** The sink decides about failures by what it has seen, so that a repeat after a crash is treated as one. */
async function callSink(body: Numbered, ctx: RunContext) {
  const { statusCode, body: answered } = await httpRequest(`${settings.sinkOrigin}/outside`, {
    dispatcher: sinkAgent,
    method: 'POST',
    headers: { 'content-type': 'application/json', 'idempotency-key': ctx.id },
    body: JSON.stringify({ lane: body.lane, n: body.n }),
    signal: ctx.signal,
  })
  const text = await answered.text()
  if (statusCode === 400) throw new FailOperation('poisoned')
  if (statusCode !== 200) throw new Error(`the sink answered ${statusCode}`)
  return JSON.parse(text) as unknown
}

const store = postgres({ url: settings.databaseUrl, poolMax: settings.poolMax, log })
const intake = await createIntake({
  store: breakStore(store, settings.breakage),
  log,
  waitForStore: false,
  leaseMs: settings.leaseMs,
  directWaitMs: settings.directWaitMs,
  drainMs: settings.drainMs,
  concurrency: settings.concurrency,
})

const usual = {
  body: Numbered,
  lane: (body: Numbered): [string, string] => [queueName, body.lane],
  identity: (request: { headers: Readonly<Record<string, string | undefined>> }) => request.headers['x-user-id'] ?? '',
  maxRetries: retriesMax,
  timeoutMs: attemptMaxMs,
  retry: { baseMs: 20, maxMs: 300 },
}

const definitions = {
  tx: intake.define('chaos.tx', { ...usual, run: (body, ctx) => runInTransaction('tx', body, ctx) }),
  gated: intake.define('chaos.gated', {
    ...usual,
    gates: [
      capacity({ limit: capacityLimit, resumeBelow: capacityLimit - 2, name: 'chaos' }),
      connections({ perIdentity: 2, total: 8, pool: 'chaos', retryAfterSeconds: 1 }),
    ],
    whenBusy: 'refuse',
    run: (body, ctx) => runInTransaction('gated', body, ctx),
  }),
  outside: intake.define('chaos.outside', { ...usual, run: callSink }),
  apply: intake.define('chaos.apply', {
    ...usual,
    apply: async (tx, items) => {
      await writeEffects(
        tx,
        'apply',
        items.map(({ id, body }) => ({ ...body, id })),
      )
      return items.map(({ body }) => answer(body))
    },
  }),
  rated: intake.define('chaos.rated', {
    ...usual,
    gates: [rate({ limit: ratedLimit, per: '1d', by: (_, body: Numbered) => body.lane })],
    apply: async (tx, items) => {
      await writeEffects(
        tx,
        'rated',
        items.map(({ id, body }) => ({ ...body, id })),
      )
      return items.map(({ body }) => answer(body))
    },
  }),
}

const app = Fastify({ forceCloseConnections: true })
if (settings.listen) {
  for (const [name, definition] of Object.entries(definitions)) {
    app.route({ method: 'POST', url: `/${name}`, ...intake.route(definition) })
  }
  await app.register(
    intake.ticketRoutes({
      viewer: (request) => ({ identity: String(request.headers['x-user-id'] ?? ''), operates: false }),
    }),
  )
}

process.once('SIGTERM', () => {
  log.info({}, 'draining')
  intake
    .close()
    .then(() => {
      log.info({}, 'drained')
      return app.close()
    })
    .then(() => process.exit(0))
    .catch((fault: unknown) => {
      console.error('closing failed', fault)
      process.exit(1)
    })
})
// Its harness is gone: nobody would end it.
process.once('disconnect', () => process.exit(1))

const address = settings.listen ? await app.listen({ host: '127.0.0.1', port: 0 }) : 'http://127.0.0.1:0'
console.log(`ready ${new URL(address).port}`)
