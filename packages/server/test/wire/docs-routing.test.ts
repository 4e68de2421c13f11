/** What docs/guides/routing.md shows is run as it stands there. */
import { mkdtemp, rm } from 'node:fs/promises'
import { tmpdir } from 'node:os'
import { join } from 'node:path'
import { afterAll, beforeAll, describe, expect, it } from 'vitest'
import { freshDatabase, type TestDatabase } from '../../../spillway/test/setup/database.js'
import { blocksOf, commandsOf, matching, runBlock } from '../docs-page.js'
import { endAll, get, type ServerProcess, startServer, until } from '../server-process.js'

const commands = commandsOf(await blocksOf('routing.md'))

let database: TestDatabase
let server: ServerProcess
let folder: string

beforeAll(async () => {
  database = await freshDatabase()
  server = await startServer({ DATABASE_URL: database.url })
  folder = await mkdtemp(join(tmpdir(), 'spillway-docs-'))
})

afterAll(async () => {
  await endAll()
  await database.drop()
  await rm(folder, { recursive: true })
})

describe('docs/guides/routing.md', () => {
  it('shows commands that are answered as it says', async () => {
    let ticket = ''
    for (const { text, answer } of commands) {
      const answers = await runBlock(text, { origin: server.origin, folder })
      expect(answers.length, text).toBe(text.match(/^curl /gm)?.length)
      expect(answers, text).toContainEqual(matching(answer))
      const [first] = answers as [{ operationId?: string }]
      ticket ||= first.operationId ?? ''
    }
    await until('the ticket has its decision', async () => {
      const { body } = await get(server, `/api/v1/operations/${ticket}`)
      return body.status === 'completed'
    })
    const { body } = await get(server, `/api/v1/operations/${ticket}`)
    expect(body.result).toMatchObject({ ok: true, decision: { provider_id: 'cheap' } })
  })

  it('shows an answer below each command', () => {
    expect(commands.length).toBe(8)
    expect(commands.filter(({ answer }) => answer === undefined)).toEqual([])
  })
})
