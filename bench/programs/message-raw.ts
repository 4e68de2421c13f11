/**
 * The ceilings of PostgreSQL itself: messages by the hundred into a table with the columns, the key and the indexes of
 * Spillway's own, and out of it again by the range of their key, with a cursor for each partition. No HTTP, no decision about
 * any of them, no lease.
 */
import { randomUUID } from 'node:crypto'
import pg from 'pg'
import { env, envNumber } from './env.js'
import { bareApp, listen } from './handler-app.js'
import { onMeasure, rowsIn } from './measured.js'
import { payloadText } from './message-body.js'

const batch = 100
const partitions = Array.from({ length: envNumber('PARTITIONS') }, () => randomUUID())
/** Of one statement, as of one request. */
const lanes = envNumber('LANES')
const [pushLoops, popLoops] = [envNumber('PUSH_CONNECTIONS'), envNumber('POP_CONNECTIONS')]

const pool = new pg.Pool({ connectionString: env('DATABASE_URL'), max: Math.max(pushLoops, popLoops) })
await pool.query('CREATE TABLE public.raw_messages (LIKE spillway.mq_messages INCLUDING ALL)')
await pool.query(
  'CREATE TABLE public.raw_cursors (partition uuid PRIMARY KEY, head bigint NOT NULL) WITH (fillfactor = 50)',
)
await pool.query('INSERT INTO public.raw_cursors SELECT unnest($1::uuid[]), 0', [partitions])

const tails = partitions.map(() => 0)
const payload = payloadText(100_000_000)
const payloads = Array.from({ length: batch }, () => payload)
let statements = 0

async function push(): Promise<number> {
  const chosen: string[] = []
  const seqs: number[] = []
  for (let lane = 0; lane < lanes; lane++) {
    const at = (statements * lanes + lane) % partitions.length
    for (let i = 0; i < batch / lanes; i++) {
      const tail = (tails[at] ?? 0) + 1
      tails[at] = tail
      chosen.push(partitions[at] ?? '')
      seqs.push(tail)
    }
  }
  statements++
  const ids = chosen.map(() => randomUUID())
  await pool.query({
    name: 'push',
    text: `INSERT INTO public.raw_messages (partition, seq, id, transaction_id, sealed, payload, created_at)
           SELECT u.partition, u.seq, u.id, u.tx, false, u.payload, now()
           FROM unnest($1::uuid[], $2::bigint[], $3::uuid[], $4::text[], $5::text[]) u(partition, seq, id, tx, payload)`,
    values: [chosen, seqs, ids, ids, payloads],
  })
  return ids.length
}

/** One statement, hence one transaction. Loops have partitions of their own; one that is read to its end is read again. */
const popper = (loops: number): ((worker: number) => Promise<number>) => {
  const turns = Array.from({ length: loops }, () => 0)
  return async (worker) => {
    const turn = turns[worker] ?? 0
    turns[worker] = turn + 1
    const partition = partitions[(turn * loops + worker) % partitions.length]
    const { rows } = await pool.query<{ id: string }>({
      name: 'pop',
      text: `WITH c AS (SELECT partition, head FROM public.raw_cursors WHERE partition = $1 FOR UPDATE),
             m AS (SELECT x.* FROM c, LATERAL (
               SELECT seq, id, transaction_id, trace_id, sealed, payload, created_at FROM public.raw_messages
               WHERE partition = $1 AND seq > c.head ORDER BY seq LIMIT ${batch}) x),
             u AS (UPDATE public.raw_cursors r SET head = coalesce((SELECT max(seq) FROM m), 0) WHERE r.partition = $1)
             SELECT * FROM m`,
      values: [partition],
    })
    return rows.length
  }
}

const app = bareApp()
onMeasure(app, 'push-one', ({ seconds }) => rowsIn(seconds, 1, push))
onMeasure(app, 'push-several', ({ seconds }) => rowsIn(seconds, pushLoops, push))
onMeasure(app, 'pop-one', ({ seconds }) => rowsIn(seconds, 1, popper(1)))
onMeasure(app, 'pop-several', ({ seconds }) => rowsIn(seconds, popLoops, popper(popLoops)))
onMeasure(app, 'count', async () => {
  const { rows } = await pool.query<{ rows: number }>('SELECT count(*)::int AS rows FROM public.raw_messages')
  return rows[0] ?? {}
})
await listen(app, () => pool.end())
