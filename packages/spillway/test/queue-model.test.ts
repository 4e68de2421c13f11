/**
 * Random interleavings of everything that can happen to the queue, against a model of it. FC_SEED repeats a run,
 * FC_SECONDS gives it longer, FC_COMMANDS makes it deeper.
 */
import fc from 'fast-check'
import { afterAll, beforeAll, expect, it } from 'vitest'
import { type OpenStore, storesOn } from './conformance/harness.js'
import { commands, drainAll } from './model/commands.js'
import { QueueModel } from './model/queue-model.js'
import { freshDatabase, type TestDatabase } from './setup/database.js'

const seed = Number(process.env.FC_SEED ?? Date.now() % 0x7fffffff)
const seconds = Number(process.env.FC_SECONDS ?? 30)
const commandsMax = Number(process.env.FC_COMMANDS ?? 60)
/** Shrinking goes on after the time is up; each run of a shrunk case takes a second at most. */
const graceSeconds = 60

let database: TestDatabase
let open: OpenStore

beforeAll(async () => {
  database = await freshDatabase()
  open = storesOn(database.url)
})
afterAll(() => database.drop())

it('does what the model does, whatever happens', { timeout: (seconds + graceSeconds) * 1_000 }, async () => {
  process.stdout.write(`queue model: FC_SEED=${seed}\n`)
  let runs = 0
  await fc.assert(
    fc.asyncProperty(commands(commandsMax), async (list) => {
      const opened = await open()
      try {
        const model = await QueueModel.on(opened)
        await fc.asyncModelRun(() => ({ model, real: {} }), list)
        await drainAll(model)
        expect(new Set(model.completed).size).toBe(model.completed.length)
        runs++
      } finally {
        await opened.close()
      }
    }),
    {
      seed,
      numRuns: 100_000,
      interruptAfterTimeLimit: seconds * 1_000,
      markInterruptAsFailure: false,
      endOnFailure: false,
    },
  )
  process.stdout.write(`queue model: ${runs} runs\n`)
  expect(runs).toBeGreaterThan(3)
})
