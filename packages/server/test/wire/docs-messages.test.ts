/** What docs/guides/messages.md shows is run as it stands there. */
import { spawn } from 'node:child_process'
import { once } from 'node:events'
import { mkdtemp, rm, writeFile } from 'node:fs/promises'
import { tmpdir } from 'node:os'
import { join } from 'node:path'
import { afterAll, beforeAll, describe, expect, it } from 'vitest'
import { freshDatabase, type TestDatabase } from '../../../spillway/test/setup/database.js'
import { atOrigin, blocksOf, commandsOf, matching, runBlock } from '../docs-page.js'
import { configure, pushed } from '../message-calls.js'
import { endAll, get, type ServerProcess, startServer, until } from '../server-process.js'

const blocks = await blocksOf('messages.md')
/** Run by other means: below, and with a key that the server has here from its start. */
const elsewhere = /^(node consume\.mjs|SPILLWAY_ENCRYPTION_KEY=)/
const commands = commandsOf(blocks, elsewhere)

let database: TestDatabase
let server: ServerProcess
let folder: string

beforeAll(async () => {
  database = await freshDatabase()
  server = await startServer({ DATABASE_URL: database.url, SPILLWAY_ENCRYPTION_KEY: 'c0ffee11'.repeat(8) })
  folder = await mkdtemp(join(tmpdir(), 'spillway-docs-'))
})

afterAll(async () => {
  await endAll()
  await database.drop()
  await rm(folder, { recursive: true })
})

const here = (text: string): string => atOrigin(text, server.origin)

/** The status of the queues once all blocks have run. */
async function statusAt(path: string): Promise<Record<string, unknown>> {
  return (await get(server, path)).body
}

describe('docs/guides/messages.md', () => {
  it('shows commands that are answered as it says', async () => {
    // The page's placeholders: of the delivery that its third block is given.
    const variables = { LEASE: '', PARTITION: '' }
    for (const { text, answer } of commands) {
      const answers = await runBlock(text, { origin: server.origin, folder, variables })
      expect(answers.length, text).toBe(text.match(/^curl /gm)?.length)
      if (answer !== undefined) expect(answers, text).toContainEqual(matching(answer))
      const [{ leaseId, partitionId }] = answers as [Record<string, string>]
      if (variables.LEASE === '' && leaseId !== undefined) {
        Object.assign(variables, { LEASE: leaseId, PARTITION: partitionId })
      }
    }
    expect(variables.LEASE).not.toBe('')
    // What the page acks, moves and ends is so: order-3 and order-4 are before the one group that is left.
    expect(await statusAt('/api/v1/status/queues/shipments')).toMatchObject({ totals: { total: 1 } })
    await until('the push that waited is stored', async () => {
      const { totals } = await statusAt('/api/v1/status/queues/orders')
      return (totals as { total: number }).total === 4
    })
    expect(await statusAt('/api/v1/status/queues/orders')).toMatchObject({
      consumerGroups: [{ name: 'shipping', depth: 2, processing: 0 }],
    })
  })

  it('has a consumer that reads a queue in order, and hands back what stands behind a failure', async () => {
    const script = blocks.find(({ text }) => text.startsWith('// consume.mjs'))?.text ?? ''
    const name = 'consume.mjs'
    // Fails over the second message, the first time.
    const handling = 'console.log(JSON.stringify(data))'
    expect(script).toContain(handling)
    const failing = `if (data === 1 && !globalThis.failed) { globalThis.failed = true; throw new Error('not yet') }`
    await writeFile(join(folder, name), here(script).replace(handling, `${failing}\n  ${handling}`))
    await configure(server, 'numbers', { retryDelay: 0 })
    await pushed(
      server,
      [0, 1, 2, 3].map((payload) => ({ queue: 'numbers', payload })),
    )
    const consumer = spawn(process.execPath, [name, 'numbers', 'printing'], { cwd: folder, stdio: 'pipe' })
    try {
      let said = ''
      consumer.stdout.setEncoding('utf8').on('data', (text: string) => {
        said += text
      })
      await until('all are printed', () => said.split('\n').length > 4)
      expect(said).toBe('0\n1\n2\n3\n')
      await until('all are settled', async () => {
        const { consumerGroups } = await statusAt('/api/v1/status/queues/numbers')
        return (consumerGroups as { depth: number }[])[0]?.depth === 0
      })
    } finally {
      consumer.kill('SIGKILL')
      await once(consumer, 'exit')
    }
  })

  it('shows no command that is not run here', () => {
    const shown = blocks.filter(({ language }) => language === 'sh')
    expect(shown.length - commands.length).toBe(2)
    expect(commands.filter(({ answer }) => answer !== undefined).length).toBeGreaterThanOrEqual(7)
  })
})
