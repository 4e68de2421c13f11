/** A process for tests to kill: it has locked a due schedule and queued its operation, and never commits. */
import Type from 'typebox'
import { createIntake, postgres } from '../src/index.js'
import type { Store } from '../src/store/port.js'

const [url] = process.argv.slice(2)
if (!url) throw new Error('usage: schedule-process <database url>')

const store: Store = postgres({ url })
const moveSchedule: Store['moveSchedule'] = async () => {
  process.send?.('locked')
  await new Promise(() => undefined)
}
const intake = await createIntake({ store: { ...store, moveSchedule }, role: 'direct' })
const clean = intake.define('clean', { body: Type.Object({ at: Type.String() }), run: () => undefined })
intake.schedule('0 * * * *', clean, (dueAt) => ({ at: dueAt.toISOString() }))
