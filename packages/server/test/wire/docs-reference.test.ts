/** The reference pages describe the running server: its settings, its metrics and its routes with their roles. */
import { execFile } from 'node:child_process'
import { fileURLToPath } from 'node:url'
import { promisify } from 'node:util'
import { afterAll, beforeAll, expect, it } from 'vitest'
import { freshDatabase, type TestDatabase } from '../../../spillway/test/setup/database.js'
import { endAll, type ServerProcess, startServer } from '../server-process.js'

const generator = fileURLToPath(new URL('../../../../scripts/generate-docs.mjs', import.meta.url))

let database: TestDatabase
let server: ServerProcess

beforeAll(async () => {
  database = await freshDatabase()
  server = await startServer({ DATABASE_URL: database.url })
})

afterAll(async () => {
  await endAll()
  await database.drop()
})

it('settings.md, metrics.md and http.md are what the server has', async () => {
  const { stderr } = await promisify(execFile)(process.execPath, [generator, '--check', server.origin])
  expect(stderr).toBe('')
})
