/**
 * Random interleavings of everything that can happen to the queue, against a model of it. FC_SEED repeats a run,
 * FC_SECONDS gives it longer, FC_COMMANDS makes it deeper.
 */
import fc from 'fast-check'
import { afterAll, beforeAll, expect, it } from 'vitest'
import { type OpenStore, storesOn } from '../conformance/harness.js'
import { commands, drainAll, type Real } from '../model/commands.js'
import { QueueModel } from '../model/queue-model.js'
import { freshDatabase, type TestDatabase } from '../setup/database.js'

const seed = Number(process.env.FC_SEED ?? Date.now() % 0x7fffffff)
const seconds = Number(process.env.FC_SECONDS ?? (process.env.CI ? 60 : 20))
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

async function runOnce(list: Iterable<fc.AsyncCommand<QueueModel, Real>>): Promise<void> {
  const opened = await open()
  try {
    const model = await QueueModel.on(opened)
    await fc.asyncModelRun(() => ({ model, real: {} }), list)
    await drainAll(model)
    expect(new Set(model.completed).size).toBe(model.completed.length)
  } finally {
    await opened.close()
  }
}

it('does what the model does, whatever happens', { timeout: (seconds + graceSeconds) * 1_000 }, async () => {
  process.stdout.write(`queue model: FC_SEED=${seed}\n`)
  let runs = 0
  // When the time is up fast-check leaves a run alone that is under way; the database has to outlast it.
  let underWay: Promise<void> = Promise.resolve()
  try {
    await fc.assert(
      fc.asyncProperty(commands(commandsMax), (list) => {
        underWay = runOnce(list)
        return underWay.then(() => {
          runs++
        })
      }),
      {
        seed,
        numRuns: 100_000,
        interruptAfterTimeLimit: seconds * 1_000,
        markInterruptAsFailure: false,
        endOnFailure: false,
      },
    )
  } finally {
    await Promise.allSettled([underWay])
  }
  process.stdout.write(`queue model: ${runs} runs\n`)
  expect(runs).toBeGreaterThan(3)
})
