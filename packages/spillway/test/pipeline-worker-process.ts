/** A worker for tests to kill: it writes inside an operation's transaction, says so on a line, and never ends. */
import Type from 'typebox'
import { createIntake, postgres } from '../src/index.js'

const [url] = process.argv.slice(2)
if (!url) throw new Error('usage: pipeline-worker-process <database url>')

const intake = await createIntake({ store: postgres({ url }), leaseMs: 1_000 })
intake.define('op', {
  body: Type.Object({ lane: Type.String(), n: Type.Integer() }),
  lane: (body) => ['q', body.lane],
  run: async (body, ctx) => {
    await ctx.tx.query('INSERT INTO effects (lane, n, who) VALUES ($1, $2, $3)', [body.lane, body.n, 'killed'])
    if (body.n < 3) return
    process.stdout.write(`${JSON.stringify({ lane: body.lane, n: body.n })}\n`)
    await new Promise(() => undefined)
  },
})
