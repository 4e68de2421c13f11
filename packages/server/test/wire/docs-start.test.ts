/** What docs/guides/start.md and http-request.md show is run in its order, against a real server. */
import { afterAll, beforeAll, describe, expect, it } from 'vitest'
import { freshDatabase, type TestDatabase } from '../../../spillway/test/setup/database.js'
import { blocksOf, commandsOf, matching, runBlock } from '../docs-page.js'
import { endAll, type ServerProcess, startServer } from '../server-process.js'

const pages = ['start.md', 'http-request.md']

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

describe.each(pages)('docs/guides/%s', (page) => {
  it('shows commands that are answered as it says', async () => {
    const commands = commandsOf(await blocksOf(page))
    expect(commands.length).toBeGreaterThan(0)
    const variables: Record<string, string> = {}
    for (const { text, answer } of commands) {
      const [answered] = await runBlock(text, { origin: server.origin, folder: '.', variables })
      expect(answered, text).toEqual(matching(answer))
      const { operationId } = answered as { operationId?: string }
      if (operationId !== undefined) variables.ID = operationId
    }
  })
})
