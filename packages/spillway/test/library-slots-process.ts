/** A worker for tests to kill: both of its operations say on a line that they run, and never end. */
import Type from 'typebox'
import { createIntake, postgres } from '../src/index.js'

const [url] = process.argv.slice(2)
if (!url) throw new Error('usage: library-slots-process <database url>')

const intake = await createIntake({ store: postgres({ url }), leaseMs: 1_000 })
const run = (_: unknown, { type }: { type: string }): Promise<never> => {
  process.stdout.write(`${type}\n`)
  return new Promise(() => undefined)
}
const body = Type.Object({ n: Type.Integer() })
intake.define('short', { body, lane: ({ n }) => ['short', `${n}`], run })
intake.define('long', { body, lane: ({ n }) => ['long', `${n}`], slots: { name: 'long', concurrency: 2 }, run })
