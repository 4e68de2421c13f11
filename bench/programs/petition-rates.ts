/**
 * What the rate limits add to the insert of a petition: the library in process, the statement of the real workload
 * (petitions_submitted: row, counts and ledger), with no gate, with the submitter's limit, and with all limits.
 */
import { hash, randomUUID } from 'node:crypto'
import { SubmitPetition } from '@spillway/protocol/schema'
import { workloadSql } from '@spillway/server/internal'
import { createIntake, type Definition, type Gate, postgres, rate, type SqlEffect } from 'spillway'
import { canonicalJson } from 'spillway/workload'
import type { Static } from 'typebox'
import { percentile } from '../statistics.js'
import { env } from './env.js'
import { bareApp, listen, log } from './handler-app.js'
import { onMeasure } from './measured.js'
import { petitionBody, submitterPrefix } from './petition-body.js'

type Body = Static<typeof SubmitPetition>

/** Never reached, and checked for each all the same. */
const unreached = 10_000_000

// Nothing is queued here: what is applied is done.
const intake = await createIntake({
  store: postgres({ url: env('DATABASE_URL'), sql: workloadSql, log }),
  log,
  role: 'direct',
})

const received: SqlEffect<Body, unknown> = {
  function: 'spillway.petitions_submitted',
  values: (items) => {
    const hashes = items.map(({ body }) => hash('sha256', body.text, 'hex'))
    return [
      items.map(({ id }) => id),
      items.map(({ body }) => body.type),
      items.map(({ body }) => body.text),
      hashes,
      items.map(({ body }) => body.realm ?? null),
      items.map(({ identity }) => identity),
      items.map(() => randomUUID().replaceAll('-', '')),
      items.map(({ id, body, identity }, i) =>
        canonicalJson({
          petition_id: id,
          type: body.type,
          content_hash: hashes[i],
          realm: body.realm ?? null,
          submitter_id: identity,
        }),
      ),
    ]
  },
}

const define = (name: string, gates: readonly Gate<Body>[]): Definition<Body> =>
  intake.define(`bench.${name}`, {
    body: SubmitPetition,
    lane: (body) => [name, body.submitter_id ?? ''],
    gates,
    apply: received,
  })

const tier = (name: string, by: (identity: string, body: Body) => string | null): Gate<Body> =>
  rate<Body>({ name, limit: unreached, per: '1h', by: ({ identity }, body) => by(identity, body) })
const submitter = tier('submitter', (identity) => identity)
const others = [
  tier('realm', (_, body) => body.realm ?? null),
  tier('global', () => 'all'),
  tier('type', (_, { type }) => type),
]

const definitions = {
  insert: define('insert', []),
  submitter: define('submitter', [submitter]),
  all: define('all', [submitter, ...others]),
}
type Name = keyof typeof definitions
const names = Object.keys(definitions) as Name[]

const prefix = submitterPrefix()
let submitted = 0

/** One submission by a submitter of its own; the milliseconds that it took. */
async function submit(name: Name): Promise<number> {
  submitted += 1
  const body = petitionBody(prefix, submitted)
  const began = performance.now()
  const answer = await intake.submit(definitions[name], body, { identity: body.submitter_id })
  if (answer.kind !== 'done') throw new Error(`a petition was ${answer.kind}, not done`)
  return performance.now() - began
}

const app = bareApp()

/** In turns, one submission at a time: whatever the machine does meanwhile, it does to all of them. */
onMeasure(app, 'alone', async ({ count }) => {
  const tookMs: Record<Name, number[]> = { insert: [], submitter: [], all: [] }
  for (let n = 0; n < count; n++) for (const name of names) tookMs[name].push(await submit(name))
  return Object.fromEntries(
    names.map((name) => [name, { p50Ms: percentile(tookMs[name], 0.5), p99Ms: percentile(tookMs[name], 0.99) }]),
  )
})

for (const name of names) {
  onMeasure(app, `only-${name}`, async ({ count }) => {
    for (let n = 0; n < count; n++) await submit(name)
    return { count }
  })
}

await listen(app, () => intake.close())
