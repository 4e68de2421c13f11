/** One of several workers that share the turns of a key; for tests to kill. Each run is a row with its beginning and its end. */
import { setTimeout as delay } from 'node:timers/promises'
import pg from 'pg'
import { createIntake, postgres } from '../src/index.js'

const [url, runMs] = process.argv.slice(2)
if (!url) throw new Error('usage: turns-worker-process <database url> <ms>')

const pool = new pg.Pool({ connectionString: url, max: 4 })
const intake = await createIntake({ store: postgres({ url }), leaseMs: 1_000 })
intake.define('op', {
  lane: { key: () => 'key', concurrency: 3 },
  run: async (_, { id }) => {
    const { rows } = await pool.query('INSERT INTO runs (op, began) VALUES ($1, clock_timestamp()) RETURNING at', [id])
    process.stdout.write('runs\n')
    await delay(Number(runMs))
    await pool.query('UPDATE runs SET ended = clock_timestamp() WHERE at = $1', [rows[0]?.at])
  },
})
