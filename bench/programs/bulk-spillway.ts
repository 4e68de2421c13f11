/** A thousand operations in one call: `submitMany` of the library, without lanes and over 200 of them. */
import { createIntake, postgres } from 'spillway'
import { bulkBodies, bulkSize } from './bulk-body.js'
import { env, envNumber } from './env.js'
import { bareApp, listen, log } from './handler-app.js'
import { onMeasure, rowsIn } from './measured.js'

// Without workers what is accepted stays: accepting is measured, not draining.
const intake = await createIntake({
  store: postgres({ url: env('DATABASE_URL'), poolMax: envNumber('POOL_MAX'), log }),
  log,
  role: 'direct',
})
const run = async (): Promise<null> => null
const plain = intake.define('bulk.plain', { run })
const laned = intake.define('bulk.laned', {
  lane: (body) => ['bulk', String((body as { partition: string }).partition)],
  run,
})

const app = bareApp()
for (const [name, definition] of [
  ['plain', plain],
  ['laned', laned],
] as const) {
  onMeasure(app, name, ({ seconds }) =>
    rowsIn(seconds, 1, async () => {
      const answers = await intake.submitMany(definition, bulkBodies)
      const other = answers.find(({ kind }) => kind !== 'queued')
      if (other !== undefined) throw new Error(`an operation was ${other.kind}, not queued`)
      return bulkSize
    }),
  )
}

await listen(app, () => intake.close())
