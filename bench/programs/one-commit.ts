/** The same handler with one INSERT and its commit per request: what one would write first. */
import { randomUUID } from 'node:crypto'
import pg from 'pg'
import { env, envNumber } from './env.js'
import { handlerApp, listen } from './handler-app.js'
import { onMeasure, rowsIn } from './measured.js'

const batch = 100

const pool = new pg.Pool({ connectionString: env('DATABASE_URL'), max: envNumber('POOL_MAX') })
await pool.query(`CREATE TABLE IF NOT EXISTS operations (
  id uuid PRIMARY KEY, queue text NOT NULL, partition text NOT NULL, payload jsonb NOT NULL,
  created_at timestamptz NOT NULL DEFAULT now()
)`)
await pool.query('CREATE TABLE IF NOT EXISTS bulk (LIKE operations INCLUDING ALL)')

const app = handlerApp(async ({ queue, partition, payload }) => {
  const id = randomUUID()
  await pool.query({
    name: 'insert',
    text: 'INSERT INTO operations (id, queue, partition, payload) VALUES ($1, $2, $3, $4)',
    values: [id, queue, partition, JSON.stringify(payload)],
  })
  return id
})

/** The ceiling of PostgreSQL itself on this machine: rows by the hundred, no HTTP, no decision about any of them. */
const payload = JSON.stringify({ url: 'http://127.0.0.1/demo/echo', body: { ref: 'x'.repeat(24) } })
const queues = Array.from({ length: batch }, () => 'bench')
const partitions = Array.from({ length: batch }, (_, n) => `lane-${n}`)
const payloads = Array.from({ length: batch }, () => payload)

onMeasure(app, 'unnest', ({ seconds }) =>
  rowsIn(seconds, 2, async () => {
    await pool.query({
      name: 'unnest',
      text: `INSERT INTO bulk (id, queue, partition, payload)
             SELECT * FROM unnest($1::uuid[], $2::text[], $3::text[], $4::jsonb[])`,
      values: [queues.map(() => randomUUID()), queues, partitions, payloads],
    })
    return batch
  }),
)

await listen(app, () => pool.end())
